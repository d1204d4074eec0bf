"""The worst case over a box of inputs as a loss: bounds that can be differentiated (T8).

Beside the clean values, bounds go through the network for all inputs within a radius. Affine layers use
centre and radius, monotone ones map the two ends. An equilibrium is monotone in its input, so the two ends
give its exact hull, and their gradients are implicit like any other: no relaxation anywhere but in the
affine layers (interval bound propagation: Gowal et al. 2018, arXiv:1810.12715).

There are no margins for rounding here. This is what training makes small; the proof is `pcdeq.certify`'s,
afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pcdeq.proofs.intervals import Bounds, Limits, ends
from pcdeq.proofs.kinds import Linear
from pcdeq.proofs.network import require_features, split_classifier
from pcdeq.proofs.rules import bound


def worst_case_scores(
    model: nn.Sequential,
    images: Tensor,
    labels: Tensor,
    radius: float | Tensor,
    limits: Limits | None = None,
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
    layers, classifier = split_classifier("the certified loss", model, training=True)
    with parametrize.cached():  # one weight for the clean values and the bounds
        bounds = bound(layers, Bounds(images, *ends(images, radius, limits)))
        require_features(classifier, bounds.clean)
        return classifier.module(bounds.clean), _lead_over(labels, classifier, bounds)


def _lead_over(labels: Tensor, classifier: Linear, bounds: Bounds) -> Tensor:
    """Upper bounds of score - score of the label; a difference of rows varies less than the two scores apart."""
    scores, weight = classifier.module(bounds.centre), classifier.module.weight
    rows = weight - weight[labels][:, None]  # (samples, classes, features)
    return scores - scores.gather(1, labels[:, None]) + torch.einsum("scf,sf->sc", rows.abs(), bounds.reach)
