"""The number of steps that the paper counts, whatever solver a network is trained with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcdeq.layers import PcDEQ
from pcdeq.models import equilibrium_layers
from pcdeq.models.registry import PAPERS_SOLVER

BATCH_SIZE = 64  # the paper's, over which its rule takes one norm
MOST_BATCHES = 10
ONE_IN = 90  # of the steps of an epoch a batch is counted at most, so that it costs next to nothing

Steps = tuple[float, ...]  # per equilibrium layer


def batches_to_count(steps: int) -> int:
    """On how many batches to count at the end of an epoch of so many steps.

    >>> [batches_to_count(steps) for steps in (60, 400, 938)]
    [1, 4, 10]
    """
    return max(1, min(MOST_BATCHES, steps // ONE_IN))


def count_papers_steps(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Steps, Steps]:
    """Mean steps of plain iteration from 0 until the whole batch moves by less than 1e-4, forward and backward.

    The network stays as it is; nothing is learned from these batches. Networks without a pcDEQ have no such steps.

    >>> from pcdeq.models import L
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.tensor([0, 1, 2, 3])
    >>> forward, backward = count_papers_steps(L((8,), activation="sigmoid"), [(images, labels)])
    >>> len(forward), forward[0] > 2, len(backward)
    (1, True, 1)
    """
    layers = [layer for layer in equilibrium_layers(network) if isinstance(layer, PcDEQ)]
    if not layers:
        return (), ()
    forward: list[list[int]] = [[] for _ in layers]
    backward: list[list[int]] = [[] for _ in layers]
    parameters = list(network.parameters())
    with _solving_like_the_paper(network, layers):
        for images, labels in batches:
            loss = F.cross_entropy(network(images), labels)
            torch.autograd.grad(loss, parameters, allow_unused=True)  # leaves the gradients of training alone
            for layer, forwards, backwards in zip(layers, forward, backward, strict=True):
                assert layer.last_forward is not None and layer.last_backward is not None
                forwards.append(layer.last_forward.steps)
                backwards.append(layer.last_backward.steps)
    return tuple(map(fmean, forward)), tuple(map(fmean, backward))


@contextmanager
def _solving_like_the_paper(network: nn.Module, layers: list[PcDEQ]) -> Iterator[None]:
    """In evaluation mode, in which neither batch norm nor a warm start learns, with the paper's solver both ways."""
    was_training = network.training
    before = [(layer.solver, layer.adjoint_solver, layer.last_forward, layer.last_backward) for layer in layers]
    network.eval()
    try:
        for layer in layers:
            layer.solver = layer.adjoint_solver = PAPERS_SOLVER
        with torch.enable_grad():
            yield
    finally:
        network.train(was_training)
        for layer, kept in zip(layers, before, strict=True):
            layer.solver, layer.adjoint_solver, layer.last_forward, layer.last_backward = kept
