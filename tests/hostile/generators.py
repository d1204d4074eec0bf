"""Hostile layers, inputs and networks, each a function of one seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hostile import referee
from torch import Tensor, nn

import pcdeq
from pcdeq.unrolling import Equilibrium, FixedSteps

RADII = (0.5, 0.9, 0.99, 0.999999, 1.0, 1.000001, 2.0, 50.0)
DTYPES = (torch.float32,) * 6 + (torch.float64,) * 3 + (torch.bfloat16, torch.float16)
Rng = np.random.Generator


@dataclass(frozen=True)
class Case:
    """A layer and a batch for it, and the same as the referee sees them."""

    layer: pcdeq.PcDEQ
    x: Tensor
    truth: referee.Layer
    injected: np.ndarray  # (samples, n)

    @property
    def samples(self) -> int:
        return len(self.x)

    def flat(self, values: Tensor) -> np.ndarray:
        """A tensor of the layer's shape as the referee's rows."""
        return exact(values).reshape(self.samples, -1)


def exact(values: Tensor) -> np.ndarray:
    """The numbers in memory, in long double."""
    return values.detach().double().numpy().astype(np.longdouble)


def layer_case(rng: Rng) -> Case:
    """A layer of any kind with weights from 1e-8 to 1e4, and inputs from denormal numbers to 1e30."""
    theme = rng.random()
    if theme < 0.08:
        return small_beside_large(rng)
    if theme < 0.12:
        return many_images(rng)
    dims = int(rng.choice((0, 0, 0, 0, 1, 2, 2, 3)))
    floor = None if rng.random() < 0.7 else float(10 ** rng.uniform(-16, 1))
    options = {"activation": an_activation(rng), "floor": floor, "weight_norm": bool(rng.random() < 0.4)}
    if dims == 0:
        size = int(rng.integers(1, 17))
        layer, state = pcdeq.PcDEQLinear(size, **options), (size,)
    else:
        channels, side = int(rng.integers(1, 4)), int(rng.integers(1, (0, 9, 6, 4)[dims]))
        kernel = int(rng.choice((1, 3, 3, 3, 5))) if dims < 3 else 3
        kind = (None, pcdeq.PcDEQConv1d, pcdeq.PcDEQConv2d, pcdeq.PcDEQConv3d)[dims]
        layer, state = kind(channels, kernel_size=kernel, **options), (channels, *[side] * dims)
    fill_weight(layer.operator, state, rng)
    dtype = DTYPES[int(rng.integers(len(DTYPES)))]
    # A layer of few digits takes wider inputs, too; then it works in their dtype.
    wide = dtype if rng.random() < 0.9 else torch.float64
    x = hostile_input(rng, (int(rng.integers(1, 5)), *state))
    largest = min(torch.finfo(kind).max for kind in (dtype, torch.float32))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.clamp_(max=largest)
    return case_of(layer.to(dtype), x.clamp(-largest, largest).to(wide))


def an_activation(rng: Rng) -> str:
    return str(rng.choice(list(referee.CURVES)))


def small_beside_large(rng: Rng) -> Case:
    """Convolutions whose small components grow beside large ones: what rounds against the largest loses them."""
    channels, height, width = (int(rng.integers(1, size)) for size in (3, 5, 9))
    layer = pcdeq.PcDEQConv2d(channels, an_activation(rng), weight_norm=False)
    weight = 10 ** rng.uniform(-9, -6) * rng.random(layer.operator.shape)
    weight[range(channels), range(channels), 1, 1] = 10 ** rng.uniform(0, 3, channels)
    layer.operator.weight.data = torch.from_numpy(weight).float()
    x = np.full((int(rng.integers(1, 4)), channels, height, width), -rng.uniform(1, 8))
    return case_of(layer, torch.from_numpy(np.where(rng.random(x.shape) < 0.2, 3.0, x)).float())


def many_images(rng: Rng) -> Case:
    """From 16 images on torch may convolve by transforms, as NNPACK does."""
    channels, side = int(rng.integers(1, 3)), int(rng.integers(3, 7))
    layer = pcdeq.PcDEQConv2d(channels, an_activation(rng), weight_norm=False)
    fill_weight(layer.operator, (channels, side, side), rng)
    return case_of(layer, hostile_input(rng, (int(rng.integers(16, 20)), channels, side, side)).float())


def case_of(layer: pcdeq.PcDEQ, x: Tensor) -> Case:
    """A layer and its input, whose equation is about the numbers in memory."""
    with torch.no_grad():
        equation = layer.equation(x)
    weight, injected = exact(equation.map.weight), exact(equation.x)
    matrix = weight if weight.ndim == 2 else referee.convolution(weight, tuple(x.shape[2:]))
    return Case(layer, x, referee.Layer(matrix, layer.activation.name), injected.reshape(len(x), -1))


@torch.no_grad()
def fill_weight(operator: pcdeq.Operator, state: tuple[int, ...], rng: Rng) -> None:
    """Weights of one hostile pattern, scaled to a size or to a spectral radius."""
    shape = operator.shape
    weight = rng.random(shape)
    pattern = rng.integers(6)
    if pattern == 1:
        weight = weight * (rng.random(shape) < 0.3)
    elif pattern == 2:
        weight[rng.random(shape[0]) < 0.5] = 0  # rows of zeros
    elif pattern == 3:
        weight = 10 ** rng.uniform(-8, 4, shape)  # small beside large
    elif pattern == 4:
        weight = weight * 0
        weight[0, 0, *[size // 2 for size in shape[2:]]] = 1  # a single one
    elif pattern == 5:
        weight = weight - 0.5  # below 0 counts as 0
    radius = _radius(np.maximum(weight, 0), state)
    if rng.random() < 0.5 and radius > 0:
        weight = weight * float(rng.choice(RADII)) / radius
    elif pattern != 3:
        weight = weight * float(10 ** rng.uniform(-8, 4))
    weight = torch.from_numpy(weight)
    if operator.weight_norm:
        operator.weight_v.copy_(weight)
        operator.weight_g.copy_(weight.clamp(min=0).flatten(1).norm(dim=1).reshape(operator.weight_g.shape))
    else:
        operator.weight.copy_(weight)


def _radius(weight: np.ndarray, state: tuple[int, ...]) -> float:
    matrix = weight if weight.ndim == 2 else referee.convolution(weight, state[1:]).astype(float)
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def hostile_input(rng: Rng, shape: tuple[int, ...]) -> Tensor:
    """Ordinary numbers, or of one size between 1e-45 and 1e30, or of all sizes at once, or 3 beside -3, or 0."""
    signs = rng.choice((-1.0, 1.0), shape)
    size = {
        0: np.abs(rng.normal(size=shape)),
        1: np.full(shape, 10 ** rng.uniform(-45, 30)) * rng.random(shape),
        2: 10 ** rng.uniform(-45, 30, shape),
        3: np.full(shape, 3.0),
        4: np.zeros(shape),
        5: 10 ** rng.uniform(-6, 3, shape),
    }[int(rng.choice((0, 0, 0, 1, 1, 2, 3, 4, 5)))]
    if rng.random() < 0.2:
        signs = np.full(shape, -1.0)
        signs.reshape(len(signs), -1)[:, 0] = 1
    return torch.from_numpy(signs * size)


# ---------------------------------------------------------------------------------------------- networks


def network(rng: Rng) -> tuple[nn.Sequential, Tensor]:
    """A small network that `certify` knows, with odd statistics of its batch norms, and images for it."""
    classes = int(rng.integers(2, 5))
    options = {"activation": an_activation(rng), "weight_norm": bool(rng.random() < 0.5)}
    if rng.random() < 0.5:
        inputs, width = int(rng.integers(2, 9)), int(rng.integers(2, 13))
        lift = [nn.Linear(inputs, width), nn.BatchNorm1d(width)]
        tail = [nn.BatchNorm1d(width), nn.Linear(width, classes)]
        deq, shape, state = pcdeq.PcDEQLinear(width, **options), (inputs,), (width,)
    else:
        channels, side = int(rng.integers(1, 4)), int(rng.integers(3, 6))
        lift = [nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels)]
        tail = [nn.MaxPool2d(3, stride=1, padding=1), nn.Flatten(), nn.Linear(channels * side * side, classes)]
        deq, shape, state = pcdeq.PcDEQConv2d(channels, **options), (1, side, side), (channels, side, side)
    if rng.random() < 0.3:  # the equilibrium, or a batch norm, comes first
        lift, shape = lift[1:] if rng.random() < 0.5 else [], state
    middle = [deq]
    if rng.random() < 0.1:  # next to nothing stands between the image and its class
        lift, middle, tail, shape = [], [], tail[1:], state
    model = nn.Sequential(*lift, *middle, *tail)
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    with torch.no_grad():
        for module in model:
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_(generator=generator)
                module.running_var.uniform_(0.01, 2, generator=generator)
                module.weight.normal_(generator=generator)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                module.weight.normal_(generator=generator).mul_(1 / math.sqrt(module.weight[0].numel()))
    fill_weight(deq.operator, state, rng)
    images = torch.from_numpy(rng.normal(size=(int(rng.choice((2, 4, 16))), *shape)) * 10 ** rng.uniform(-2, 1))
    return model.eval(), images if rng.random() < 0.3 else images.float()


class Stack(nn.Sequential):
    """Layers in line that can be exported: what a network of the package tells beside its layers."""

    image_shape: tuple[int, ...]
    preprocessing = None


def stack(rng: Rng) -> tuple[Stack, Tensor]:
    """A network of one or two equilibria, mostly of a kind whose truncation has a proved bound, and images for it."""
    images, images_are = int(rng.integers(2, 5)), rng.random() < 0.3
    side, width = int(rng.integers(2, 5)), int(rng.integers(1, 4) if images_are else rng.integers(2, 9))
    state = (width, side, side) if images_are else (width,)

    def affine(inputs: int) -> nn.Module:
        return nn.Conv2d(inputs, width, 3, padding=1) if images_are else nn.Linear(inputs, width)

    def equilibrium() -> pcdeq.PcDEQ:
        name = "sigmoid" if rng.random() < 0.3 else an_activation(rng)
        floor = None if name == "sigmoid" else float(10 ** rng.uniform(-1.5, 1))
        kind = pcdeq.PcDEQConv2d if images_are else pcdeq.PcDEQLinear
        layer = kind(
            width, name, floor=floor, weight_norm=bool(rng.random() < 0.5), warm_start=bool(rng.random() < 0.3)
        )
        fill_weight(layer.operator, state, rng)
        if layer.warm is not None:  # a guess of any size and sign, or none
            layer.warm.product = torch.from_numpy(rng.normal(size=state) * 10 ** rng.uniform(-3, 3)).float()
        return layer

    norm = nn.BatchNorm2d if images_are else nn.BatchNorm1d
    layers = [affine(width), norm(width), equilibrium()]
    if rng.random() < 0.5:
        layers += [nn.MaxPool2d(3, stride=1, padding=1) if images_are else norm(width), affine(width), equilibrium()]
    model = Stack(*layers, norm(width), nn.Flatten(), nn.Linear(math.prod(state), int(rng.integers(2, 5))))
    model.image_shape = state
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    with torch.no_grad():
        for module in model:
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.weight.normal_(generator=generator)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                module.weight.normal_(generator=generator).mul_(float(10 ** rng.uniform(-2, 1)))
        if rng.random() < 0.4:
            _slow_down(model, rng)
    return model.eval(), torch.from_numpy(rng.normal(size=(images, *state)) * 10 ** rng.uniform(-2, 2))


def _slow_down(model: Stack, rng: Rng) -> None:
    """Every unit alone, at its floor, grows as slowly as it can, and all errors add up: close to what T4 allows."""
    for module in model:
        if isinstance(module, pcdeq.PcDEQ):
            weight = torch.zeros(module.operator.shape)
            channels = torch.arange(len(weight))
            weight[channels, channels, *[size // 2 for size in weight.shape[2:]]] = float(10 ** rng.uniform(-0.5, 1))
            fill = torch.linalg.vector_norm(weight.flatten(1), dim=1)
            stored = module.operator.weight_v if module.operator.weight_norm else module.operator.weight
            stored.copy_(weight)
            if module.operator.weight_norm:
                module.operator.weight_g.copy_(fill.reshape(module.operator.weight_g.shape))
            if module.warm is not None:
                module.warm.product.zero_()
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.weight.fill_(1)
        elif module is model[-1]:
            module.weight.abs_()
        elif isinstance(module, nn.Linear | nn.Conv2d):
            module.weight.mul_(1e-3)
            module.bias.fill_(-1e3)


# What an equilibrium layer gives for its inputs, and how far that may be off.
Solve = Callable[[Any, np.ndarray], tuple[np.ndarray, np.ndarray]]


def scores(
    model: Iterable[nn.Module], images: Tensor, equilibrium: Solve | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The class scores of the exact network, and how far the referee may be off; infinite where it cannot tell."""
    value, error = exact(images), np.zeros(len(images))
    for module in model:
        if isinstance(module, nn.Linear):
            value = value @ exact(module.weight).T + exact(module.bias)
        elif isinstance(module, nn.Conv2d):
            space = value.shape[2:]
            out = value.reshape(len(value), -1) @ referee.convolution(exact(module.weight), space).T
            value = out.reshape(len(value), -1, *space) + exact(module.bias)[:, None, None]
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            rows = (-1, *[1] * (value.ndim - 2))
            scale = exact(module.weight) / np.sqrt(exact(module.running_var) + np.longdouble(module.eps))
            shifted = value - exact(module.running_mean).reshape(rows)
            value = shifted * scale.reshape(rows) + exact(module.bias).reshape(rows)
        elif isinstance(module, pcdeq.PcDEQ | Equilibrium):
            value, off = (equilibrium or _equilibrium)(module, value)
            error = np.maximum(error, off)
        elif isinstance(module, nn.MaxPool2d):
            wide = np.pad(value, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
            height, width = value.shape[2:]
            shifts = [wide[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)]
            value = np.max(shifts, axis=0)
        else:
            value = value.reshape(len(value), -1)
    return value, error * 1e3 + 1e-14 * np.abs(value).max(1)


def settled(layer: Equilibrium, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a layer of an exported graph would give after infinitely many steps."""
    truth, injected = _in_graph(layer, value)
    lower, upper = truth.enclose(injected)
    with np.errstate(invalid="ignore"):
        return ((lower + upper) / 2).reshape(value.shape), (upper - lower).max(1)


def stopped(layer: Equilibrium, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What it gives in exact arithmetic, after its steps, or at its tolerance."""
    truth, injected = _in_graph(layer, value)
    z = truth.curve.value(injected + exact(layer.guess).ravel() if layer.guess.numel() else injected)
    steps, tol = (layer.steps, 0.0) if isinstance(layer, FixedSteps) else (layer.max_steps, layer.tol)
    going = np.ones(len(z), bool)
    for _ in range(steps - 1):
        new = np.where(going[:, None], truth.map(z, injected), z)
        going &= ~(np.abs(new - z).max(1) < tol * np.abs(new).max(1))
        z = new
        if not going.any():
            break
    return z.reshape(value.shape), np.where(going & (tol > 0), np.inf, 0)  # nothing is said of what did not converge


def _in_graph(layer: Equilibrium, value: np.ndarray) -> tuple[referee.Layer, np.ndarray]:
    weight = exact(layer.weight)
    matrix = weight if weight.ndim == 2 else referee.convolution(weight, value.shape[2:])
    return referee.Layer(matrix, layer.activation.name), _injected(layer, value.reshape(len(value), -1))


def _injected(layer: pcdeq.PcDEQ | Equilibrium, rows: np.ndarray) -> np.ndarray:
    kind_one = layer.activation.name not in ("sigmoid", "hard-sigmoid")
    return (referee.softplus(rows) if kind_one else np.maximum(rows, 0)) + np.longdouble(layer.floor)


def _equilibrium(layer: pcdeq.PcDEQ, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    operator = layer.operator
    stored = (operator.weight_v, operator.weight_g) if operator.weight_norm else (operator.weight,)
    weight = referee.nonnegative(*(exact(parameter) for parameter in stored))
    matrix = weight if weight.ndim == 2 else referee.convolution(weight, value.shape[2:])
    injected = _injected(layer, value.reshape(len(value), -1))
    lower, upper = referee.Layer(matrix, layer.activation.name).enclose(injected)
    with np.errstate(invalid="ignore"):
        return ((lower + upper) / 2).reshape(value.shape), (upper - lower).max(1)
