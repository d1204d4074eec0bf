"""A zoo of maps with known answers, and the builders that the tests share.

Nothing here calls pcdeq for an expected value: activations are written in numpy, operators as plain
matrices filled by loops, fixed points found by a Newton iteration of ten lines or chosen in advance
("manufactured": pick the answer z, then x = s⁻¹(z) - Wz is the input that has it).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import pcdeq

Array = np.ndarray


@dataclass(frozen=True)
class Facts:
    """What mathematics says about one activation on [0, inf)."""

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    inverse: Callable[[Array], Array]
    supremum: float
    kind: int
    kink: float | None = None


def _logistic(y: Array) -> Array:
    return 1 / (1 + np.exp(-y))


def _sech(y: Array) -> Array:
    return 2 * np.exp(-y) / (1 + np.exp(-2 * y))


FACTS: dict[str, Facts] = {
    "tanh": Facts(np.tanh, lambda y: _sech(y) ** 2, np.arctanh, 1.0, 1),
    "softsign": Facts(lambda y: y / (1 + y), lambda y: 1 / (1 + y) ** 2, lambda z: z / (1 - z), 1.0, 1),
    "relu6": Facts(lambda y: np.minimum(y, 6), lambda y: np.where(y < 6, 1.0, 0.0), lambda z: z, 6.0, 1, 6.0),
    "sigmoid": Facts(_logistic, lambda y: np.exp(-y) / (1 + np.exp(-y)) ** 2, lambda z: np.log(z / (1 - z)), 1.0, 2),
    "log1p": Facts(np.log1p, lambda y: 1 / (1 + y), np.expm1, math.inf, 1),
    "arctan": Facts(np.arctan, lambda y: 1 / (1 + y**2), np.tan, math.pi / 2, 1),
    "1-exp": Facts(lambda y: -np.expm1(-y), lambda y: np.exp(-y), lambda z: -np.log1p(-z), 1.0, 1),
    "isru": Facts(
        lambda y: y / np.sqrt(1 + y**2), lambda y: (1 + y**2) ** -1.5, lambda z: z / np.sqrt(1 - z**2), 1.0, 1
    ),
    "hard-tanh": Facts(lambda y: np.minimum(y, 1), lambda y: np.where(y < 1, 1.0, 0.0), lambda z: z, 1.0, 1, 1.0),
    "hard-sigmoid": Facts(
        lambda y: np.minimum(y / 6 + 0.5, 1), lambda y: np.where(y < 3, 1 / 6, 0.0), lambda z: 6 * z - 3, 1.0, 2, 3.0
    ),
}
ACTIVATIONS = tuple(FACTS)
PAPER_ACTIVATIONS = ("tanh", "softsign", "relu6", "sigmoid")
KIND_1 = tuple(name for name, facts in FACTS.items() if facts.kind == 1)


# Operators of the user's own: what the documentation asks for and no more.


class GraphMap(pcdeq.LinearMap):
    """z -> A z Wᵀ on (samples, nodes, features)."""

    def __init__(self, weight: Tensor, adjacency: Tensor) -> None:
        super().__init__(weight)
        self.adjacency = adjacency

    def apply(self, z: Tensor) -> Tensor:
        return self.adjacency @ z @ self.weight.T

    def adjoint(self, y: Tensor) -> Tensor:
        return self.adjacency.T @ y @ self.weight


class Graph(pcdeq.Operator):
    """An operator with its own adjoint, on a fixed directed graph."""

    def __init__(self, features: int = 2, weight_norm: bool = True) -> None:
        super().__init__((features, features), state_ndim=2, weight_norm=weight_norm)
        self.register_buffer("adjacency", torch.tensor([[0.0, 0.75, 0.25], [0.0, 0.0, 1.0], [0.5, 0.0, 0.25]]))

    def bind(self, weight: Tensor) -> pcdeq.LinearMap:
        return GraphMap(weight, self.adjacency.to(weight.dtype))


class CirculantMap(pcdeq.LinearMap):
    """z_i -> Σ_k w_k z_{i-k}, indices modulo the length: apply only, the rest is left to autograd."""

    def apply(self, z: Tensor) -> Tensor:
        return sum(w * z.roll(k, -1) for k, w in enumerate(self.weight[0].unbind()))


class Circulant(pcdeq.Operator):
    """An operator that knows nothing but how to apply itself."""

    def __init__(self, taps: int = 3, weight_norm: bool = True) -> None:
        super().__init__((1, taps), state_ndim=1, weight_norm=weight_norm)

    def bind(self, weight: Tensor) -> pcdeq.LinearMap:
        return CirculantMap(weight)


# Layers by the name of their operator, each with the shape of one small sample.
STATES: dict[str, tuple[int, ...]] = {
    "dense": (3,),
    "conv1d": (2, 4),
    "conv2d": (2, 3, 2),
    "conv3d": (1, 2, 3, 2),
    "graph": (3, 2),
    "circulant": (4,),
}
OPERATORS = tuple(STATES)


def make_layer(
    operator: str,
    activation: str | pcdeq.Activation = "tanh",
    *,
    gain: float = 0.8,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    weight_norm: bool = True,
    **options,
) -> pcdeq.PcDEQ:
    """A layer of random weights whose rows have Euclidean norm ``gain`` or a little less."""
    generator = torch.Generator().manual_seed(seed)
    channels = STATES[operator][0]
    if operator == "dense":
        layer = pcdeq.PcDEQLinear(channels, activation, weight_norm=weight_norm, **options)
    elif operator.startswith("conv"):
        convolution = {"conv1d": pcdeq.PcDEQConv1d, "conv2d": pcdeq.PcDEQConv2d, "conv3d": pcdeq.PcDEQConv3d}
        layer = convolution[operator](channels, activation, weight_norm=weight_norm, **options)
    else:
        custom = {"graph": Graph, "circulant": Circulant}[operator]
        layer = pcdeq.PcDEQ(custom(weight_norm=weight_norm), activation, **options)
    layer.to(dtype)
    shape = tuple((layer.operator.weight_v if weight_norm else layer.operator.weight).shape)
    direction = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.05
    length = gain * (0.7 + 0.3 * torch.rand((shape[0], *[1] * (len(shape) - 1)), generator=generator).double())
    with torch.no_grad():
        if weight_norm:
            layer.operator.weight_v.copy_(direction)
            layer.operator.weight_g.copy_(length)
        else:
            norm = direction.flatten(1).norm(dim=1).reshape(length.shape)
            layer.operator.weight.copy_(length * direction / norm)
    return layer


def make_input(operator: str, samples: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random real input, (samples, *state)."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn((samples, *STATES[operator]), generator=generator, dtype=torch.float64).to(dtype)


def scalar_layer(weight: float, activation: str | pcdeq.Activation, dtype=torch.float64, **options) -> pcdeq.PcDEQ:
    """One unit, z = s(weight z + x), whose input is x itself."""
    options.setdefault("injection", lambda x: x)
    layer = pcdeq.PcDEQLinear(1, activation, weight_norm=False, **options).to(dtype)
    with torch.no_grad():
        layer.operator.weight.fill_(weight)
    return layer


def contract(layer: pcdeq.PcDEQ, norm: float = 0.5) -> pcdeq.PcDEQ:
    """Scale the weight to at most this spectral norm (of a convolution: the sum over taps), hence so the map."""
    with torch.no_grad():
        weight = layer.operator.effective_weight().double()
        taps = weight[None] if weight.ndim == 2 else weight.flatten(2).permute(2, 0, 1)
        (layer.operator.weight_g if layer.operator.weight_norm else layer.operator.weight).mul_(
            norm / torch.linalg.matrix_norm(taps, 2).sum()
        )
    return layer


def by_threads(threads: int, function: Callable[[], object]):
    """What the function returns when torch has so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function()
    finally:
        torch.set_num_threads(before)


def as_array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def normalised(v: Array, g: Array) -> Array:
    """The paper's weight: g v / ‖v‖, row by row."""
    rows = v.reshape(len(v), -1)
    return (g.reshape(-1, 1) * rows / np.sqrt((rows**2).sum(1, keepdims=True))).reshape(v.shape)


def matrix_of(operator: str, weight: Array, state: tuple[int, ...]) -> Array:
    """The operator as an n x n matrix on flattened states, entry by entry."""
    if operator == "dense":
        return weight
    if operator == "graph":
        adjacency = np.array([[0.0, 0.75, 0.25], [0.0, 0.0, 1.0], [0.5, 0.0, 0.25]])
        return np.kron(adjacency, weight)
    if operator == "circulant":
        n = state[0]
        result = np.zeros((n, n))
        for i, (k, w) in itertools.product(range(n), enumerate(weight[0])):
            result[i, (i - k) % n] += w
        return result
    channels, space = state[0], state[1:]
    kernel = weight.shape[2:]
    result = np.zeros((*state, *state))
    for target in itertools.product(*map(range, space)):
        for offset in itertools.product(*map(range, kernel)):
            source = tuple(t + o - k // 2 for t, o, k in zip(target, offset, kernel, strict=True))
            if all(0 <= s < size for s, size in zip(source, space, strict=True)):
                for out, inn in itertools.product(range(channels), repeat=2):
                    result[(out, *target, inn, *source)] += weight[(out, inn, *offset)]
    n = math.prod(state)
    return result.reshape(n, n)


def layer_matrix(operator: str, layer: pcdeq.PcDEQ, state: tuple[int, ...] | None = None) -> Array:
    """The matrix that a layer's parameters stand for."""
    module = layer.operator
    if module.weight_norm:
        weight = normalised(as_array(module.weight_v), as_array(module.weight_g))
    else:
        weight = as_array(module.weight)
    return matrix_of(operator, weight, STATES[operator] if state is None else state)


def injected(x: Array, kind: int) -> Array:
    """The paper's injection: softplus with beta 5 for kind 1, ReLU for kind 2."""
    return np.logaddexp(0, 5 * x) / 5 if kind == 1 else np.maximum(x, 0)


def fixed_point_of(matrix: Array, x: Array, facts: Facts) -> Array:
    """z = s(Wz + x) for one input (n,), by Newton's method from above (T7)."""
    bound = facts.supremum
    if math.isinf(bound):
        bound = 1.0
        while facts.value(matrix.sum(1).max() * bound + x.max()) > bound:
            bound *= 2
    z = np.full(x.shape, bound)
    for _ in range(200):
        p = matrix @ z + x
        value = facts.value(p)
        if (np.abs(z - value) <= 4e-16 * z).all():
            break
        new = z - np.linalg.solve(np.eye(len(x)) - facts.slope(p)[:, None] * matrix, z - value)
        z = np.where((new > 0) & (new <= value), new, value)  # the plain step where rounding spoils Newton's
    return facts.value(matrix @ z + x)


def reference_solution(operator: str, activation: str, layer: pcdeq.PcDEQ, x: Tensor) -> Array:
    """What ``layer(x)`` should be, from its parameters alone."""
    facts = FACTS[activation]
    matrix = layer_matrix(operator, layer)
    flat = injected(as_array(x), facts.kind).reshape(len(x), -1)
    return np.stack([fixed_point_of(matrix, row, facts) for row in flat]).reshape(x.shape)


@dataclass(frozen=True)
class Known:
    """A layer, an input, and the fixed point chosen before either."""

    layer: pcdeq.PcDEQ
    x: Tensor
    answer: Tensor
    condition: float  # ‖(I - J)⁻¹‖ at the answer: error per residual


def manufactured(operator: str, activation: str, seed: int = 0, **options) -> Known:
    """Choose p = Wz + x, hence z = s(p); then x = p - Wz."""
    facts = FACTS[activation]
    layer = make_layer(operator, activation, gain=1.0, seed=seed, injection=lambda x: x, weight_norm=False, **options)
    generator = np.random.default_rng(seed)
    n = math.prod(STATES[operator])
    top = 2.0 if facts.kink is None else 0.9 * facts.kink
    p = generator.uniform(0.1 * top, top, (3, n))
    z = facts.value(p)
    matrix = layer_matrix(operator, layer)
    scale = 0.7 / (z @ matrix.T / p).max()  # leaves x >= 0.3 p
    with torch.no_grad():
        layer.operator.weight.mul_(scale)
    matrix = layer_matrix(operator, layer)
    x = p - z @ matrix.T
    condition = max(np.linalg.norm(np.linalg.inv(np.eye(n) - facts.slope(row)[:, None] * matrix), 2) for row in p)

    def shaped(a: Array) -> Tensor:
        return torch.from_numpy(a).reshape(3, *STATES[operator])

    return Known(layer, shaped(x), shaped(z), condition)


def closed_forms() -> list[tuple[str, float, float, float]]:
    """(activation, W, x, z) of one unit, from the solution of a linear or quadratic equation."""
    forms = []
    for name, top in (("relu6", 6.0), ("hard-tanh", 1.0)):
        for w, x in ((0.5, 0.25), (0.9, 0.05), (0.25, 100.0), (1.0, 0.5), (30.0, 1e-3)):
            forms.append((name, w, x, min(x / (1 - w), top) if w < 1 else top))
    for w, x in ((0.5, 0.25), (2.0, 0.01), (50.0, 1e-3), (1.0, 1.0)):
        b = w - 1 - x  # w z² - b z - x = 0
        forms.append(("softsign", w, x, (b + math.sqrt(b * b + 4 * w * x)) / (2 * w)))
    for w, x in ((0.0, 0.0), (3.0, 0.2), (30.0, 1.0)):
        forms.append(("hard-sigmoid", w, x, min((x + 3) / (6 - w), 1.0) if w < 6 else 1.0))
    return forms
