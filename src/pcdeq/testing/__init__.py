"""For people who extend the package, or run it where we cannot: what a part must do, and whether a device does it.

An operator or a solver of yours passes the tests of the package itself when a class of your test suite derives from
`OperatorConformance` or `SolverConformance`. Nothing but torch is needed; pytest finds the tests, and so does unittest.

``python -m pcdeq.testing --device cuda`` compares layers, gradients, solvers and bounds on a device with float64 on the
CPU, in about a minute.
"""

from pcdeq.testing.conforming_operator import OperatorConformance
from pcdeq.testing.conforming_solver import SolverConformance

__all__ = ["OperatorConformance", "SolverConformance"]
