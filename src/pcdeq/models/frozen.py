"""A trained network made ready for inference alone: the same answers from less work.

Batch norm by running statistics is one multiplication and one addition for each channel, so it goes into
the affine layer before it or after it; the weights of equilibrium layers are normalised once.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Literal, overload

import torch
from torch import Tensor, nn

from pcdeq.errors import UsageError
from pcdeq.proofs.certify import CertifiedNetwork
from pcdeq.proofs.folding import fold
from pcdeq.proofs.network import know_container, recognise


@overload
def freeze(model: nn.Sequential, *, certified: Literal[False] = False) -> nn.Sequential: ...


@overload
def freeze(model: nn.Sequential, *, certified: Literal[True]) -> CertifiedNetwork: ...


def freeze(model: nn.Sequential, *, certified: bool = False) -> nn.Sequential | CertifiedNetwork:
    """A copy of a network of layers in line, such as `build` gives, for inference and without gradients.

    Its parameters are constants: what is done to the model afterwards does not reach the copy. Its answers
    are those of ``model.eval()`` up to rounding and the solver's tolerance. What cannot be folded stays as it is.

    Args:
        certified: answer with a `Certificate` in place of scores: the class of each image, and whether it is proved to
            be that of the exact network, as by `pcdeq.certify`. Every layer must be known then.

    >>> import torch, pcdeq
    >>> model = pcdeq.build("pcdeq-1-mc-tanh").eval()
    >>> fast = pcdeq.freeze(model)
    >>> len(model), len(fast)
    (18, 12)
    >>> images = torch.rand(4, 1, 28, 28)
    >>> bool((fast(images) - model(images)).abs().max() < 1e-4)
    True
    """
    if not isinstance(model, nn.Sequential):
        raise UsageError(f"freeze takes an nn.Sequential, whose layers follow each other, not {type(model).__name__}")
    if certified:
        return CertifiedNetwork(_copied(model).eval().requires_grad_(False))
    layers = fold(recognise(_in_evaluation(model), leave_unknown=True))
    # Layers of nested containers are in line with the others, where their names would be no names.
    named = not any("." in layer.path for layer in layers)
    modules = OrderedDict((layer.path if named else str(i), layer.freeze()) for i, layer in enumerate(layers))
    return Frozen(modules).requires_grad_(False).eval()


def _in_evaluation(model: nn.Sequential) -> nn.Sequential:
    """The model, or if it is in training mode a copy that is not."""
    return _copied(model).eval() if model.training else model


def _copied(model: nn.Sequential) -> nn.Sequential:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:  # torch's, of a tensor that was computed from others
        recognise(model, training=True)  # whose, it can say
        raise UsageError(f"the model cannot be copied: {str(error).splitlines()[0]}") from error


class Frozen(nn.Sequential):
    """Layers in line, without gradients."""

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)

    def train(self, mode: bool = True) -> Frozen:
        if mode:
            raise UsageError("a frozen network cannot be trained; train the model that it was made from")
        return super().train(False)


know_container(Frozen)
