"""The paper's three networks and one of ours, one class a topology.

All are a straight line of layers, hence `nn.Sequential`: ``for layer in model`` walks from the image
to the class scores. Explicit layers have biases and are unconstrained; the equilibrium layers carry
the guarantee. Sizes follow from the image, so any image that survives the pooling will do.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from pcdeq.activations import Activation
from pcdeq.errors import UsageError
from pcdeq.implicit import Gradient
from pcdeq.layers import Injection, PcDEQ, PcDEQConv2d, PcDEQLinear
from pcdeq.models.average_pool import AvgPool2d
from pcdeq.models.batch_norm import BatchNorm2d
from pcdeq.models.clip import Clip
from pcdeq.operations import AnySolver
from pcdeq.proofs.network import know_container
from pcdeq.recipes import ImageShape
from pcdeq.recipes.config import check_types
from pcdeq.solvers import Solver, SolvingLayer
from pcdeq.solvers.solver import require_solver

if TYPE_CHECKING:
    from pcdeq.models.facts import TrainingFacts


Widths = tuple[int, ...]  # of the equilibrium layers
Named = dict[str, nn.Module]  # layers in line, by name


class LayerOptions(TypedDict, total=False):
    """Keywords that a network hands on to its equilibrium layers."""

    solver: AnySolver | None
    adjoint_solver: AnySolver | None
    activation: str | Activation
    injection: Injection | None
    floor: float | None
    weight_norm: bool
    gradient: Gradient
    gradient_steps: int
    warm_start: bool
    rate: float | None


@dataclass(frozen=True)
class Preprocessing:
    """How pictures become the input of a trained network, and what its outputs are called.

    >>> grey = Preprocessing(mean=(0.0,), std=(1.0,), classes=("zero", "one"))
    >>> grey(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)).max()
    tensor(1.)
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        check_types(self)
        if not all(map(math.isfinite, self.mean + self.std)) or min(self.std, default=0.0) <= 0:
            raise UsageError(f"means must be finite, standard deviations also above 0; got {self.mean} and {self.std}")

    def __call__(self, images: Tensor) -> Tensor:  # uint8 (n, channels, h, w)
        if images.dtype != torch.uint8:
            raise UsageError(
                f"preprocessing takes uint8 pixels, 0 to 255, got {images.dtype}; for pixels in [0, 1] there is "
                "preprocessing.normalise"
            )
        return self.normalise(images.float() / 255)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1] as inputs, in their dtype."""
        return (pixels - _by_channel(self.mean).to(pixels)) / _by_channel(self.std).to(pixels)

    def scaled(self, distance: float) -> Tensor:
        """A distance between pixels, which go from 0 to 1, as one between normalised inputs, (channels, 1, 1)."""
        return distance / _by_channel(self.std)

    def limits(self) -> tuple[Tensor, Tensor]:
        """What black and white, or no and full colour, are as normalised inputs, (channels, 1, 1) each."""
        return self.normalise(torch.zeros(1)), self.normalise(torch.ones(1))


def _by_channel(numbers: tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1)


def both_solvers(kind: str, options: Mapping[str, object], default: Solver | None) -> tuple[Any, Any]:
    """The solvers of both directions for a layer of this ``kind``, which takes no other options.

    Backward is like forward, unless it is given.
    """
    if unknown := sorted(options.keys() - {"solver", "adjoint_solver"}):
        raise UsageError(f"{kind} takes no {', '.join(unknown)}; only solver, adjoint_solver")
    solver = options.get("solver") or default
    adjoint_solver = options.get("adjoint_solver") or solver
    for name, given in (("solver", solver), ("adjoint_solver", adjoint_solver)):
        if given is not None:
            require_solver(given, name)
    return solver, adjoint_solver


class Network(nn.Sequential):
    """What all networks share; a subclass says in `layers` what it consists of.

    Args:
        channels: the width of each equilibrium layer.
        image_shape: channels, height and width of the images.
        clip: begin with a `Clip`, as networks do that are trained against noise; `clip_pixels` sets its limits.
        options: keywords for the equilibrium layers.
    """

    widths: ClassVar[int]  # how many equilibrium layers, so how many channel numbers
    # What makes the layers of the paper's topologies, from a width and options: these, or a baseline's.
    dense: ClassVar[Callable[..., nn.Module]] = PcDEQLinear
    conv: ClassVar[Callable[..., nn.Module]] = PcDEQConv2d

    def __init__(
        self,
        channels: Widths,
        image_shape: ImageShape = (1, 28, 28),
        num_classes: int = 10,
        *,
        clip: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        self.check_channels(channels)
        first: Named = {"clip": Clip(image_shape[0])} if clip else {}
        super().__init__(OrderedDict(first | self.layers(channels, image_shape, num_classes, options)))
        self.channels = channels
        self.image_shape = image_shape
        self.num_classes = num_classes
        self.options = options
        self.preprocessing: Preprocessing | None = None  # set by whoever knows the data
        self.training_facts: TrainingFacts | None = None  # set by whoever trained it; for the model card
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # faster convolutions

    def clip_pixels(self, margin: float) -> None:
        """Have the `Clip`, with which the network begins, make pixels nearer than this to 0 or 1 no nearer."""
        given, (clip, *_) = self.preprocessing, self
        if not isinstance(clip, Clip) or given is None:
            raise UsageError("there are no pixels to clip: the network needs clip=True and a preprocessing")
        if not 0 <= margin < 0.5:
            raise UsageError(f"the margin of a clip must be at least 0 and below 0.5, got {margin}")
        for limit, pixel in ((clip.low, margin), (clip.high, 1 - margin)):
            limit.copy_(given.normalise(torch.full((), pixel)).expand_as(limit))

    def start_for_bounds(self) -> None:
        """Draw the weights of explicit layers anew, so that bounds begin no wider than what goes in (Shi et al. 2021).

        From N(0, sqrt(2 pi) / fan-in): |w| sums up to 2 over the inputs of a unit, whatever their number, and of two
        units one is on. Batch norm undoes the scale of the layer before it, which then only learns faster.
        """
        for layer in self:
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.normal_(layer.weight, std=math.sqrt(2 * math.pi) / layer.weight[0].numel())

    @classmethod
    def check_channels(cls, channels: Widths) -> None:
        """Raise `UsageError` unless these are widths for this network."""
        if len(channels) != cls.widths or min(channels) < 1:
            raise UsageError(f"channels of {cls.__name__} must be {cls.widths} positive number(s), got {channels}")

    @classmethod
    def layers(cls, channels: Widths, image_shape: ImageShape, num_classes: int, options: LayerOptions) -> Named:
        """The layers by name, from the image to the class scores."""
        raise NotImplementedError

    @classmethod
    def _stage(cls, lift: nn.Conv2d, options: LayerOptions, number: str = "", *, pool: bool = True) -> Named:
        """A convolution that changes the number of channels, and the equilibrium layer after it."""
        return {
            f"lift{number}": lift,
            f"lift{number}_norm": BatchNorm2d(lift.out_channels),
            f"deq{number}": cls.conv(lift.out_channels, **options),
            **({f"pool{number}": nn.MaxPool2d(3, stride=1, padding=1)} if pool else {}),
            f"deq{number}_norm": BatchNorm2d(lift.out_channels),
        }

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):  # a part of a topology is no longer that topology
            return nn.Sequential(OrderedDict(list(self.named_children())[index]))
        return super().__getitem__(index)

    def forward(self, input: Tensor) -> Tensor:  # (n, *image_shape) -> (n, num_classes)
        if tuple(input.shape[1:]) != self.image_shape:
            raise UsageError(
                f"the network was built for images of shape {self.image_shape}, got a batch of shape "
                f"{tuple(input.shape)}"
            )
        return super().forward(input)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write config.json, model.safetensors and a model card, README.md, into a folder; return the folder.

        >>> import tempfile
        >>> folder = L((8,), activation="relu6").save_pretrained(tempfile.mkdtemp())
        >>> Network.from_pretrained(folder).deq.activation.name
        'relu6'
        """
        from pcdeq.models import store

        return store.save_pretrained(self, folder)

    @classmethod
    def from_pretrained(
        cls, source: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
    ) -> Self:
        """The network that `save_pretrained` or `push_to_hub` wrote, or that `pcdeq.load` finds, in evaluation mode.

        Args:
            source: a folder, or a repository on the Hugging Face Hub such as ``"owner/name"``.
            revision: branch, tag or commit of the repository.
            token: for a private one, where ``hf auth login`` has not been used.
        """
        from pcdeq.models import store

        network = store.from_pretrained(source, revision=revision, token=token)
        if not isinstance(network, cls):
            raise UsageError(f"{source} holds a network {type(network).__name__}, not {cls.__name__}")
        return network

    def push_to_hub(self, repository: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload what `save_pretrained` writes to the Hugging Face Hub; return the address of the repository."""
        from pcdeq.models import store

        return store.push_to_hub(self, repository, private=private, token=token)


# A subclass says what it consists of; its forward pass is that of its layers, in line, after a check of the shape.
know_container(Network, may_override=("layers", "check_channels", "_stage", "save_pretrained", "push_to_hub"))


def equilibrium_layers(model: nn.Module) -> list[SolvingLayer]:
    """The layers of a model that solve something, in the order in which they were defined.

    >>> [type(layer).__name__ for layer in equilibrium_layers(L((8,)))]
    ['PcDEQLinear']
    """
    return [module for module in model.modules() if isinstance(module, SolvingLayer)]


class L(Network):
    """Flatten, dense layer, one dense pcDEQ, dense classifier.

    >>> L((80,), activation="relu6")(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    widths = 1

    @classmethod
    def layers(cls, channels: Widths, image_shape: ImageShape, num_classes: int, options: LayerOptions) -> Named:
        (width,) = channels
        return {
            "flatten": nn.Flatten(),
            "lift": nn.Linear(math.prod(image_shape), width),
            "lift_norm": nn.BatchNorm1d(width),
            "deq": cls.dense(width, **options),
            "deq_norm": nn.BatchNorm1d(width),
            "classifier": nn.Linear(width, num_classes),
        }


class SC(Network):
    """One convolutional pcDEQ at full resolution.

    >>> SC((8,))(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    widths = 1

    @classmethod
    def layers(cls, channels: Widths, image_shape: ImageShape, num_classes: int, options: LayerOptions) -> Named:
        (width,) = channels
        lift = nn.Conv2d(image_shape[0], width, 3, padding=1)
        return cls._stage(lift, options) | head(width, image_shape, image_shape[1:], 8, num_classes)


class MC(Network):
    """Three convolutional pcDEQs, each at about half the resolution of the one before.

    >>> MC((4, 6, 8), image_shape=(3, 32, 32))(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    widths = 3

    @classmethod
    def layers(cls, channels: Widths, image_shape: ImageShape, num_classes: int, options: LayerOptions) -> Named:
        first, second, third = channels
        size = tuple(((edge - 1) // 2 - 1) // 2 for edge in image_shape[1:])  # two convolutions of stride 2
        return (
            cls._stage(nn.Conv2d(image_shape[0], first, 3, padding=1), options, number="1")
            | cls._stage(nn.Conv2d(first, second, 3, stride=2), options, number="2")
            | cls._stage(nn.Conv2d(second, third, 3, stride=2), options, number="3")
            | head(third, image_shape, size, 4, num_classes)
        )


class TC(Network):
    """Two convolutional pcDEQs, at a half and a quarter of the resolution, with a classifier of every place; ours.

    For proofs against noise: of MC's explicit layers there is one less, no maximum widens bounds to those of the widest
    in its window, and none are averaged, which makes them no tighter.

    >>> TC((4, 6))(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    widths = 2

    @classmethod
    def layers(cls, channels: Widths, image_shape: ImageShape, num_classes: int, options: LayerOptions) -> Named:
        first, second = channels
        places = math.prod((edge + 3) // 4 for edge in image_shape[1:])  # twice halved, upwards
        return (
            cls._stage(nn.Conv2d(image_shape[0], first, 5, stride=2, padding=2), options, number="1", pool=False)
            | cls._stage(nn.Conv2d(first, second, 3, stride=2, padding=1), options, number="2", pool=False)
            | {"flatten": nn.Flatten(), "classifier": nn.Linear(second * places, num_classes)}
        )


def head(width: int, image_shape: ImageShape, size: tuple[int, ...], pooling: int, num_classes: int) -> Named:
    """Average the last feature maps, of the given size, and classify."""
    rows, columns = (edge // pooling for edge in size)
    if rows < 1 or columns < 1:
        raise UsageError(
            f"images of {image_shape[1]} x {image_shape[2]} pixels are too small for this network: "
            f"its pooling by {pooling} would leave nothing; the L network takes any size"
        )
    return {
        "average": AvgPool2d(pooling),
        "flatten": nn.Flatten(),
        "classifier": nn.Linear(width * rows * columns, num_classes),
    }


def pcdeq_layers(model: nn.Module) -> list[PcDEQ]:
    """Those of them for which there are guarantees.

    >>> [type(layer).__name__ for layer in pcdeq_layers(L((8,)))]
    ['PcDEQLinear']
    """
    return [module for module in model.modules() if isinstance(module, PcDEQ)]
