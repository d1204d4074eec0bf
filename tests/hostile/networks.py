"""Every kind of claim about networks, exported graphs and odd modules, put before the referee."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import torch
from hostile.claims import Score
from hostile.generators import Rng, exact, network, scores, settled, stack, stopped
from torch import Tensor, nn

import pcdeq
from pcdeq.export.graph import fixed_graph, loop_graph
from pcdeq.export.truncation import contractions, proved_error


def about_a_network(score: Score, rng: Rng) -> str:
    """Certified classes beside a boundary, and certified radii against attacks."""
    model, images = network(rng)
    true, error = scores(model, images)
    layers = [getattr(module, "activation", module) for module in model]
    name = f"{' '.join(getattr(layer, 'name', type(layer).__name__) for layer in layers)} {images.dtype}"
    shift_boundary(model, true, rng)
    true, error = scores(model, images)
    with score.around():
        certificate = pcdeq.certify(model, images)
    score.add("certificate", *judge(certificate, true, error), name)
    if rng.random() < 0.5:
        about_a_radius(score, rng, model, images, name)
    return name


@torch.no_grad()
def shift_boundary(model: nn.Sequential, true: np.ndarray, rng: Rng) -> None:
    """Bring the first image to within 1e-1 to 1e-9 of a boundary between two classes, by the last bias."""
    order = np.argsort(np.nan_to_num(true[0]).astype(float))
    size = np.abs(true[0]).max() + 1
    lead = float(true[0, order[-1]] - true[0, order[-2]]) + float(size) * rng.choice((-1, 1)) * 10 ** rng.uniform(
        -9, -1
    )
    if np.isfinite(lead):
        model[-1].bias[int(order[-2])] += lead


def judge(certificate: pcdeq.Certificate, true: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which classes are proved, and for which of them another class, or a smaller lead, is true."""
    rows, classes = np.arange(len(true)), certificate.classes.numpy()
    own = true[rows, classes]
    others = true.copy()
    others[rows, classes] = -np.inf
    lead = own - others.max(1)
    known = np.isfinite(error)
    return certificate.proved.numpy() & known, ~(lead + 2 * error >= np.maximum(exact(certificate.margin), 0))


def about_a_radius(score: Score, rng: Rng, model: nn.Sequential, images: Tensor, name: str) -> None:
    """Steps against the gradient, and random corners, look for another class within the radius that is certified."""
    images, wide = images[:4], copy.deepcopy(model).double()
    x = images.double().requires_grad_()
    best = wide(x).topk(2).values
    (slope,) = torch.autograd.grad((best[:, 0] - best[:, 1]).sum(), x)
    # About where the first image loses its class, if it goes straight against the gradient.
    radius = float((best[0, 0] - best[0, 1]) / slope[0].abs().sum().clamp(min=1e-30)) * rng.uniform(0.5, 1.05)
    if not 0 < radius < 1e3 or rng.random() < 0.3:
        radius = float(images.abs().max()) * 10 ** rng.uniform(-6, -1)
    bounds = str(rng.choice(("best", "intervals", "linear")))
    name = f"{name} radius {radius:.3g} {bounds}"
    with score.around():
        certificate = pcdeq.certify(model, images, radius=radius, bounds=bounds)
    for attempt in range(4):
        corner = torch.from_numpy(rng.choice((-1.0, 1.0), tuple(x.shape)))
        direction = corner if attempt else -slope.sign()
        true, error = scores(model, x.detach() + direction * radius * (1 - 1e-12))
        score.add("certificate with radius", *judge(certificate, true, error), name)


def exports(score: Score, rng: Rng) -> str:
    """The proved error of a graph that stops its iterations: no logit is further from the exact network's (T4)."""
    model, images = stack(rng)
    depth = [int(rng.integers(1, 13)) for module in model if isinstance(module, pcdeq.PcDEQ)]
    tol = float(10 ** rng.uniform(-6, -1)) if rng.random() < 0.4 else None
    with score.around():
        graph = fixed_graph(model, tuple(depth)) if tol is None else loop_graph(model, tol, 2000)
        rates = contractions(graph)
        bound = math.inf if rates is None else proved_error(graph, rates)
    names = [f"{layer.activation.name} floor {layer.floor:.3g}" for layer in graph.equilibria]
    told = f"{names} steps {depth if tol is None else tol}, bound {bound:.3g}"
    true, off = scores(graph.layers, images, settled)
    found, unfinished = scores(graph.layers, images, stopped)
    error, known = np.abs(found - true).max(1), np.isfinite(off + unfinished)
    score.add("export", known & np.isfinite(bound), error > bound + 2 * np.where(known, off, 0), told)
    return told


# ------------------------------------------------------------------------------------------- odd modules


class _Negative(pcdeq.LinearMap):
    def apply(self, z: Tensor) -> Tensor:
        return z @ (self.weight - 0.3).T


class _NegativeOperator(pcdeq.Operator):
    def __init__(self, size: int) -> None:
        super().__init__((size, size), state_ndim=1, weight_norm=False)

    def bind(self, weight: Tensor) -> pcdeq.LinearMap:
        return _Negative(weight)


class _Doubling(pcdeq.PcDEQLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


class _Shifted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).flip(1)


def _hooked(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda module, inputs, out: -out)


def _replaced(model: nn.Sequential) -> None:
    model[2].inject = lambda x: x.abs() + 1


def _blind(model: nn.Sequential) -> None:
    model[1].track_running_stats, model[1].running_mean, model[1].running_var = False, None, None


def _subclassed(model: nn.Sequential) -> None:
    model[2] = _Doubling(model[2].operator.features)


def _turned(model: nn.Sequential) -> None:
    model[-1] = _Shifted(model[-1].in_features, model[-1].out_features)


def _normed(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


def _lost(model: nn.Sequential) -> None:
    model[0].weight.data[0, 0] = float("nan")


ODDITIES: tuple[Callable[[nn.Sequential], None], ...] = (
    _hooked,
    _replaced,
    _blind,
    _subclassed,
    _turned,
    _normed,
    _lost,
)


def odd_modules(score: Score, rng: Rng) -> str:
    """A network that is not what it seems is refused, or what is proved is what it computes."""
    if rng.random() < 0.3:
        return negative_operators(score, rng)
    size = int(rng.integers(2, 6))
    layers = [nn.Linear(size, size), nn.BatchNorm1d(size), pcdeq.PcDEQLinear(size), nn.Linear(size, 3)]
    model = nn.Sequential(*layers).eval()
    oddity = ODDITIES[int(rng.integers(len(ODDITIES)))]
    with torch.no_grad():
        oddity(model)
    model.eval()
    images = torch.from_numpy(rng.normal(size=(8, size))).float()
    try:
        with score.around():
            certificate = pcdeq.certify(model, images)
    except pcdeq.PcdeqError:
        score.add("odd module", 1, False)
        return oddity.__name__
    with torch.no_grad():
        out = model(images)
    lead = out.topk(2).values
    clear = ((lead[:, 0] - lead[:, 1]) > 1e-3).numpy()
    wrong = (certificate.classes != out.argmax(1)).numpy()
    score.add("odd module", certificate.proved.numpy(), (clear & wrong) | out.isnan().any(1).numpy(), oddity.__name__)
    return oddity.__name__


def negative_operators(score: Score, rng: Rng) -> str:
    layer = pcdeq.PcDEQ(_NegativeOperator(int(rng.integers(1, 6))))
    x = torch.from_numpy(rng.normal(size=(2, layer.operator.shape[0]))).float()
    for given in (None, x):
        with score.around():
            holds = pcdeq.check(layer, given).holds
        score.add("check", 1, holds, "an operator with negative entries")
    try:
        with score.around():
            certified = layer.enclose(x).certified
        score.add("odd module", 1, bool(certified.any()), "an operator with negative entries")
    except pcdeq.PcdeqError:
        score.add("odd module", 1, False)
    return "negative operator"
