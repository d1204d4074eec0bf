"""Data sets as uint8 tensors in memory; batches normalised and augmented on the training device."""

from pcdeq.data.batches import Batches
from pcdeq.data.datasets import Dataset, Split, dataset_names, load_dataset, split_validation

__all__ = ["Batches", "Dataset", "Split", "dataset_names", "load_dataset", "split_validation"]
