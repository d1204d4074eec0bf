"""The worst case over a box of inputs as a loss: bounds that can be differentiated (T8).

Beside the clean values, bounds go through the network for all inputs within a radius. Affine layers use
centre and radius, monotone ones map the two ends. An equilibrium is monotone in its input, so the two ends
give its exact hull, and their gradients are implicit like any other: no relaxation anywhere but in the
affine layers (interval bound propagation: Gowal et al. 2018, arXiv:1810.12715).

There are no margins for rounding here. This is what training makes small; the proof is `pcdeq.certify`'s,
afterwards.
"""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcdeq.errors import UsageError
from pcdeq.layers import PcDEQ


class Bounds(NamedTuple):
    """The values at some place of a network for a batch, and their bounds over the box of inputs."""

    clean: Tensor
    lower: Tensor
    upper: Tensor

    @property
    def centre(self) -> Tensor:
        """The middle between the ends, where the clean value need not be."""
        return (self.lower + self.upper) / 2

    @property
    def reach(self) -> Tensor:
        """From the middle to either end."""
        return (self.upper - self.lower) / 2


def worst_case_scores(
    model: nn.Sequential,
    images: Tensor,
    labels: Tensor,
    radius: float | Tensor,
    limits: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The scores of the images, and how far each class can get ahead of the label within the radius.

    Of the second, (n, classes), the column of the label is 0, so that its cross-entropy with the labels is the
    certified loss: an upper bound of the loss over all inputs in the box. In training mode batch norm takes the
    statistics of the clean batch, for the bounds too, and updates its running ones as in a plain pass.

    Args:
        model: layers that end in a linear classifier, as `pcdeq.certify` wants them.
        images: its inputs, normalised as the network wants them.
        radius: the largest change of each component; a tensor must be broadcastable to the images.
        limits: inputs below the first or above the second do not count, as in `pcdeq.certify`.

    >>> import torch, pcdeq
    >>> model = torch.nn.Sequential(pcdeq.PcDEQLinear(4), torch.nn.Linear(4, 3))
    >>> images, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> scores, worst = worst_case_scores(model, images, labels, radius=0.1)
    >>> bool((worst >= scores - scores.gather(1, labels[:, None])).all())
    True
    >>> torch.nn.functional.cross_entropy(worst, labels).backward()
    """
    if not isinstance(model, nn.Sequential) or not len(model) or not isinstance(model[-1], nn.Linear):
        raise UsageError("the certified loss wants a torch.nn.Sequential that ends in a Linear classifier")
    lower, upper = images - radius, images + radius
    if limits is not None:
        low, high = (limit.to(images) for limit in limits)
        lower, upper = (
            torch.maximum(lower, torch.minimum(low, images)),
            torch.minimum(upper, torch.maximum(high, images)),
        )
    bounds = Bounds(images, lower, upper)
    *layers, classifier = model
    for layer in layers:
        bounds = propagate(layer, bounds)
    assert isinstance(classifier, nn.Linear)
    return classifier(bounds.clean), _lead_over(labels, classifier, bounds)


def _lead_over(labels: Tensor, classifier: nn.Linear, bounds: Bounds) -> Tensor:
    """Upper bounds of score - score of the label; a difference of rows varies less than the two scores apart."""
    scores, weight = classifier(bounds.centre), classifier.weight
    rows = weight - weight[labels][:, None]  # (samples, classes, features)
    return scores - scores.gather(1, labels[:, None]) + torch.einsum("scf,sf->sc", rows.abs(), bounds.reach)


@singledispatch
def propagate(module: nn.Module, bounds: Bounds) -> Bounds:
    """The clean outputs of a module and bounds of its outputs over the box, in the mode the module is in."""
    raise UsageError(
        f"no bounds pass through a {type(module).__name__}; the certified loss knows Sequential, Flatten, Linear, "
        "Conv2d, BatchNorm, MaxPool2d, AvgPool2d, ReLU, Identity and the layers of pcdeq"
    )


@propagate.register
def _sequential(module: nn.Sequential, bounds: Bounds) -> Bounds:
    for child in module:
        bounds = propagate(child, bounds)
    return bounds


@propagate.register(nn.Identity)
@propagate.register(nn.Flatten)
@propagate.register(nn.MaxPool2d)
@propagate.register(nn.AvgPool2d)
@propagate.register(nn.ReLU)
def _monotone(module: nn.Module, bounds: Bounds) -> Bounds:
    return Bounds(*module(torch.cat(bounds)).tensor_split(3))


@propagate.register
def _equilibrium(module: PcDEQ, bounds: Bounds) -> Bounds:
    """Monotone too, hence the exact hull (T8); all three in one solve."""
    if module.injection is not None:
        raise UsageError("the certified loss knows the paper's injections, which are monotone, not one of your own")
    return _monotone(module, bounds)


@propagate.register
def _linear(module: nn.Linear, bounds: Bounds) -> Bounds:
    clean, centre = module(torch.cat((bounds.clean, bounds.centre))).tensor_split(2)
    return _around(clean, centre, F.linear(bounds.reach, module.weight.abs()))


@propagate.register
def _convolution(module: nn.Conv2d, bounds: Bounds) -> Bounds:
    if module.padding_mode != "zeros":
        raise UsageError(f"the certified loss knows convolutions padded with zeros, not {module.padding_mode!r}")
    clean, centre = module(torch.cat((bounds.clean, bounds.centre))).tensor_split(2)
    return _around(clean, centre, module._conv_forward(bounds.reach, module.weight.abs(), None))


@propagate.register(nn.BatchNorm1d)
@propagate.register(nn.BatchNorm2d)
def _batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d, bounds: Bounds) -> Bounds:
    """The module sees the clean values only; the bounds lie around its output, scaled as it scales."""
    if module.training or module.running_var is None:
        variance = bounds.clean.var([0, *range(2, bounds.clean.ndim)], correction=0)
    else:
        variance = module.running_var
    scale = torch.rsqrt(variance + module.eps)
    scale = scale if module.weight is None else scale * module.weight
    scale = scale.reshape(-1, *[1] * (bounds.clean.ndim - 2))
    clean = module(bounds.clean)
    return _around(clean, clean + scale * (bounds.centre - bounds.clean), scale.abs() * bounds.reach)


def _around(clean: Tensor, centre: Tensor, reach: Tensor) -> Bounds:
    return Bounds(clean, centre - reach, centre + reach)
