"""What training makes small: the loss on the images or, with ``robust_radius``, also the certified one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from pcdeq.models import Preprocessing
from pcdeq.proofs.worst_case import worst_case_scores
from pcdeq.recipes import ResolvedConfig

# From a model, images and labels: their scores, the sum of their losses, and what to descend.
Objective = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

RISE = 0.4  # part of the run in which radius and weight rise: all at once, the certified loss would teach nothing
LARGEST_WEIGHT = 0.7  # of the certified loss


class WorstCase(nn.Module):
    """A network whose forward is `worst_case_scores`, so that processes and mixed precision can be wrapped around."""

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, images: Tensor, labels: Tensor, radius: Tensor, limits: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return worst_case_scores(self.network, images, labels, radius, limits)


def plain_loss(
    model: nn.Module, images: Tensor, labels: Tensor, *, smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The cross-entropy, for the report and, perhaps with smoothed labels, to descend."""
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    if not smoothing:
        return logits, loss, loss
    return logits, loss, F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)


@dataclass(frozen=True)
class CertifiedLoss:
    """A mean of the loss on the images, which is reported, and of the largest that is possible within a radius.

    The model must be a `WorstCase`.
    """

    radius: Tensor  # of normalised pixels, (channels, 1, 1)
    limits: tuple[Tensor, Tensor]  # of pictures
    weight: float
    smoothing: float = 0.0  # of the labels of the images; the worst case is of the label itself

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, worst = model(images, labels, self.radius.to(images.device), self.limits)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        smoothed = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self.smoothing)
        certified = F.cross_entropy(worst, labels, reduction="sum")
        return logits, loss, (1 - self.weight) * smoothed + self.weight * certified


def objective_after(config: ResolvedConfig, preprocessing: Preprocessing, epochs_done: float) -> Objective:
    """What to descend after so many epochs, fractions included; a pure function, so a resumed run agrees.

    >>> from pcdeq.recipes import TrainConfig
    >>> config = TrainConfig("pcdeq-1-l-tanh", epochs=10, robust_radius=0.1).resolve()
    >>> grey = Preprocessing(mean=(0.0,), std=(0.5,), classes=("zero", "one"))
    >>> [round(objective_after(config, grey, done).radius.item(), 3) for done in (0, 2, 4, 9)]
    [0.0, 0.15, 0.3, 0.3]
    """
    if config.training_radius is None:
        return partial(plain_loss, smoothing=config.smoothing) if config.smoothing else plain_loss
    risen = min(1.0, epochs_done / (RISE * config.epochs))
    radius = preprocessing.scaled(risen * config.training_radius)
    return CertifiedLoss(radius, preprocessing.limits(), risen * LARGEST_WEIGHT, config.smoothing)
