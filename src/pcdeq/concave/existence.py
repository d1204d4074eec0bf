"""Has a map of yours a fixed point? Sample by sample, with what proves it.

It has one if a point u >= fn(u) passes the order test (T1): that needs nothing else. It has none if and only if the
spectral radius of its asymptotic mapping is 1 or more (Proposition A.4), and every vector bounds that radius from
below (Collatz and Wielandt). A lower bound is proved if the asymptotic mapping is given; found as a limit it is not,
since no finite number of evaluations tells a map that grows forever from one that stops growing at 1e100.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pcdeq.concave.bound import BoundMap
from pcdeq.proofs.order import is_upper, largest
from pcdeq.proofs.precision import full_precision
from pcdeq.solvers import per_sample
from pcdeq.theory import asymptotic_mapping
from pcdeq.theory.mappings import rounding

Verdict = Literal["exists", "does not exist", "undecided"]
# Positive maps added to one that may be reducible, relative to its size, each for so many steps.
PERTURBATIONS, MOST_STEPS = (0.0, 1e-4, 1e-9), 200
# The multiples of a point that are tried as u >= fn(u).
LARGEST_POWER = 240
# At most so many sets of components are tried in search of the best lower bound.
SUPPORTS = 32


@dataclass(frozen=True, eq=False)
class Feasibility:
    """Whether a map has a fixed point, for each sample; true in a condition only if all of them have.

    Attributes:
        verdict: for each sample ``"exists"``, ``"does not exist"`` or ``"undecided"``.
        proved: whether that is proved (up to what is assumed of the map: monotone and scalable), (samples,).
        lower, upper: bounds on the spectral radius of the asymptotic mapping, (samples,); proved if the mapping was
            given, else as good as its limit is.
        witness: points u >= fn(u), so that z* exists and z* <= u; infinite where none was found.

    >>> import pcdeq, torch
    >>> size = torch.tensor([[0.5], [2.0]]).double()
    >>> affine = pcdeq.ConcaveMap(lambda z: size * z + 1, asymptotic=lambda z: size * z)
    >>> print(affine.exists(torch.zeros(2, 1).double()))
    1 of 2 samples have a fixed point (1 proved), 1 have none (1 proved), 0 undecided; spectral radius 0.5 to 2
    """

    verdict: tuple[Verdict, ...]
    proved: Tensor
    lower: Tensor
    upper: Tensor
    witness: Tensor

    def __bool__(self) -> bool:
        return all(verdict == "exists" for verdict in self.verdict)

    def __str__(self) -> str:
        def count(verdict: Verdict) -> tuple[int, int]:
            chosen = torch.tensor([found == verdict for found in self.verdict], device=self.proved.device)
            return int(chosen.sum()), int((chosen & self.proved).sum())

        (yes, yes_proved), (no, no_proved) = count("exists"), count("does not exist")
        unknown, _ = count("undecided")
        return (
            f"{yes} of {len(self.verdict)} samples have a fixed point ({yes_proved} proved), {no} have none "
            f"({no_proved} proved), {unknown} undecided; spectral radius {float(self.lower.min()):.6g} to "
            f"{float(self.upper.max()):.6g}"
        )


@torch.no_grad()
@full_precision()
def feasibility(
    bound: BoundMap, far: Callable[[Tensor], Tensor] | None, z: Tensor, upper: Tensor, bad: Tensor
) -> Feasibility:
    """From a point z to look along and upper bounds, where a solve found any; ``bad`` samples are not in the class."""
    limit = asymptotic_mapping(lambda p: torch.nan_to_num(bound(p), nan=0.0)) if far is None else far
    lower, highest, vector = radii(limit, torch.ones_like(z))
    witness, found = upper, upper.isfinite().flatten(1).all(1)
    for direction in (z, vector):
        direction = torch.where(direction.isfinite(), direction, 1.0)
        for power in range(0, LARGEST_POWER, 4):
            # For a scalable map all larger multiples pass as well; where the radius is above 1 none does.
            if bool((found | bad | (lower >= 1)).all()):
                break
            candidate = 2.0**power * direction
            new = is_upper(bound, candidate) & ~found
            witness, found = torch.where(per_sample(new, z), candidate, witness), found | new
    yes = ~bad & (found | (highest < 1))
    no = ~bad & ~found & (lower >= 1)
    verdict: list[Verdict] = [
        "exists" if exists else "does not exist" if none else "undecided"
        for exists, none in zip(yes.tolist(), no.tolist(), strict=True)
    ]
    proved = (yes & found) | ((yes | no) & (far is not None))
    return Feasibility(tuple(verdict), proved, lower, highest, witness)


def radii(far: Callable[[Tensor], Tensor], start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds on the spectral radius of a monotone homogeneous map, for each sample, and the vectors of the upper ones.

    The power iteration of `theory.spectral_radius`, on all samples at once; it looks for vectors, and what it returns
    is what they prove, with the rounding of the map if it knows it.
    """
    z, search = start, _Search(start)
    for step in range(MOST_STEPS * len(PERTURBATIONS)):
        value = far(z)
        search.meet(z, value)
        if search.done:
            break
        growth = largest(value)
        z = value + PERTURBATIONS[step // MOST_STEPS] * growth + 0.5 * growth * z
        z = z / largest(z)
        z = torch.where(z > torch.finfo(z.dtype).tiny ** 0.5, z, 1.0)  # what fell to 0, or is not a number, begins anew
    else:
        # The best lower bound of a reducible map is that of some of its components, the others being 0.
        sizes = z.flatten(1).sort(1).values
        for k in range(0, sizes.shape[1], -(-sizes.shape[1] // SUPPORTS)):
            part = torch.where(z >= per_sample(sizes[:, k], z), z, 0.0)
            search.meet(part, far(part))
    return search.proved(far)


class _Search:
    """The vectors with the best bounds so far, of each sample."""

    def __init__(self, start: Tensor) -> None:
        self.below = self.above = start
        self.lower, self.upper = (start.flatten(1)[:, 0] * 0 + end for end in (0.0, torch.inf))
        self.margin = rounding(start[0])

    @staticmethod
    def ratios(z: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """min f/z over the components that are not 0, max f/z if none is."""
        least = torch.where(z > 0, value / z, torch.inf).flatten(1).amin(1)
        most = torch.where(z > 0, value / z, torch.inf).flatten(1).amax(1)
        return torch.where(least.isfinite(), least, 0.0), torch.where(most.isnan(), torch.inf, most)

    def meet(self, z: Tensor, value: Tensor) -> None:
        least, most = self.ratios(z, value)
        self.below = torch.where(per_sample(least > self.lower, z), z, self.below)
        self.above = torch.where(per_sample(most < self.upper, z), z, self.above)
        self.lower, self.upper = torch.maximum(self.lower, least), torch.minimum(self.upper, most)

    @property
    def done(self) -> bool:
        gap = self.upper - self.lower
        return bool(((self.upper < torch.inf) & (gap <= (1e-12 + self.margin) * self.upper)).all())

    def proved(self, far: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        def off(z: Tensor) -> Tensor:
            own = far.off(z) if isinstance(far, BoundMap) else 0.0
            return own + self.margin * far(z)  # the latter for the quotients or, of a limit, for sums

        lower, _ = self.ratios(self.below, far(self.below) - off(self.below))
        _, upper = self.ratios(self.above, far(self.above) + off(self.above))
        return lower.clamp(min=0.0), upper, self.above
