"""Fixed point solvers: small frozen objects, one method a file, one `Solution`."""

from pcdeq.solvers.anderson import Anderson
from pcdeq.solvers.newton import Newton
from pcdeq.solvers.picard import Picard
from pcdeq.solvers.solution import Guess, Outcome, Pieces, Problem, Solution, Solver, SolveStats, Weight, report

__all__ = [
    "Anderson",
    "Guess",
    "Newton",
    "Outcome",
    "Picard",
    "Pieces",
    "Problem",
    "Solution",
    "SolveStats",
    "Solver",
    "Weight",
    "report",
]
