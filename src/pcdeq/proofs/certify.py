"""Which class does the exact equilibrium network give? Proved, image by image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pcdeq.errors import UsageError
from pcdeq.proofs.intervals import Box, Limits
from pcdeq.proofs.kinds import Linear
from pcdeq.proofs.leads import are_cheap, linear_leads
from pcdeq.proofs.network import require_features, split_classifier
from pcdeq.proofs.order import Enclosure
from pcdeq.proofs.precision import full_precision
from pcdeq.proofs.rules import Layer, enclose

BoundKind = Literal["best", "intervals", "linear"]

# float32 decides most images; for the rest bounds are computed in float64, at last around a tighter solve.
ATTEMPTS = ((torch.float32, 1e-4), (torch.float64, 1e-6), (torch.float64, 1e-10))
BATCH = 250
# Distances in pixels, which go from 0 to 1, of a robustness curve.
RADII = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)


class Scale(Protocol):
    """How pixels become inputs; `pcdeq.models.Preprocessing` is one."""

    def scaled(self, distance: float) -> Tensor: ...

    def limits(self) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Certificate:
    """What was proved about a network's classes.

    The claim is about the network whose parameters are the stored numbers, computed in exact arithmetic, with
    its equilibria exact: for every image (with ``radius``, for every image within it in each pixel) its class
    is ``classes``, wherever ``proved``.

    Attributes:
        classes: the class of each image.
        proved: whether it is proved.
        margin: by how much, at least, its score exceeds that of every other class; below 0 where not proved.
    """

    classes: Tensor
    proved: Tensor
    margin: Tensor

    @property
    def share(self) -> float:
        """The share of images whose class is proved."""
        return float(self.proved.double().mean()) if len(self.proved) else 1.0

    @classmethod
    def join(cls, parts: Iterable[Certificate]) -> Certificate:
        """The certificates of several batches as one."""
        parts = list(parts) or [cls(torch.zeros(0).long(), torch.zeros(0).bool(), torch.zeros(0).double())]
        return cls(*(torch.cat([getattr(part, item.name) for part in parts]) for item in fields(cls)))


@torch.no_grad()
@full_precision()
def certify(
    model: nn.Module,
    images: Tensor,
    *,
    radius: float | Tensor = 0.0,
    limits: Limits | None = None,
    bounds: BoundKind = "best",
) -> Certificate:
    """Prove which class the exact equilibrium network gives to each image.

    Args:
        model: a network in evaluation mode whose layers are known (the paper's networks, or any
            `torch.nn.Sequential` of theirs and of `pcdeq.Residual`), ending in a linear classifier. What its layers
            compute must be known exactly: an overridden forward or a hook is refused.
        images: its inputs, normalised as the network wants them.
        radius: prove the class for all inputs that differ from an image by at most this in each component; a
            number, or a tensor of one for each channel, (channels, 1, 1), such as ``preprocessing.scaled(0.1)``.
        limits: inputs below the first or above the second, such as pixels blacker than black, do not count;
            ``preprocessing.limits()``.
        bounds: with a radius, ``"intervals"`` are quick and coarse; ``"linear"`` (T10) prove far more and cost some
            adjoint solves for each rival class; ``"best"`` tries intervals first, and linear ones on what they leave
            if all equilibria are vectors of at most 512 units: through large convolutions they take a second an image.

    >>> import torch, pcdeq
    >>> model = torch.nn.Sequential(pcdeq.PcDEQLinear(4), torch.nn.Linear(4, 3)).eval()
    >>> images = torch.randn(5, 4)
    >>> certificate = pcdeq.certify(model, images)
    >>> certificate.classes.equal(model(images).argmax(1)), certificate.share
    (True, 1.0)
    """
    if model.training:
        raise UsageError("certify wants a network in evaluation mode: call model.eval() first")
    layers, classifier = split_classifier("certify", model)
    if not isinstance(images, Tensor) or not images.ndim:
        got = "one number" if isinstance(images, Tensor) else type(images).__name__
        raise UsageError(f"images must be a tensor of some images, got {got}; torch.as_tensor and unsqueeze make one")
    if not images.is_floating_point():
        raise UsageError(f"images are {images.dtype} pixels; the network takes model.preprocessing(images)")
    if limits is not None:
        limits = torch.as_tensor(limits[0]), torch.as_tensor(limits[1])
    reach = torch.as_tensor(radius, dtype=torch.float64)
    if not bool(((reach >= 0) & reach.isfinite()).all()):
        raise UsageError(f"radius must be a number >= 0, got {radius}")
    if bounds not in get_args(BoundKind):
        raise UsageError(f"bounds must be 'best', 'intervals' or 'linear', got {bounds!r}")
    _try_out(model, images[:1])
    with parametrize.cached():
        parts = []
        for batch in (batch for batch in images.split(BATCH) if len(batch)):
            part = _certify_batch(layers, classifier, batch, reach, limits)
            if bool(reach.any()) and bounds != "intervals":
                box = Box.of(batch.double(), reach, limits)
                if bounds == "linear" or are_cheap(layers, box):
                    part = _improve(part, model, layers, classifier, batch, box)
            parts.append(part)
        return Certificate.join(parts)


def class_decided(rest: nn.Sequential, tol: float = 1e-4) -> Callable[[Enclosure], Tensor]:
    """The question "is the class proved?" for `PcDEQ.solve`; ``rest`` follows the layer.

    >>> import torch, pcdeq
    >>> model = pcdeq.build("pcdeq-1-l-tanh").eval()  # flatten, lift, lift_norm, deq, deq_norm, classifier
    >>> images = torch.rand(8, 1, 28, 28)
    >>> question = class_decided(model[4:])
    >>> with torch.no_grad():
    ...     solution = model.deq.solve(model[:3](images), until=question)
    >>> solution.converged.all().item(), model[4:](solution.value).argmax(1).equal(model(images).argmax(1))
    (True, True)
    """
    layers, classifier = split_classifier("class_decided", rest)

    @torch.no_grad()
    def decided(enclosure: Enclosure) -> Tensor:
        box = Box(enclosure.lower, enclosure.upper, enclosure.certified)
        return _margins(classifier, enclose(layers, box, tol))[1] > 0

    return decided


def robustness_curve(
    model: nn.Module, images: Tensor, labels: Tensor, preprocessing: Scale, radii: tuple[float, ...] = RADII
) -> dict[float, float]:
    """For each distance in pixels, the share of images whose right class is proved for all pictures within it.

    Pixels go from 0 to 1, and so do those of the pictures that count.

    A class that is lost at one radius is not tried at a larger one: the larger box holds the smaller.
    """
    left = torch.arange(len(images))
    shares = {}
    for radius in sorted(radii):
        reach, limits = preprocessing.scaled(radius), preprocessing.limits()
        certificate = certify(model, images[left], radius=reach, limits=limits)
        left = left[certificate.proved & (certificate.classes == labels[left])]
        shares[radius] = len(left) / max(1, len(images))
    return shares


def _try_out(model: nn.Module, images: Tensor) -> None:
    """Refuse images that the network cannot take."""
    if not len(images):
        return
    try:
        model(images.to(next(model.parameters()).dtype, copy=True))  # it may work in place
    except RuntimeError as error:
        shape = tuple(images.shape[1:])
        reason = str(error).split("\n")[0]
        raise UsageError(f"the network does not take images of shape {shape}, {images.dtype}: {reason}") from error


def _certify_batch(
    layers: Sequence[Layer], classifier: Linear, images: Tensor, radius: Tensor, limits: Limits | None
) -> Certificate:
    classes = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    margin = torch.full((len(images),), -torch.inf, dtype=torch.float64, device=images.device)
    left = torch.arange(len(images), device=images.device)
    for dtype, tol in ATTEMPTS:
        part = images[left].to(torch.promote_types(images.dtype, dtype))
        if part.ndim == 4 and dtype == torch.float32:  # the faster convolutions
            part = part.contiguous(memory_format=torch.channels_last)
        box = enclose(layers, Box.of(part, radius, limits).to(dtype), tol)
        classes[left], margin[left] = _margins(classifier, box)
        left = left[~(margin[left] > 0)]
        # Noise of a given radius is far beyond rounding: more digits would not help.
        if bool(radius.any()) or not len(left):
            break
    return Certificate(classes, margin > 0, margin)


def _improve(
    found: Certificate, model: nn.Module, layers: Sequence[Layer], classifier: Linear, images: Tensor, box: Box
) -> Certificate:
    """The certificate with linear bounds of the images that are not proved."""
    left = (~found.proved).nonzero()[:, 0]
    if not len(left):
        return found
    classes = model(images[left].to(next(model.parameters()).dtype, copy=True)).argmax(1)
    lead = linear_leads(layers, classifier, box.select(left), classes)
    # A lead that is not proved says how much is missing: the larger number, the less.
    better = left[lead > found.margin[left]]
    found.classes[left], found.margin[better] = classes, lead[lead > found.margin[left]]
    return Certificate(found.classes, found.margin > 0, found.margin)


def _margins(classifier: Linear, box: Box) -> tuple[Tensor, Tensor]:
    """The class of each sample and a lower bound of its lead, from the differences of scores.

    A difference of two rows of the classifier varies less over the box than the two scores apart. In float64,
    whose rounding is covered by a relative 1e-9 of all that is summed.
    """
    require_features(classifier, box.lower)
    centre, reach = Box(box.lower.double(), box.upper.double(), box.proved).ball()
    weight = classifier.module.weight.double()
    bias = weight.new_zeros(len(weight)) if classifier.module.bias is None else classifier.module.bias
    scores = centre @ weight.T + bias.double()
    classes = scores.argmax(1)
    lead = scores.gather(1, classes[:, None]) - scores
    rows = weight[classes][:, None] - weight  # (samples, classes, features)
    size = centre.abs() @ weight.abs().T + bias.abs().double()
    rounding = 1e-9 * (size + size.gather(1, classes[:, None]))
    bound = lead - torch.einsum("scf,sf->sc", rows.abs(), reach) - rounding
    bound.scatter_(1, classes[:, None], torch.inf)
    bound = torch.where(box.proved, bound.amin(1), -torch.inf)
    return classes, torch.nan_to_num(bound, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
