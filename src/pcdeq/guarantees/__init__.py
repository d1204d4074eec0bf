"""Proofs turned into numbers: the theory as a toolbox, and what follows for layers and networks."""

from pcdeq.guarantees import theory

__all__ = ["theory"]
