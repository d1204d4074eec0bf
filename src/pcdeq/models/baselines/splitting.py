"""Operator splitting: z = prox(Wz + x) and its adjoint as fixed points that plain iteration reaches.

Winston & Kolter (2020), Algorithms 1 to 4; Ryu & Boyd (2016) for the methods. The equation says
0 ∈ (I - W) z - x + ∂f(z), where f is 0 on the admissible states and infinite elsewhere. These are all z >= 0, and for
convolutions z = 0 on the border; the proximal map is for every α the projection: ReLU, and 0 on the border.
The gradient v of a loss with respect to z turns into u = D(Wᵀu + v) with respect to x, D = diag(z > 0). That is
0 ∈ (I - Wᵀ) u - v + ∂g(u), g being 0 on the components that D keeps and infinite outside, whose proximal map is D:
the same problem with W transposed and another proximal map.

- Forward-backward: z <- prox(z + α (Wz + x - z)). It needs no inverse; a contraction for α < 2 m / ‖I - W‖²,
  with the factor sqrt(1 - 2 α m + α² ‖I - W‖²), so best at α = m / ‖I - W‖².
- Peaceman-Rachford: with z = prox(y) and r = 2z - y, y <- 2 V(r + α x) - r, V = (I + α (I - W))⁻¹. It converges
  for every α > 0 because I - W is strongly monotone. With ``damping`` d in [0, 1) the step is averaged with the
  point it came from, (1 - d) new + d y; at d = 1/2 this is Douglas-Rachford.

Both are maps whose fixed point gives z: what our solvers take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pcdeq.models.baselines.monotone import Monotone, Resolvent
from pcdeq.solvers import Problem, Solution, Solver, run

METHODS = ("peaceman-rachford", "forward-backward")
TensorMap = Callable[[Tensor], Tensor]
LARGEST_ALPHA = 1.0
SMALLEST_ALPHA = 2.0**-10


@dataclass(frozen=True)
class Splitting:
    """One method with its step size, ready for the present weight; the adjoint reuses what was inverted."""

    operator: Monotone
    alpha: float
    resolvent: Resolvent | None  # of Peaceman-Rachford
    damping: float = 0.0

    @classmethod
    @torch.no_grad()
    def of(cls, operator: Monotone, method: str, alpha: float, example: Tensor, damping: float = 0.0) -> Splitting:
        """Prepare a method; forward-backward finds its α from ‖I - W‖, for states like the ``example``."""
        if method == "forward-backward":
            return cls(operator, operator.m / operator.lipschitz(example[:1]) ** 2, None)
        return cls(operator, alpha, operator.resolvent(alpha), damping)

    def equilibrium(self, x: Tensor, solver: Solver) -> Solution:
        """z = prox(Wz + x)."""
        return self._solve(x, self.operator.prox, solver, transposed=False)

    def adjoint(self, z: Tensor, grad: Tensor, solver: Solver) -> Solution:
        """u = D(Wᵀu + grad) at an equilibrium z: the gradient with respect to x."""
        mask = (z > 0).to(grad.dtype)
        return self._solve(grad, lambda u: mask * u, solver, transposed=True)

    @torch.no_grad()
    def _solve(self, offset: Tensor, prox: TensorMap, solver: Solver, transposed: bool) -> Solution:
        if self.resolvent is None:

            def forward_backward(z: Tensor) -> Tensor:
                return prox(z + self.alpha * (self.operator.product(z, transposed) + offset - z))

            return run(Problem(forward_backward, prox(offset)), solver)
        invert, scaled = self.resolvent, self.alpha * offset

        def peaceman_rachford(y: Tensor) -> Tensor:
            reflected = 2 * prox(y) - y
            new = 2 * invert(reflected + scaled, transposed) - reflected
            return torch.lerp(new, y, self.damping) if self.damping else new

        solution = run(Problem(peaceman_rachford, offset), solver)
        return solution.with_value(prox(solution.value))


def search_alpha(steps: Callable[[float], int | None], present: float) -> float:
    """The step size, of the largest and its halves, after which fewer steps are no longer found.

    Convergence does not depend on α but its speed does, and the best α moves as W learns. As in the authors'
    experiments α is halved while the number of steps does not grow; where a solve with none of them ends within the
    solver's limit, ``steps`` being None, the present one stays.

    >>> search_alpha({1.0: 10, 0.5: 9, 0.25: 12}.__getitem__, present=1.0)
    0.5
    """
    best, fewest, alpha = present, None, LARGEST_ALPHA
    while alpha >= SMALLEST_ALPHA:
        found = steps(alpha)
        if found is not None and (fewest is None or found <= fewest):
            best, fewest = alpha, found
        elif fewest is not None:
            break
        alpha /= 2
    return best
