"""Equilibria beyond networks: a positive concave map of yours, with the guarantees of a layer."""

from pcdeq.concave.bounds import AdjointBound
from pcdeq.concave.existence import Feasibility
from pcdeq.concave.map import ConcaveMap, MapReport

__all__ = ["AdjointBound", "ConcaveMap", "Feasibility", "MapReport"]
