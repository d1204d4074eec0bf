"""Pictures whose near-black is black and whose near-white is white: what noise does there, no layer behind it sees."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pcdeq.proofs.balls import Ball
from pcdeq.proofs.intervals import Box, eps, outward
from pcdeq.proofs.linear import EPS, Functional, dot
from pcdeq.proofs.rules import Largest, Layer, Truncated, kind


class Clip(nn.Module):
    """Numbers of each channel kept between two limits, which are constants.

    In a network that is trained against noise it comes first: a pixel that is black stays exactly black under noise
    smaller than the limit's distance from black, and so its box has no width. On a drawing that is most of them.

    >>> clip = Clip(1)  # between 0 and 1, until they are set
    >>> clip(torch.tensor([[[[-0.5, 0.25, 1.5]]]]))
    tensor([[[[0.0000, 0.2500, 1.0000]]]])
    """

    low: Tensor  # (channels, 1, 1)
    high: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(channels, 1, 1))
        self.register_buffer("high", torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:  # (n, channels, h, w), same shape
        return x.clamp(self.low.to(x.dtype), self.high.to(x.dtype))


@kind(Clip)
class Clipped(Largest):
    """max(low, min(x, high)): it rises with x, and no error grows."""

    tensors = ("low", "high")

    def value(self, x: Tensor) -> Tensor:
        return Clip.forward(self.module, x)

    def enclose(self, box: Box, tol: float) -> Box:
        """The limits may have to be rounded to the numbers of the box."""
        low, high = self.value(box.lower), self.value(box.upper)
        return outward(low, high, eps(low) * torch.maximum(low.abs(), high.abs()), box.proved)

    def surround(self, ball: Ball, tol: float) -> Ball:
        return Layer.surround(self, ball, tol)  # by its box: radii are no pixels, which the limits are for

    def pull(self, functional: Functional, box: Box) -> Functional:
        """Between two lines of slopes s from 0 to 1, whose constants are the extremes of clip(x) - s x over the box.

        These lie at the ends of the box or at the limits, so a slope that is rounded costs width and no truth.
        """
        least, most, low, high = box.lower, box.upper, *(part.double() for part in (self.module.low, self.module.high))
        places = torch.stack([least, most, low.clamp(least, most), high.clamp(least, most)])
        values = places.clamp(low, high)
        first, last = values[0], values[1]
        # From the lower end up to where the roof begins, unless most of the range is under the roof; and so from below.
        above = torch.where(most <= high, _slope(last - first, most - least), _slope(high - first, high - least))
        above = torch.where((most > high) & (most - high > high - least), 0.0, above)
        below = torch.where(least >= low, _slope(last - first, most - least), _slope(last - low, most - low))
        below = torch.where((least < low) & (low - least > most - low), 0.0, below)
        slack = 4 * EPS * (places.abs() + values.abs()).amax(0)
        roof, ground = (values - above * places).amax(0) + slack, (values - below * places).amin(0) - slack

        c, image = functional.coefficient, functional.image
        rises = c > 0
        line = torch.where(rises, ground[image], roof[image])
        size = dot(c.abs(), line.abs() + torch.maximum(least.abs(), most.abs())[image])
        rounding = (c[:1].numel() + 16) * EPS * size
        return functional.through(c * torch.where(rises, below[image], above[image]), dot(c, line), rounding)

    def enlarge(self, error: Tensor, truncated: Truncated) -> Tensor:
        return error


def _slope(rise: Tensor, run: Tensor) -> Tensor:
    """Their quotient, from 0 to 1, also where there is no run."""
    return torch.where(run > 0, rise / torch.where(run > 0, run, 1.0), 0.0).clamp(0, 1)
