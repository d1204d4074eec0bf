"""Monotone operator equilibrium networks (Winston & Kolter 2020): L, SC and MT.

No batch norm, ReLU, and a classifier right after the equilibrium. Convolutions are circular on images with a
border that is kept at 0, so that they act as if padded with zeros. As in the authors' code it is of 1 pixel for SC. MT
has 1 pixel around its smallest tier, as there, and 2 and 4 around the larger ones, so that each tier has exactly half
the resolution of the one before; the authors have 1 everywhere, and other sizes in between. With these the authors'
widths give the published numbers of parameters (but for SC on MNIST).
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor, nn

from pcdeq.autograd import attach_gradient
from pcdeq.errors import UsageError
from pcdeq.models.baselines.monotone import ConvMonotone, DenseMonotone, Monotone, TieredMonotone
from pcdeq.models.baselines.splitting import LARGEST_ALPHA, METHODS, Splitting, search_alpha
from pcdeq.models.networks import LayerOptions, Named, Network, Widths, both_solvers, head
from pcdeq.operations import no_autocast
from pcdeq.recipes import ImageShape
from pcdeq.solvers import Picard, SolvingLayer

TUNE_EVERY = 200  # training passes between two searches for the step size...
TUNE_EARLY = (8, 16, 32, 64, 128)  # ...and passes before that: W grows fastest at the beginning
TIER_BORDER = 4  # pixels around the largest images of MT


class MonDEQ(SolvingLayer):
    """The z that solves z = ReLU(Wz + x), 0 on the border if there is one, for a W that makes I - W strongly monotone.

    Args:
        operator: W.
        splitting: ``"peaceman-rachford"``, which inverts I + α (I - W) once a pass, or ``"forward-backward"``.
        alpha: the first step size; Peaceman-Rachford looks for a better one in training, at last every 200 passes.
        damping: of Peaceman-Rachford's steps, in [0, 1).
        solver: what iterates; by default plain iteration, as published. `Anderson` works as well.

    >>> layer = MonDEQ(DenseMonotone(4))
    >>> x = torch.randn(3, 4)
    >>> z = layer(x)
    >>> torch.allclose(z, torch.relu(layer.operator.product(z) + x), atol=1e-3)
    True
    """

    alpha: Tensor
    passes: Tensor

    def __init__(
        self,
        operator: Monotone,
        *,
        splitting: str = "peaceman-rachford",
        alpha: float = LARGEST_ALPHA,
        damping: float = 0.0,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(*both_solvers("monDEQ", options, Picard()))
        if splitting not in METHODS:
            raise UsageError(f"unknown splitting {splitting!r}; known: {', '.join(METHODS)}")
        if not 0 < alpha < float("inf"):
            raise UsageError(f"alpha must be positive and finite, got {alpha}")
        if not 0 <= damping < 1:
            raise UsageError(f"damping must be at least 0 and below 1, got {damping}")
        self.operator = operator
        self.method = splitting
        self.damping = damping
        self.register_buffer("alpha", torch.tensor(float(alpha)))
        self.register_buffer("passes", torch.tensor(0))  # in training: when to search again, also after a resume

    def forward(self, x: Tensor) -> Tensor:
        with no_autocast(x.device.type):
            offset = self.operator.lift(x.contiguous().to(torch.promote_types(x.dtype, torch.float32)))
            if self.training and self.method == "peaceman-rachford":
                self._tune(offset.detach())
            splitting = self._splitting(offset, float(self.alpha))
            solution = splitting.equilibrium(offset.detach(), self.solver)
            self.record_forward(solution.stats)
            z = solution.value
            if torch.is_grad_enabled():
                source = self.operator.product(z) + offset
                z = attach_gradient(source, z, lambda grad: self._pull(splitting, solution.value, grad))
            return self.operator.read(z)

    def _pull(self, splitting: Splitting, z: Tensor, grad: Tensor) -> Tensor:
        with no_autocast(grad.device.type):
            solution = splitting.adjoint(z, grad.contiguous(), self.adjoint_solver)
        self.record_backward(solution.stats)
        return solution.value

    def _splitting(self, offset: Tensor, alpha: float) -> Splitting:
        return Splitting.of(self.operator, self.method, alpha, offset, self.damping)

    @torch.no_grad()
    def _tune(self, offset: Tensor) -> None:
        passes = int(self.passes)
        if (passes % TUNE_EVERY == 0 or passes in TUNE_EARLY) and len(offset):

            def steps(alpha: float) -> int | None:
                solution = self._splitting(offset, alpha).equilibrium(offset, self.solver)
                return int(solution.steps.max()) if bool(solution.converged.all()) else None

            self.alpha.fill_(search_alpha(steps, float(self.alpha)))
        self.passes += 1

    def extra_repr(self) -> str:
        return f"m={self.operator.m}, {self.method}, alpha={float(self.alpha):g}, solver={self.solver}"


class MonDEQL(Network):
    """Flatten, dense layer, dense monDEQ, classifier.

    >>> MonDEQL((16,))(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    widths = 1

    @classmethod
    def layers(cls, channels: Widths, image_shape: ImageShape, num_classes: int, options: LayerOptions) -> Named:
        (width,) = channels
        return {
            "flatten": nn.Flatten(),
            "lift": nn.Linear(math.prod(image_shape), width),
            "deq": MonDEQ(DenseMonotone(width), **options),
            "classifier": nn.Linear(width, num_classes),
        }


class MonDEQSC(Network):
    """Convolution, convolutional monDEQ at full resolution, average pooling, classifier.

    >>> MonDEQSC((4,))(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    widths = 1

    @classmethod
    def layers(cls, channels: Widths, image_shape: ImageShape, num_classes: int, options: LayerOptions) -> Named:
        (width,) = channels
        size = (image_shape[1] + 2, image_shape[2] + 2)
        return {
            "lift": nn.Conv2d(image_shape[0], width, 3, padding=2),  # a border of 1
            "deq": MonDEQ(ConvMonotone(width, size, border=1), **options),
            **head(width, image_shape, size, 4, num_classes),
        }


class MonDEQMT(Network):
    """Convolution, one monDEQ whose three tiers have halving resolutions, classifier on the last of them.

    >>> MonDEQMT((2, 3, 4))(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    widths = 3

    @classmethod
    def layers(cls, channels: Widths, image_shape: ImageShape, num_classes: int, options: LayerOptions) -> Named:
        if image_shape[1] % 4 or image_shape[2] % 4:
            raise UsageError(
                f"the tiers of monDEQ-MT need images whose sides are multiples of 4, not {image_shape[1]} x "
                f"{image_shape[2]}; the SC network takes others"
            )
        size = (image_shape[1] + 2 * TIER_BORDER, image_shape[2] + 2 * TIER_BORDER)
        operator = TieredMonotone(channels, size, border=TIER_BORDER)
        return {
            "lift": nn.Conv2d(image_shape[0], channels[0], 3, padding=1 + TIER_BORDER),
            "deq": MonDEQ(operator, **options),
            "flatten": nn.Flatten(),
            "classifier": nn.Linear(math.prod(operator.shapes[-1]), num_classes),
        }
