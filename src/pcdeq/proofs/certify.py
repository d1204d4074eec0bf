"""Which class does the exact equilibrium network give? Proved, image by image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pcdeq.errors import UsageError
from pcdeq.proofs.balls import Ball
from pcdeq.proofs.folding import fold
from pcdeq.proofs.intervals import Box, Limits
from pcdeq.proofs.kinds import Linear, Tally
from pcdeq.proofs.leads import are_cheap, linear_leads
from pcdeq.proofs.network import all_layers, require_features, split_classifier
from pcdeq.proofs.order import Enclosure
from pcdeq.proofs.precision import full_precision
from pcdeq.proofs.rules import Layer, enclose, surround

# The class of each image, and a lower bound of its lead.
Decision = tuple[Tensor, Tensor]
BoundKind = Literal["best", "intervals", "linear"]

# Without a radius of the images, balls decide: with a radius for each channel, and few digits of the last equilibrium,
# or for each place, and many of all.
FEW, MANY = 1e-4, 1e-8
BALLS = ((False, FEW), (True, MANY))
# Boxes for what is left, and for images with a radius, of which float32 is enough.
BOXES = ((torch.float32, 1e-4), (torch.float64, 1e-6), (torch.float64, 1e-10))
# Vectors at a time, images, numbers that are made of these, and images for linear bounds. (Of more numbers glibc gives
# the memory back between layers, and it comes anew page by page: up to a sixth of the time.)
BATCH, IMAGES, NUMBERS, IMPROVED = 1000, 128, 600_000, 250
# Distances in pixels, which go from 0 to 1, of a robustness curve.
RADII = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)


@dataclass(frozen=True)
class Attempt:
    """A way to decide classes, and what came of it."""

    decide: Callable[[Tensor], Decision]
    settled: Tally = field(default_factory=Tally)

    def __call__(self, images: Tensor) -> Decision:
        classes, margin = self.decide(images)
        self.settled.count(margin > 0)
        return classes, margin


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
    if getattr(model, "training", False):
        raise UsageError("certify wants a network in evaluation mode: call model.eval() first")
    layers, classifier = split_classifier("certify", model)
    _require_floats(images)
    if limits is not None:
        limits = torch.as_tensor(limits[0]), torch.as_tensor(limits[1])
    reach = torch.as_tensor(radius, dtype=torch.float64)
    if not bool(((reach >= 0) & reach.isfinite()).all()):
        raise UsageError(f"radius must be a number >= 0, got {radius}")
    if bounds not in get_args(BoundKind):
        raise UsageError(f"bounds must be 'best', 'intervals' or 'linear', got {bounds!r}")
    _try_out(model, images[:1])
    with parametrize.cached():
        found = _settle(_attempts(layers, classifier, reach, limits), images, _at_a_time(layers, images))
        if bool(reach.any()) and bounds != "intervals":
            for part in torch.arange(len(images), device=images.device).split(IMPROVED):
                box = Box.of(images[part].double(), reach, limits)
                if len(part) and (bounds == "linear" or are_cheap(layers, box)):
                    _improve(found, part, model, layers, classifier, images, box)
    return Certificate(found.classes, found.margin > 0, found.margin)


class CertifiedNetwork:
    """A frozen network that answers with classes and proofs: what `pcdeq.freeze(model, certified=True)` gives.

    It is made for calls of one image or many: what does not depend on the images was done when it was made.

    >>> import torch, pcdeq
    >>> network = pcdeq.freeze(pcdeq.build("pcdeq-1-l-tanh").eval(), certified=True)
    >>> answer = network(torch.rand(3, 1, 28, 28))
    >>> answer.classes.shape, answer.proved.tolist()
    (torch.Size([3]), [True, True, True])
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers, classifier = split_classifier("freeze(certified=True)", model)
        self._attempts = _attempts(self._layers, classifier, torch.zeros(()), None)
        self._known: set[tuple[torch.Size, torch.dtype]] = set()

    @torch.no_grad()
    @full_precision()
    def __call__(self, images: Tensor) -> Certificate:
        """The class of each image, and whether it is proved to be that of the exact network."""
        _require_floats(images)
        kind = images.shape[1:], images.dtype
        if kind not in self._known:
            _try_out(self._model, images[:1])
            self._known.add(kind)
        return _settle(self._attempts, images, _at_a_time(self._layers, images))


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


def _require_floats(images: object) -> None:
    if not isinstance(images, Tensor) or not images.ndim:
        got = "one number" if isinstance(images, Tensor) else type(images).__name__
        raise UsageError(f"images must be a tensor of some images, got {got}; torch.as_tensor and unsqueeze make one")
    if not images.is_floating_point():
        raise UsageError(f"images are {images.dtype} pixels; the network takes model.preprocessing(images)")


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


def _attempts(layers: Sequence[Layer], classifier: Linear, radius: Tensor, limits: Limits | None) -> list[Attempt]:
    """Ways to decide classes, from cheap to thorough.

    Noise of a given radius is far beyond rounding: balls are too wide for it, and more digits would not help.
    """
    boxes = [partial(_by_box, layers, classifier, radius, limits, dtype, tol) for dtype, tol in BOXES]
    if bool(radius.any()):
        return [Attempt(boxes[0])]
    *folded, last = fold([*layers, classifier])
    assert isinstance(last, Linear)
    balls = (partial(_by_ball, folded, last, *how) for how in BALLS)
    return [Attempt(decide) for decide in (*balls, *boxes[1:])]


def _by_ball(layers: Sequence[Layer], classifier: Linear, by_place: bool, tol: float, images: Tensor) -> Decision:
    # float32 does for networks of one equilibrium; further ones enlarge rounding, too.
    single = tol == FEW and sum(layer.solves for layer in layers) <= 1
    ball = Ball.of(_laid_out(images), torch.float32 if single else torch.float64, by_place)
    ball = surround(layers, ball, tol, MANY)
    require_features(classifier, ball.centre)
    reach = ball.radius.expand_as(ball.centre).double()
    return _decide(classifier, ball.centre.double(), reach, ball.proved, sharply=False)


def _by_box(
    layers: Sequence[Layer],
    classifier: Linear,
    radius: Tensor,
    limits: Limits | None,
    dtype: torch.dtype,
    tol: float,
    images: Tensor,
) -> Decision:
    images = images.to(torch.promote_types(images.dtype, dtype))
    images = _laid_out(images) if dtype == torch.float32 else images
    return _margins(classifier, enclose(layers, Box.of(images, radius, limits).to(dtype), tol))


def _laid_out(images: Tensor) -> Tensor:
    """In the layout of the faster convolutions."""
    return images.contiguous(memory_format=torch.channels_last) if images.ndim == 4 else images


def _at_a_time(layers: Sequence[Layer], images: Tensor) -> int:
    """How many images to take at once: as many as the first convolution makes so many numbers of."""
    modules = [layer.module for layer in all_layers(layers)]
    if not any(isinstance(m, nn.Conv2d) or getattr(m, "dims", 1) > 1 for m in modules):
        return BATCH
    growth = next((m.out_channels / m.in_channels for m in modules if isinstance(m, nn.Conv2d)), 1.0)
    return max(1, min(IMAGES, int(NUMBERS / max(1.0, growth * images[:1].numel()))))


def _settle(attempts: Sequence[Attempt], images: Tensor, size: int) -> Certificate:
    """The class of each image by the first attempt that settles it, so many images at a time.

    An attempt that settles few is left out after a while.
    """
    classes = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    margin = torch.full((len(images),), -torch.inf, dtype=torch.float64, device=images.device)
    left = torch.arange(len(images), device=images.device)
    for attempt in attempts:
        whole = len(left) == len(images)
        for start in range(0, len(left), size):
            if attempt is attempts[-1] or attempt.settled.is_worth_it:
                part = slice(start, start + size) if whole else left[start : start + size]
                classes[part], margin[part] = attempt(images[part])
        left = left[~(margin[left] > 0)]
        if not len(left):
            break
    return Certificate(classes, margin > 0, margin)


def _improve(
    found: Certificate,
    part: Tensor,
    model: nn.Module,
    layers: Sequence[Layer],
    classifier: Linear,
    images: Tensor,
    box: Box,
) -> None:
    """Linear bounds for those of a part of the images that are not proved; ``box`` is that of the part."""
    open_ = (~(found.margin[part] > 0)).nonzero()[:, 0]
    left = part[open_]
    if not len(left):
        return
    classes = model(images[left].to(next(model.parameters()).dtype, copy=True)).argmax(1)
    lead = linear_leads(layers, classifier, box.select(open_), classes)
    # A lead that is not proved says how much is missing: the larger number, the less.
    found.classes[left], found.margin[left] = classes, torch.maximum(lead, found.margin[left])


def _margins(classifier: Linear, box: Box) -> Decision:
    """The class of each sample and a lower bound of its lead, for features in a box."""
    require_features(classifier, box.lower)
    centre, reach = Box(box.lower.double(), box.upper.double(), box.proved).ball()
    return _decide(classifier, centre, reach, box.proved, sharply=True)


def _decide(classifier: Linear, centre: Tensor, reach: Tensor, proved: Tensor, *, sharply: bool) -> Decision:
    """The class of each sample and a lower bound of its lead, for features within reach of a centre.

    In float64, whose rounding is covered by a relative 1e-9 of all that is summed. The scores of two classes vary at
    most by what either does; a difference of two rows of the classifier varies less than the two apart, and takes
    longer: it is for those who need it, or for all if the lead is to be told sharply.
    """
    weight, bias, size = classifier.numbers()
    scores = centre @ weight.T + bias
    classes = scores.argmax(1)
    own = classes[:, None]
    rounding = 1e-9 * (centre.abs() @ weight.abs().T + size)
    lead = scores.gather(1, own) - scores - rounding - rounding.gather(1, own)
    reach = reach * (1 + 1e-9)
    varied = reach @ weight.abs().T
    bound = (lead - varied - varied.gather(1, own)).scatter_(1, own, torch.inf)
    close = (~(bound.amin(1) > 0) | sharply).nonzero()[:, 0]
    if len(close):
        rows = (weight[classes[close]][:, None] - weight).abs()  # (samples, classes, features)
        varied = torch.einsum("scf,sf->sc", rows, reach[close])
        bound[close] = (lead[close] - varied).scatter_(1, own[close], torch.inf)
    bound = torch.where(proved, bound.amin(1), -torch.inf)
    return classes, torch.nan_to_num(bound, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
