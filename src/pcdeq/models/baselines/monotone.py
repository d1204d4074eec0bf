"""Linear maps for which I - W is strongly monotone, and their resolvents.

Winston & Kolter (2020), "Monotone operator equilibrium networks": W = (1 - m) I - AᵀA + B - Bᵀ with m > 0.
The symmetric part of I - W is then m I + AᵀA, at least m, whatever A and B are; so z = ReLU(Wz + x) has
exactly one solution for every x. Splitting methods need Wz or the resolvent V = (I + α (I - W))⁻¹.

Convolutions are circular, so that the Fourier transform turns W into one small matrix for each frequency, whose
inverse is V at that frequency. States may have a border of zeros, over which nothing passes from one side to the other.

Multi-tier: z consists of tiers, each of half the resolution of the one before. A is block bidiagonal, with
convolutions A_i within the tiers and convolutions D_i of stride 2 from tier i to i + 1, so that AᵀA has the blocks

    (i, i):     A_iᵀA_i + D_iᵀD_i            (i + 1, i):  A_{i+1}ᵀD_i            (i, i + 1):  its transpose.

The blocks of B outside its diagonal are chosen as B_{i,i+1} = D_iᵀA_{i+1}: then B - Bᵀ cancels what -AᵀA has
above the diagonal and doubles what it has below, W is block lower triangular, and V is applied by forward
substitution (its transpose by back substitution). D_iᵀD_i only commutes with even translations; seen as a map of
the four pixels of each 2 x 2 square, four times as many channels at half the resolution, it is again a
convolution, and so is the whole block of its tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Size = tuple[int, int]  # (height, width)
Shape = tuple[int, int, int]  # (channels, height, width)


class Resolvent(Protocol):
    """V = (I + α (I - W))⁻¹ for one weight and one α."""

    def __call__(self, u: Tensor, transposed: bool = False) -> Tensor:
        """Vu, or Vᵀu."""
        ...


class Monotone(nn.Module, ABC):
    """W = (1 - m) I - AᵀA + B - Bᵀ; states are ``(samples, *state)``."""

    def __init__(self, m: float = 1.0) -> None:
        super().__init__()
        self.m = m

    @abstractmethod
    def product(self, z: Tensor, transposed: bool = False) -> Tensor:
        """Wz, or Wᵀz; differentiable."""

    @abstractmethod
    def resolvent(self, alpha: float) -> Resolvent:
        """(I + α (I - W))⁻¹ of the present weight, without a graph."""

    def lift(self, x: Tensor) -> Tensor:
        """The offset of the equation that a layer's input stands for."""
        return x

    def prox(self, z: Tensor) -> Tensor:
        """The nearest admissible state: nonnegative, and 0 on the border if there is one."""
        return torch.relu(z)

    def read(self, z: Tensor) -> Tensor:
        """What of a state the layer gives to the next one."""
        return z

    @torch.no_grad()
    def lipschitz(self, example: Tensor, steps: int = 50) -> float:
        """‖I - W‖ by power iteration, from below; ``example`` is a state of one sample."""
        z = torch.randn(example.shape, generator=torch.Generator().manual_seed(0)).to(example)
        norm = 1.0
        for _ in range(steps):
            image = z - self.product(z)
            norm = float(image.norm() / z.norm())
            z = image - self.product(image, transposed=True)
            z = z / z.norm()
        return norm


class DenseMonotone(Monotone):
    """A and B are square matrices on the last dimension.

    >>> operator = DenseMonotone(5, m=0.1)
    >>> rest = torch.eye(5) - operator.weight()
    >>> bool(torch.linalg.eigvalsh(rest + rest.T).min() >= 2 * 0.1 - 1e-6)
    True
    """

    def __init__(self, features: int, m: float = 1.0) -> None:
        super().__init__(m)
        self.features = features
        self.a = nn.Linear(features, features, bias=False)
        self.b = nn.Linear(features, features, bias=False)

    def weight(self) -> Tensor:
        """W as a matrix."""
        a, b = self.a.weight, self.b.weight
        identity = torch.eye(self.features, dtype=a.dtype, device=a.device)
        return (1 - self.m) * identity - a.T @ a + b - b.T

    def product(self, z: Tensor, transposed: bool = False) -> Tensor:  # (samples, features)
        weight = self.weight()
        return z @ (weight if transposed else weight.T)

    @torch.no_grad()
    def resolvent(self, alpha: float) -> Resolvent:
        weight = self.weight()
        identity = torch.eye(self.features, dtype=weight.dtype, device=weight.device)
        inverse = torch.linalg.inv((1 + alpha) * identity - alpha * weight)
        return lambda u, transposed=False: u @ (inverse if transposed else inverse.T)


class ScaledKernel(nn.Module):
    """A 3x3 kernel as a direction and one scale, g v / ‖v‖: weight normalisation of the whole kernel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(outputs, inputs, 3, 3))
        self.scale = nn.Parameter(torch.ones(()))
        nn.init.normal_(self.direction, std=(9 * inputs * outputs) ** -0.5)  # a norm of about 1

    def forward(self) -> Tensor:
        return self.scale * self.direction / self.direction.norm()


def convolve(z: Tensor, kernel: Tensor, stride: int = 1) -> Tensor:
    """The circular 3x3 convolution."""
    return F.conv2d(F.pad(z, (1, 1, 1, 1), mode="circular"), kernel, stride=stride)


def convolve_adjoint(y: Tensor, kernel: Tensor, stride: int = 1) -> Tensor:
    """Its adjoint: zeros between the pixels, then the convolution with the flipped and transposed kernel."""
    if stride > 1:
        samples, channels, height, width = y.shape
        spread = y.new_zeros(samples, channels, stride * height, stride * width)
        spread[:, :, ::stride, ::stride] = y
        y = spread
    return convolve(y, flipped(kernel))


def flipped(kernel: Tensor) -> Tensor:
    """The kernel of the adjoint of a convolution of stride 1."""
    return kernel.flip(2, 3).transpose(0, 1)


class ConvMonotone(Monotone):
    """A and B are circular 3x3 convolutions on images of one size.

    >>> operator = ConvMonotone(2, (6, 6)).double()
    >>> z = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    >>> shifted = z + 0.5 * (z - operator.product(z))
    >>> torch.allclose(operator.resolvent(0.5)(shifted), z)
    True
    """

    inside: Tensor  # 1, and 0 on the border

    def __init__(self, channels: int, size: Size, m: float = 1.0, border: int = 0) -> None:
        super().__init__(m)
        self.channels, self.size = channels, size
        self.a = ScaledKernel(channels, channels)
        self.b = ScaledKernel(channels, channels)
        interior = torch.ones(size[0] - 2 * border, size[1] - 2 * border)
        self.register_buffer("inside", F.pad(interior, (border,) * 4), persistent=False)

    def prox(self, z: Tensor) -> Tensor:
        return self.inside * torch.relu(z)

    def product(self, z: Tensor, transposed: bool = False) -> Tensor:  # (samples, channels, height, width)
        a, b = self.a(), self.b()
        skew = b - flipped(b)
        rest = convolve(z, -skew if transposed else skew) - convolve_adjoint(convolve(z, a), a)
        return rest if self.m == 1 else (1 - self.m) * z + rest

    def resolvent(self, alpha: float) -> Resolvent:
        return fourier_resolvent(self.product, alpha, (self.channels, *self.size), self.a.direction)


@torch.no_grad()
def fourier_resolvent(
    product: Callable[[Tensor], Tensor], alpha: float, shape: Shape, weight: Tensor, grain: int = 1
) -> Resolvent:
    """The resolvent of a map W of images that commutes with translations by ``grain`` pixels.

    Such a map is a circular convolution of the images whose pixels are squares of ``grain`` x ``grain`` pixels, known
    by what it answers to an impulse in each of their channels. ``shape`` is that of a fine image, and ``weight`` a
    tensor of the map's dtype and device.
    """
    coarse = (shape[1] // grain, shape[2] // grain)
    wide = shape[0] * grain**2
    impulses = weight.new_zeros(wide, wide, *coarse)
    impulses[range(wide), range(wide), 0, 0] = 1
    images = F.pixel_shuffle(impulses, grain)
    answers = F.pixel_unshuffle((1 + alpha) * images - alpha * product(images), grain)
    matrices = torch.fft.rfft2(answers).flatten(2).permute(2, 1, 0)  # (frequencies, outputs, inputs)
    inverse = torch.linalg.inv(matrices)

    def invert(u: Tensor, transposed: bool = False) -> Tensor:
        spectrum = torch.fft.rfft2(F.pixel_unshuffle(u, grain))
        mixed = (inverse.mH if transposed else inverse) @ spectrum.flatten(2).permute(2, 1, 0)
        solved = torch.fft.irfft2(mixed.permute(2, 1, 0).reshape(spectrum.shape), s=coarse)
        return F.pixel_shuffle(solved, grain)

    return invert


class TieredMonotone(Monotone):
    """A and B are circular convolutions within tiers of halving resolution, and of stride 2 between them.

    A state is flat, ``(samples, numbers)``: the tiers one after the other. The input reaches the first tier, the
    others have a bias, and the last one is what the layer gives on.
    """

    def __init__(self, channels: tuple[int, ...], size: Size, m: float = 1.0, border: int = 0) -> None:
        super().__init__(m)
        sizes = [(size[0] >> tier, size[1] >> tier) for tier in range(len(channels))]
        self.tiers = nn.ModuleList(
            ConvMonotone(c, s, m, border >> tier) for tier, (c, s) in enumerate(zip(channels, sizes, strict=True))
        )
        self.down = nn.ModuleList(ScaledKernel(*pair) for pair in pairwise(channels))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(c)) for c in channels[1:])
        self.shapes = [(c, *s) for c, s in zip(channels, sizes, strict=True)]

    def split(self, z: Tensor) -> list[Tensor]:
        """The tiers of a flat state, as images."""
        numbers = [c * h * w for c, h, w in self.shapes]
        return [part.view(-1, *shape) for part, shape in zip(z.split(numbers, dim=1), self.shapes, strict=True)]

    def join(self, tiers: Iterable[Tensor]) -> Tensor:
        """The flat state of such images."""
        return torch.cat([tier.flatten(1) for tier in tiers], dim=1)

    def lift(self, x: Tensor) -> Tensor:
        biases = (
            bias[:, None, None].expand(len(x), *shape) for bias, shape in zip(self.biases, self.shapes[1:], strict=True)
        )
        return self.join((x, *biases))

    def prox(self, z: Tensor) -> Tensor:
        return self.join(tier.prox(part) for tier, part in zip(self.tiers, self.split(z), strict=True))  # pyright: ignore

    def read(self, z: Tensor) -> Tensor:
        return self.split(z)[-1]

    def product(self, z: Tensor, transposed: bool = False) -> Tensor:
        states = self.split(z)
        results = [self._within(tier, state, transposed) for tier, state in enumerate(states)]
        for tier in range(len(self.down)):
            source, target = (tier + 1, tier) if transposed else (tier, tier + 1)
            results[target] = results[target] - self._between(tier, states[source], transposed)
        return self.join(results)

    def _within(self, tier: int, z: Tensor, transposed: bool = False) -> Tensor:
        """The diagonal block of W."""
        product = self.tiers[tier].product(z, transposed)  # pyright: ignore[reportCallIssue]
        if tier == len(self.down):
            return product
        kernel = self.down[tier]()
        return product - convolve_adjoint(convolve(z, kernel, stride=2), kernel, stride=2)

    def _between(self, tier: int, z: Tensor, transposed: bool) -> Tensor:
        """The block of -W from a tier to the next, 2 AᵀD, or its transpose, 2 DᵀA."""
        down, a = self.down[tier](), self.tiers[tier + 1].a()  # pyright: ignore[reportCallIssue]
        if transposed:
            return 2 * convolve_adjoint(convolve(z, a), down, stride=2)
        return 2 * convolve_adjoint(convolve(z, down, stride=2), a)

    @torch.no_grad()
    def resolvent(self, alpha: float) -> Resolvent:
        """By substitution: I + α (I - W) is block lower triangular."""
        blocks = []
        for tier, shape in enumerate(self.shapes):
            grain = 1 if tier == len(self.down) else 2
            blocks.append(fourier_resolvent(partial(self._within, tier), alpha, shape, self.biases[0], grain))

        def substitute(u: Tensor, transposed: bool = False) -> Tensor:
            states, order = self.split(u), range(len(blocks))
            for step, tier in enumerate(reversed(order) if transposed else order):
                if step:
                    before = tier + 1 if transposed else tier - 1
                    between = self._between(min(tier, before), states[before], transposed)
                    states[tier] = states[tier] - alpha * between
                states[tier] = blocks[tier](states[tier], transposed)
            return self.join(states)

        return substitute
