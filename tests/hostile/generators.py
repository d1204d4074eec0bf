"""Hostile layers, inputs and networks, each a function of one seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from hostile import referee
from torch import Tensor, nn

import pcdeq

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


def scores(model: nn.Sequential, images: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The class scores of the exact network, and how far the referee may be off; infinite where it cannot tell."""
    value, error = exact(images), 0.0
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
        elif isinstance(module, pcdeq.PcDEQ):
            value, error = _equilibrium(module, value)
        elif isinstance(module, nn.MaxPool2d):
            wide = np.pad(value, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
            height, width = value.shape[2:]
            shifts = [wide[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)]
            value = np.max(shifts, axis=0)
        else:
            value = value.reshape(len(value), -1)
    return value, error * 1e3 + 1e-14 * np.abs(value).max(1)


def _equilibrium(layer: pcdeq.PcDEQ, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    operator = layer.operator
    stored = (operator.weight_v, operator.weight_g) if operator.weight_norm else (operator.weight,)
    weight = referee.nonnegative(*(exact(parameter) for parameter in stored))
    matrix = weight if weight.ndim == 2 else referee.convolution(weight, value.shape[2:])
    rows = value.reshape(len(value), -1)
    kind_one = layer.activation.name not in ("sigmoid", "hard-sigmoid")
    injected = (referee.softplus(rows) if kind_one else np.maximum(rows, 0)) + np.longdouble(layer.floor)
    lower, upper = referee.Layer(matrix, layer.activation.name).enclose(injected)
    with np.errstate(invalid="ignore"):
        return ((lower + upper) / 2).reshape(value.shape), (upper - lower).max(1)
