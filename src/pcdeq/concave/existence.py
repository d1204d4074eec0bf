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
from pcdeq.proofs.order import full_precision, is_upper, largest
from pcdeq.solvers import per_sample
from pcdeq.theory import asymptotic_mapping
from pcdeq.theory.mappings import rounding

Verdict = Literal["exists", "does not exist", "undecided"]
# A little of everything keeps the power iteration of a reducible map positive.
PERTURBATION = 1e-9
MOST_STEPS = 500
# The multiples of a point that are tried as u >= fn(u).
LARGEST_POWER = 240


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

    The power iteration of `theory.spectral_radius`, on all samples at once.
    """
    z = vector = start
    lower, upper = torch.zeros_like(start).flatten(1)[:, 0], torch.full_like(start, torch.inf).flatten(1)[:, 0]
    margin = rounding(start[0])
    for _ in range(MOST_STEPS):
        value = far(z)
        ratio = (value / z).flatten(1)
        low, high = ratio.amin(1) * (1 - margin), ratio.amax(1) * (1 + margin)
        vector = torch.where(per_sample(high < upper, z), z, vector)
        lower, upper = torch.maximum(lower, low.nan_to_num(nan=0.0)), torch.fmin(upper, high)
        # The side of 1 is what is asked for; close to it a few more steps may tell.
        if bool((upper - lower <= 1e-12 * upper + 2 * margin * upper).all()):
            break
        growth = largest(value)
        z = value + PERTURBATION * growth + 0.5 * growth * z
        z = z / largest(z)
        z = torch.where(z.isfinite() & (z > 0), z, 1.0)
    return lower, upper, vector
