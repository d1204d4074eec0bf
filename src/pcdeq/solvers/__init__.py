"""Fixed point solvers: small frozen objects, one method a file, one loop, one `Solution`."""

from pcdeq.solvers.anderson import Anderson
from pcdeq.solvers.loop import run
from pcdeq.solvers.newton import Newton
from pcdeq.solvers.picard import Picard
from pcdeq.solvers.problem import EachStats, Outcome, Problem, Solution, SolveStats, Summary, per_sample, report
from pcdeq.solvers.record import SolvingLayer
from pcdeq.solvers.solver import Solver, State

__all__ = [
    "Anderson",
    "EachStats",
    "Newton",
    "Outcome",
    "Picard",
    "Problem",
    "Solution",
    "SolveStats",
    "Solver",
    "SolvingLayer",
    "State",
    "Summary",
    "per_sample",
    "report",
    "run",
]
