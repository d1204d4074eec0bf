"""Training: a loop, a run folder that describes itself, and what to do with the result."""

from pcdeq.training.evaluation import Evaluation, evaluate
from pcdeq.training.loading import load
from pcdeq.training.loop import Interrupted, resume, train
from pcdeq.training.run import Checkpoint, EpochMetrics, Run, find_runs

__all__ = [
    "Checkpoint",
    "EpochMetrics",
    "Evaluation",
    "Interrupted",
    "Run",
    "evaluate",
    "find_runs",
    "load",
    "resume",
    "train",
]
