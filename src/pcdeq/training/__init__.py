"""Training: a loop, a run folder that describes itself, and what to do with the result."""

from pcdeq.extras import needing

with needing("train", "training"):
    from pcdeq.training.evaluation import Evaluation, evaluate
    from pcdeq.training.run import Checkpoint, EpochMetrics, Run, find_runs
    from pcdeq.training.summary import Summary, read_summary, readable_runs, spread, summarise
    from pcdeq.training.trainer import Interrupted, resume, train

__all__ = [
    "Checkpoint",
    "EpochMetrics",
    "Evaluation",
    "Interrupted",
    "Run",
    "Summary",
    "evaluate",
    "find_runs",
    "read_summary",
    "readable_runs",
    "resume",
    "spread",
    "summarise",
    "train",
]
