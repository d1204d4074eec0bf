"""Every kind of claim that the package makes, put before the referee.

A claim is counted where it is made, and is false where the referee proves the opposite. An error that is not the
package's own counts as a failure, too. Only what the package does is done in odd surroundings (`Score.around`): cases
and verdicts are made in plain ones.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from hostile import referee
from hostile.generators import Case, Rng, case_of, exact, hostile_input, layer_case, network, scores
from hostile.surroundings import without_kernels
from torch import Tensor, nn

import pcdeq
from pcdeq.equation import Adjoint

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}  # of a residual, relative to the size of the values


class Score:
    """How many claims of each kind were made, and which were false."""

    def __init__(self, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.around = around
        self.made: Counter[str] = Counter()
        self.false: Counter[str] = Counter()
        self.details: list[str] = []

    def add(self, kind: str, made: np.ndarray | int | bool, wrong: np.ndarray | bool, detail: object = "") -> None:
        """Some claims of a kind, and which of them are false."""
        self.made[kind] += int(np.sum(made))
        wrong = np.logical_and(made, wrong)
        if wrong.any():
            self.false[kind] += int(wrong.sum())
            self.details.append(f"{kind}: {detail}")


@contextmanager
def quiet() -> Iterator[None]:
    """A solve that does not converge says so, and overflows are part of the game."""
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
        yield


# ------------------------------------------------------------------------------------------------- layers


def about_a_layer(score: Score, rng: Rng) -> str:
    """Enclosures, solves and gradients of one layer."""
    case = layer_case(rng)
    truth = case.truth.enclose(case.injected)
    name = describe(case)
    for claim in (enclosures, solves, certified_solves, questions, gradients, adjoints, neighbours):
        if claim is enclosures or rng.random() < 0.4:
            claim(score, rng, case, truth, name)
    return name


def describe(case: Case) -> str:
    layer = case.layer
    kind, weight = type(layer).__name__, case.truth.weight
    return (
        f"{kind} {tuple(case.x.shape)} {layer.activation.name} {case.x.dtype}, weight to {float(weight.max()):.3g}, "
        f"input {float(case.injected.min()):.3g} to {float(case.injected.max()):.3g}"
    )


def outside(case: Case, box: pcdeq.Enclosure, truth: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """For which samples the bounds are proved wrong; a NaN is no bound."""
    lower, upper = case.flat(box.lower), case.flat(box.upper)
    return (~(lower <= truth[1]) | ~(upper >= truth[0])).any(1)


def enclosures(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    width = None if rng.random() < 0.7 else float(10 ** rng.uniform(-12, -2))
    with score.around():
        box = case.layer.enclose(case.x, width=width)
    made = box.certified.numpy()
    score.add("enclosure", made, outside(case, box, truth), name)
    if width is not None:
        wide = (box.width.reshape(case.samples, -1) > width).any(1).numpy()
        score.add("width", made, wide, name)


def solves(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    """Converged answers: the residual is what is said, and no worse than plain torch's."""
    tol = float(10 ** rng.uniform(-6, -2))
    kinds = (pcdeq.Anderson, pcdeq.Anderson, pcdeq.Picard, pcdeq.Newton)
    solver = kinds[int(rng.integers(len(kinds)))](tol=tol, max_steps=500)
    with score.around():
        solution = case.layer.solve(case.x, solver=solver)
    with without_kernels():
        plain = case.layer.solve(case.x, solver=solver)
    dtype = torch.promote_types(
        torch.promote_types(case.x.dtype, case.layer.operator.effective_weight().dtype), torch.float32
    )
    z = case.flat(solution.value)
    value = case.truth.map(z, case.injected)
    # What comes back is one step behind the residual that was looked at, and the step may stretch it by the Jacobian.
    jacobian = case.truth.jacobian(z, case.injected).astype(float)
    stretch = np.linalg.norm(np.nan_to_num(jacobian), axis=(1, 2))
    residual = _norm(value - z) / np.maximum(_norm(value), np.finfo(float).tiny)
    allowed = tol * np.maximum(1, 2 * stretch) + ROUNDING[dtype] * np.maximum(1, stretch)
    converged = solution.converged.numpy()
    score.add("converged: residual", converged, ~(residual <= allowed), f"{name} {solver}")
    middle = (truth[0] + truth[1]) / 2
    known = np.isfinite(truth[1]).all(1) & plain.converged.numpy()
    far = _norm(z - middle) > 100 * tol * _norm(middle)
    near = known & (_norm(case.flat(plain.value) - middle) <= 10 * tol * _norm(middle))
    wrong = converged & far & near
    if wrong.any() and _is_luck(case, solver, middle, tol):
        wrong = np.zeros_like(wrong)
    score.add("converged: as plain torch", converged & known, wrong, f"{name} {solver}")


def _is_luck(case: Case, solver: pcdeq.solvers.Solver, middle: np.ndarray, tol: float) -> bool:
    """Whether plain torch, too, now and then stops far from this layer's equilibria, for inputs moved by a millionth.

    A small residual is no small error: there no answer without a proof is worth more than another.
    """
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6):
        moved = 1 + size * torch.randn(case.x.shape, generator=generator)
        with without_kernels():
            plain = case.layer.solve((case.x * moved).to(case.x.dtype), solver=solver)
        far = _norm(case.flat(plain.value) - middle) > 100 * tol * _norm(middle)
        if (far & plain.converged.numpy()).any():
            return True
    return False


def _norm(values: np.ndarray) -> np.ndarray:
    return np.sqrt((values * values).sum(1))


def certified_solves(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    tol = float(10 ** rng.uniform(-5, -1))
    inner = pcdeq.Anderson if rng.random() < 0.7 else pcdeq.Picard
    with score.around():
        solution = case.layer.solve(case.x, solver=pcdeq.Certified(inner(tol=tol, max_steps=300)))
    z, made = case.flat(solution.value), solution.converged.numpy()
    distance = np.maximum(np.maximum(truth[0] - z, z - truth[1]), 0)  # at least so far from z*
    bound = np.minimum(exact(solution.residual), tol)
    # The value comes back in the dtype of x, which may have fewer digits than the proof.
    rounding = 0.0 if case.x.dtype in ROUNDING else float(torch.finfo(case.x.dtype).eps)
    allowed = (bound * (1 + 1e-6) + rounding) * _norm(z)
    score.add("certified solve", made, ~(_norm(distance) <= allowed), name)


def questions(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    """Every box that a question is asked about holds z*, if it says so."""
    seen: list[pcdeq.Enclosure] = []
    threshold = float(rng.choice(np.nan_to_num(truth[0].astype(float)).ravel())) * float(1 + 10 ** rng.uniform(-9, -1))

    def question(box: pcdeq.Enclosure) -> Tensor:
        seen.append(box)
        return ((box.lower > threshold) | (box.upper <= threshold)).flatten(1).all(1) & box.certified

    with score.around():
        solution = case.layer.solve(case.x, until=question)
    lower, upper = truth
    above, below = (lower > threshold), (upper <= threshold)
    decided = solution.converged.numpy()
    score.add("question decided", decided & np.isfinite(upper).all(1), ~(above | below).all(1), name)
    first = seen[0]
    score.add("enclosure in a question", first.certified.numpy(), outside(case, first, truth), name)


def gradients(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    grad = rng.normal(size=tuple(case.x.shape)) * 10 ** rng.uniform(-12, 12)
    grad = np.where(rng.random(grad.shape) < 0.1, 0, grad)
    if rng.random() < 0.1:
        grad[0] = float(rng.choice((np.inf, np.nan)))
    with score.around():
        box = case.layer.enclose_gradient(case.x, torch.from_numpy(grad))
    rows = grad.reshape(case.samples, -1).astype(np.longdouble)
    finite = np.isfinite(rows).all(1)
    low, high = case.truth.gradient(case.injected, np.where(finite[:, None], rows, 0))
    raw = exact(case.x).reshape(case.samples, -1)
    slope = 1 / (1 + np.exp(-5 * raw)) if case.layer.activation.kind == 1 else (raw > 0) * np.longdouble(1)
    lower, upper = case.flat(box.lower), case.flat(box.upper)
    low, high = (np.where(np.isfinite(end), end * slope, end) for end in (low, high))
    tiny = 64 * EPS_OF_LONG * np.maximum(np.abs(low), np.abs(high))
    made, wrong = box.certified.numpy(), ~((lower <= high + tiny) & (upper >= low - tiny)).all(1)
    score.add("gradient enclosure", made & finite, wrong, name)
    score.add("nothing proved of NaN", ~finite, made, f"gradient: {name}")


EPS_OF_LONG = np.finfo(np.longdouble).eps


def adjoints(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    """The proved error of an adjoint solve, at the slope in memory."""
    equation = case.layer.equation(case.x)
    slope = equation.slope(equation(equation.at_zero()))
    grad = torch.from_numpy(rng.normal(size=tuple(equation.x.shape))).to(slope.dtype)
    tol = float(10 ** rng.uniform(-5, -1))
    adjoint = Adjoint(equation.map, slope, grad)
    with score.around():
        solution = pcdeq.Certified(pcdeq.Anderson(tol=tol, max_steps=300)).solve_adjoint(adjoint)
    exactly = case.truth.adjoint(case.flat(slope), case.flat(grad))
    u, made = case.flat(solution.value), solution.converged.numpy()
    error = _norm(u - exactly)
    wrong = ~(error <= np.minimum(exact(solution.residual), tol) * (1 + 1e-6) * _norm(u) + 1e-15 * _norm(exactly))
    score.add("certified adjoint", made & np.isfinite(exactly).all(1), wrong, name)


def neighbours(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    """A sample that is not a number takes nothing from the others."""
    sick = torch.full_like(case.x[:1], float(rng.choice((np.nan, np.inf))))
    batch, grads = torch.cat([case.x, sick]), torch.ones_like(case.x)
    more = torch.cat([grads, grads[:1]])
    solver = pcdeq.Certified(pcdeq.Anderson(tol=1e-3, max_steps=200))
    for ask in (lambda x: case.layer.enclose(x).certified, lambda x: case.layer.solve(x, solver=solver).converged):
        with score.around():
            alone, together = ask(case.x), ask(batch)
        score.add("neighbours", alone.numpy(), (~together[:-1]).numpy(), name)
        score.add("nothing proved of NaN", bool(sick.isnan().any()), bool(together[-1]), name)
    with score.around():
        alone = case.layer.enclose_gradient(case.x, grads).certified
        together = case.layer.enclose_gradient(batch, more).certified
    score.add("neighbours", alone.numpy(), (~together[:-1]).numpy(), name)


def rates(score: Score, rng: Rng) -> str:
    """The a-priori rate is not below the true factor, and its number of steps is enough."""
    name, floor = str(rng.choice(list(referee.CURVES))), float(10 ** rng.uniform(-16, 12))
    tol = float(10 ** rng.uniform(-8, -1))
    layer = pcdeq.PcDEQLinear(1, activation=name, floor=floor)
    rate = layer.rate(tol)
    found = referee.elasticity(name, floor)
    told = f"{name} floor {floor!r} rate {rate.factor!r} true {found!r}"
    score.add("rate", rate.factor < 1, bool(np.longdouble(rate.factor) < found * (1 - 8 * EPS_OF_LONG)), told)
    if rate.steps is not None and rate.steps < 2000:
        truth = referee.Layer(np.array([[10 ** rng.uniform(-8, 4)]], np.longdouble), name)
        x = np.array([[np.longdouble(floor)]])
        low, high = truth.enclose(x)
        for start in (0.0, referee.CURVES[name].supremum):
            z = np.array([[np.longdouble(start)]])
            for _ in range(rate.steps):
                z = truth.map(z, x)
            away = max(float(np.log(low / z).max()), float(np.log(z / high).max()))
            score.add("steps", np.isfinite(high).all(), away > tol * (1 + 1e-12), told)
    return told


def tangents(score: Score, rng: Rng) -> str:
    """A forward-mode derivative is right or refused, never left out without a word."""
    layer = pcdeq.PcDEQLinear(int(rng.integers(1, 8)), activation=str(rng.choice(list(referee.CURVES)))).double()
    x = torch.from_numpy(rng.normal(size=(2, layer.operator.features)))
    direction = torch.from_numpy(rng.normal(size=tuple(x.shape)))
    recorded = bool(rng.random() < 0.5)
    case = case_of(layer, x)
    name = f"{describe(case)}, {'with' if recorded else 'without'} a graph"
    try:
        with torch.set_grad_enabled(recorded), torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, direction)
            tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    except (NotImplementedError, pcdeq.PcdeqError):
        score.add("tangent", 1, False)
        return name
    step = np.longdouble(1e-7)
    ends = [case_of(layer, x + side * direction * float(step)) for side in (1, -1)]
    after, before = (sum(end.truth.enclose(end.injected)) / 2 for end in ends)
    expected = torch.from_numpy(((after - before) / (2 * step)).astype(float))
    right = tangent is not None and torch.allclose(tangent, expected, rtol=1e-2, atol=1e-4)
    score.add("tangent", 1, not right, name)
    return name


def threads(score: Score, rng: Rng) -> str:
    """Several threads at one layer, with images of different sizes: each has its own right answer."""
    layer = pcdeq.PcDEQConv2d(2, activation=str(rng.choice(list(referee.CURVES))))
    inputs = [hostile_input(rng, (2, 2, side, side)).float().clamp(-1e3, 1e3) for side in range(2, 8)]
    alone = [layer.solve(x).value for x in inputs]
    wrong: list[str] = []

    def work(x: Tensor, expected: Tensor) -> None:
        try:
            for _ in range(3):
                layer(x).sum().backward()
                if not torch.allclose(
                    layer.solve(x, solver=pcdeq.Anderson(tol=1e-6)).value, expected, rtol=0.02, atol=1e-3
                ):
                    wrong.append("another answer")
        except Exception as error:
            wrong.append(repr(error))

    workers = [threading.Thread(target=work, args=pair) for pair in zip(inputs, alone, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    score.add("threads", 1, bool(wrong), wrong[:1])
    return layer.activation.name


# ----------------------------------------------------------------------------------------------- networks


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
