"""The theory behind pcDEQ layers as a toolbox for any map of the nonnegative cone into itself.

A map is a function of one point, fn(z) of the shape of z >= 0. What can be asked about it:

- *What kind is it?* `check_positive`, `check_monotone`, `check_scalable`, `check_concave` look for a
  counterexample. The first three together make a standard interference mapping, the first and the last a
  positive concave one.
- *Has it a fixed point?* `has_fixed_point`, by the `spectral_radius` of its `asymptotic_mapping`.
- *Where?* `is_lower`, `is_upper`, `enclose_map` and `scaling_bounds` turn any guess into proved bounds;
  `pcdeq.fixed_point` solves, and differentiates.
- *How far apart are two points?* `thompson` and `hilbert`.
- *The fairest point within a budget:* `conditional_eigenvector`.

These work on one point. `pcdeq.ConcaveMap` puts them together for batches, with solves and gradients;
``examples/power_control.py`` shows it where the theory comes from, in wireless networks.
"""

from pcdeq.theory.asymptotic import AsymptoticMapping, Limit, asymptotic_mapping
from pcdeq.theory.bounds import enclose_map, is_lower, is_upper, scaling_bounds
from pcdeq.theory.existence import Existence, has_fixed_point
from pcdeq.theory.metrics import hilbert, thompson
from pcdeq.theory.properties import (
    Counterexample,
    Sampling,
    Verdict,
    check_concave,
    check_monotone,
    check_positive,
    check_scalable,
)
from pcdeq.theory.spectral import Eigenpair, conditional_eigenvector, spectral_radius

__all__ = [
    "AsymptoticMapping",
    "Counterexample",
    "Eigenpair",
    "Existence",
    "Limit",
    "Sampling",
    "Verdict",
    "asymptotic_mapping",
    "check_concave",
    "check_monotone",
    "check_positive",
    "check_scalable",
    "conditional_eigenvector",
    "enclose_map",
    "has_fixed_point",
    "hilbert",
    "is_lower",
    "is_upper",
    "scaling_bounds",
    "spectral_radius",
    "thompson",
]
