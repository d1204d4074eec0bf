"""Equilibrium layers for PyTorch that provably converge: positive concave deep equilibrium models.

The public names are loaded when they are first used, so that ``pcdeq --help`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pcdeq._version import __version__
from pcdeq.errors import PcdeqError

if TYPE_CHECKING:
    from pcdeq.activations import Activation
    from pcdeq.concave import ConcaveMap
    from pcdeq.layers import PcDEQ, PcDEQConv1d, PcDEQConv2d, PcDEQConv3d, PcDEQLinear
    from pcdeq.maps import fixed_point
    from pcdeq.models import build, freeze, load, load_reference
    from pcdeq.operators import LinearMap, Operator, project_
    from pcdeq.proofs.certified import Certified
    from pcdeq.proofs.certify import certify
    from pcdeq.proofs.check import check
    from pcdeq.proofs.order import Enclosure
    from pcdeq.recalibration import recalibrate
    from pcdeq.recipes import TrainConfig
    from pcdeq.residual import Residual
    from pcdeq.solvers import Anderson, Newton, Outcome, Picard, Solution
    from pcdeq.sparse import Sparse
    from pcdeq.training import train
    from pcdeq.unrolling import unroll

_HOMES = {
    "pcdeq.activations": ("Activation",),
    "pcdeq.concave": ("ConcaveMap",),
    "pcdeq.proofs.certified": ("Certified",),
    "pcdeq.proofs.order": ("Enclosure",),
    "pcdeq.proofs.certify": ("certify",),
    "pcdeq.proofs.check": ("check",),
    "pcdeq.layers": ("PcDEQ", "PcDEQConv1d", "PcDEQConv2d", "PcDEQConv3d", "PcDEQLinear"),
    "pcdeq.maps": ("fixed_point",),
    "pcdeq.models": ("build", "freeze", "load", "load_reference"),
    "pcdeq.operators": ("LinearMap", "Operator", "project_"),
    "pcdeq.recalibration": ("recalibrate",),
    "pcdeq.recipes": ("TrainConfig",),
    "pcdeq.residual": ("Residual",),
    "pcdeq.solvers": ("Anderson", "Newton", "Outcome", "Picard", "Solution"),
    "pcdeq.sparse": ("Sparse",),
    "pcdeq.training": ("train",),
    "pcdeq.unrolling": ("unroll",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Activation",
    "Anderson",
    "Certified",
    "ConcaveMap",
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
    "Residual",
    "Solution",
    "Sparse",
    "TrainConfig",
    "__version__",
    "build",
    "certify",
    "check",
    "fixed_point",
    "freeze",
    "load",
    "load_reference",
    "project_",
    "recalibrate",
    "train",
    "unroll",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pcdeq' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
