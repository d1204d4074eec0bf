"""The paper's tables as data, and the configuration of a training run.

A `Row` is one line of the paper's accuracy tables, or one that we compare with it: what was published, and
the hyperparameters. None of this needs torch, so that the command line can explain itself at once.
"""

from pcdeq.recipes.config import ImageShape, ResolvedConfig, TrainConfig
from pcdeq.recipes.rows import (
    KNOWN_DATASETS,
    PAPER_DATASETS,
    Family,
    Recipe,
    Row,
    Topology,
    find_row,
    own_rows,
    paper_dataset,
    rows,
)

__all__ = [
    "KNOWN_DATASETS",
    "PAPER_DATASETS",
    "Family",
    "ImageShape",
    "Recipe",
    "ResolvedConfig",
    "Row",
    "Topology",
    "TrainConfig",
    "find_row",
    "own_rows",
    "paper_dataset",
    "rows",
]
