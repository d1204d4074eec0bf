"""Equilibrium layers for PyTorch that provably converge: positive concave deep equilibrium models."""

from pcdeq._version import __version__
from pcdeq.activations import Activation
from pcdeq.enclosure import Enclosure
from pcdeq.errors import PcdeqError
from pcdeq.implicit import fixed_point
from pcdeq.layers import PcDEQ, PcDEQConv1d, PcDEQConv2d, PcDEQConv3d, PcDEQLinear
from pcdeq.operators import LinearMap, Operator, project_
from pcdeq.solvers import Anderson, Newton, Outcome, Picard, Solution

__all__ = [
    "Activation",
    "Anderson",
    "Enclosure",
    "LinearMap",
    "Newton",
    "Operator",
    "Outcome",
    "PcDEQ",
    "PcDEQConv1d",
    "PcDEQConv2d",
    "PcDEQConv3d",
    "PcDEQLinear",
    "PcdeqError",
    "Picard",
    "Solution",
    "__version__",
    "fixed_point",
    "project_",
]
