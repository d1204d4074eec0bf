"""By how much a class leads every other one over a box of images: linear bounds through a whole network (T10).

The difference of two scores is a linear functional of what goes into the classifier. Layer by layer it is bounded below
by one of what goes into the layer, over the boxes that intervals give, and at last by one of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pcdeq.proofs.intervals import Box
from pcdeq.proofs.kinds import Equilibrium, Flatten, Identity, Linear
from pcdeq.proofs.linear import EPS, Functional, Pixels, dot
from pcdeq.proofs.order import SINGLE_PRECISION
from pcdeq.proofs.rules import Affine, Layer, boxes_along, enclose, pull

# Up to so many units a quadratic form of them is bounded by the eigenvalues of a matrix, one for each pair.
LARGEST_MATRIX = 512
# Numbers in a tensor of all pairs of a chunk of images.
LARGEST_TENSOR = 4_000_000
# (a + e)² <= (1 + θ)a² + (1 + 1/θ)e² for what rounding, e, adds to a step.
THETA = 1e-4


def linear_leads(layers: Sequence[Layer], classifier: Linear, box: Box, classes: Tensor) -> Tensor:
    """A lower bound, for all images in each box, of the lead of its class over every other one."""
    # One image tells how large the tensors are.
    sizes = (
        [part.lower.numel() for part in boxes_along(layers, box.select(slice(0, 1)), SINGLE_PRECISION)]
        if len(classes)
        else [1]
    )
    rivals = max(1, classifier.module.out_features - 1)
    at_once = max(1, LARGEST_TENSOR // (rivals * max(sizes)))
    parts = [slice(start, start + at_once) for start in range(0, len(classes), at_once)]
    leads = [_leads(layers, classifier, box.select(part), classes[part]) for part in parts]
    return torch.cat(leads) if leads else box.lower.new_zeros(0)


def are_cheap(layers: Sequence[Layer], box: Box) -> bool:
    """Whether all equilibria are so small that linear bounds cost seconds, not hours, for a test set."""
    boxes = boxes_along(layers, box.select(slice(0, 1)), SINGLE_PRECISION)
    return all(_is_small(part) for layer, part in zip(layers, boxes, strict=False) if isinstance(layer, Equilibrium))


def _leads(layers: Sequence[Layer], classifier: Linear, box: Box, classes: Tensor) -> Tensor:
    boxes = boxes_along(layers, box, SINGLE_PRECISION)
    functional = _differences(classifier, boxes[-1], classes)
    taken = torch.zeros_like(functional.constant)
    for place, layer in reversed(list(enumerate(layers))):
        before, entering = layers[:place], boxes[place]
        if isinstance(layer, Equilibrium) and _is_small(entering) and _are_affine(before):
            middle, error = _middle(before, box, entering)
            functional = layer.pull(functional, entering, middle)
            taken = _remainder(functional, before, boxes[:place], box, error)
        else:
            functional = layer.pull(functional, entering)
    least, rounding = functional.of_box(box.lower, box.upper)
    lead = functional.constant + least - rounding - taken
    lead = torch.where(boxes[-1].proved[functional.image], lead, -torch.inf)
    return torch.nan_to_num(lead, nan=-torch.inf).reshape(len(classes), -1).amin(1)


def _differences(classifier: Linear, box: Box, classes: Tensor) -> Functional:
    """The score of each image's class less that of every other one."""
    weight = classifier.module.weight.double()
    bias = weight.new_zeros(len(weight)) if classifier.module.bias is None else classifier.module.bias.double()
    image, rival = (classes[:, None] != torch.arange(len(weight), device=classes.device)).nonzero(as_tuple=True)
    own = classes[image]
    size = torch.maximum(box.lower.abs(), box.upper.abs())[image]
    rounding = 4 * EPS * (dot(weight[own].abs() + weight[rival].abs(), size) + bias[own].abs() + bias[rival].abs())
    return Functional(weight[own] - weight[rival], bias[own] - bias[rival] - rounding, image)


def _are_affine(layers: Sequence[Layer]) -> bool:
    return all(isinstance(layer, Affine | Identity | Flatten) for layer in layers)


def _is_small(box: Box) -> bool:
    return box.lower[0].numel() <= LARGEST_MATRIX and box.lower.ndim == 2


def _middle(before: Sequence[Layer], box: Box, entering: Box) -> tuple[Tensor, Tensor]:
    """What the middle of a box of images becomes, and how far off that, and a matrix of the layers, may be."""
    centre = _centre(box)
    image = enclose(before, replace(box, lower=centre, upper=centre), SINGLE_PRECISION)
    middle = (image.lower + image.upper) / 2
    reach = torch.maximum(entering.upper - middle, middle - entering.lower)
    # A row of the matrix is a sum over fewer terms than there are pixels and units, or a few thousand.
    rounding = 1e-10 + 16 * EPS * (box.lower[0].numel() + middle[0].numel())
    return middle, (image.upper - image.lower) + rounding * reach


def _centre(box: Box) -> Tensor:
    return box.lower + (box.upper - box.lower) / 2


def _remainder(
    functional: Functional, before: Sequence[Layer], boxes: Sequence[Box], box: Box, error: Tensor
) -> Tensor:
    """The largest remainder of the functional over the images of its box."""
    k, image = functional.remainder, functional.image
    if k is None:
        return torch.zeros_like(functional.constant)
    units = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)
    rows = Functional(units, units.new_zeros(len(units)), torch.zeros_like(image[:1]).expand(len(units)))
    matrix = pull(before, rows, [part.select(slice(0, 1)) for part in boxes]).coefficient.flatten(1)
    radius = torch.maximum(box.upper - _centre(box), _centre(box) - box.lower).flatten(1) * (1 + 4 * EPS)
    form = Pixels(matrix, radius).largest_form(k, image)
    return (1 + THETA) * form + (1 + 1 / THETA) * dot(k, error[image] ** 2)
