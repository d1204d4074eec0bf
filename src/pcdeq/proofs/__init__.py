"""Proofs turned into numbers: bounds on equilibria, on gradients, on the classes of whole networks."""
