"""Balls: a centre as the plain pass computes it, and a radius for each channel (T8, T9).

A box has two ends for every number of a tensor, and each rule for boxes works on both. A ball has one radius for all
places of a channel. What it loses in tightness hardly matters where the radius is rounding and a solver's tolerance;
what a proof then adds to a plain pass is, for an equilibrium, one product with W (`pcdeq.proofs.channels`).

Or it has one for every place, which is tighter; either way it is in float32, a sum of numbers >= 0, so that its own
rounding is relative and covered by a factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcdeq.proofs.channels import RADIUS, over_space
from pcdeq.proofs.intervals import Box, eps, outward

TINY = torch.finfo(RADIUS).tiny  # more than underflow can hide


@dataclass(frozen=True)
class Ball:
    """All tensors within a radius of a centre, sample by sample; ``proved`` says for which samples the exact one is.

    Attributes:
        centre: (samples, *shape).
        radius: in float32; of that shape, or one number for all places of a channel, (samples, channels, 1, ...), or
            one for all of a sample, (samples, 1, ...).
        by_place: whether radii shall be those of places.
    """

    centre: Tensor
    radius: Tensor
    proved: Tensor
    by_place: bool = False

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype, by_place: bool = False) -> Ball:
        """The tensor itself, with what it loses in this dtype."""
        centre = x.to(dtype)
        proved = torch.ones(len(x), dtype=torch.bool, device=x.device)
        if torch.promote_types(x.dtype, dtype) == dtype:
            radius = x.new_zeros(len(x), *[1] * (x.ndim - 1), dtype=RADIUS)
        else:
            lost = (x - centre.to(x.dtype)).abs()
            radius = torch.where(lost > 0, lost * (1 + 1e-6) + TINY, 0.0).to(RADIUS)
        return cls(centre, radius, proved, by_place)

    def around(self, box: Box) -> Ball:
        """The smallest that holds a box."""
        centre, radius = box.ball()
        return self.moved(centre, radius * (1 + 1e-6) + TINY)

    def moved(self, centre: Tensor, radius: Tensor, proved: Tensor | None = None) -> Ball:
        """Another one of the same samples."""
        return Ball(centre, radius.to(RADIUS), self.proved if proved is None else self.proved & proved, self.by_place)

    def box(self) -> Box:
        """The box that holds it."""
        error = self.radius.to(self.centre.dtype) + eps(self.centre) * self.centre.abs()
        return outward(self.centre, self.centre, error, self.proved)

    def radii(self) -> Tensor:
        """Those of places, (samples, *shape), or else of channels, (samples, channels)."""
        return self.over(self.radius.expand(-1, self.centre.shape[1], *self.radius.shape[2:]))

    def sizes(self) -> Tensor:
        """The largest absolute number of the centre at each of these, with room for a rounding."""
        if self.by_place:
            sizes = self.centre.abs()
        else:
            sizes = torch.maximum(over_space(self.centre), -over_space(self.centre, torch.amin))
        return sizes.to(RADIUS) * (1 + 2 * torch.finfo(RADIUS).eps) + TINY

    def over(self, x: Tensor) -> Tensor:
        """Numbers of places as they are, or the largest of each channel."""
        return x.expand_as(self.centre) if self.by_place else over_space(x)


def as_radius(numbers: Tensor, centre: Tensor) -> Tensor:
    """Numbers of places or channels as a radius about a centre."""
    return numbers.reshape(*numbers.shape, *[1] * (centre.ndim - numbers.ndim))
