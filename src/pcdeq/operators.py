"""Nonnegative linear operators, the W of z = s(Wz + x).

Two objects share the work. An `Operator` is a module: it owns the parameters, keeps the weight
in use >= 0 and knows the paper's weight normalisation and start. A `LinearMap` is one fixed
weight, ready to be applied many times: what a solve works with, made once per solve.

The weight is clamped at 0 on every use, so no training loop, load or cast can void the guarantee.
`project_` clamps the parameters themselves, which after each optimiser step is the paper's rule.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from pcdeq.convolution import convolve
from pcdeq.errors import UsageError
from pcdeq.kernels import binding
from pcdeq.parametrisation import NonnegativeWeight, TransformedWeight, is_transformed, nonnegative_weight, row_norm

Device = torch.device | str | int | None


class LinearMap(ABC):
    """z -> Wz for one fixed nonnegative weight; subclass it together with `Operator`.

    Tensors have one leading sample dimension: ``(samples, *state)``. ``kind`` is the name under which the package
    knows its own maps.

    Only `apply` must be written; the adjoint then comes from autograd. A moving sum of neighbours:

    >>> import torch, pcdeq
    >>> class Neighbours(pcdeq.LinearMap):
    ...     def apply(self, z):
    ...         return self.weight[0, 0] * (z.roll(1, -1) + z.roll(-1, -1))
    >>> neighbours = Neighbours(torch.tensor([[0.5]]))
    >>> neighbours.apply(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[0.0000, 0.5000, 0.0000, 0.5000]])
    >>> neighbours.adjoint(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[0.0000, 0.5000, 0.0000, 0.5000]])
    """

    kind: str | None = None

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @abstractmethod
    def apply(self, z: Tensor) -> Tensor:
        """Wz."""

    def apply_plus(self, z: Tensor, x: Tensor) -> Tensor:
        """Wz + x, in memory of its own."""
        return self.apply(z) + x

    def adjoint(self, y: Tensor) -> Tensor:
        """Wᵀy; by autograd unless a subclass knows better."""
        with torch.inference_mode(False), torch.enable_grad():
            z = torch.zeros_like(y, requires_grad=True)
            (result,) = torch.autograd.grad(self.apply(z), z, y)
        return result

    def weight_gradient(self, z: Tensor, y: Tensor) -> Tensor:
        """The gradient of <y, Wz> with respect to the weight; by autograd unless a subclass knows better."""
        with torch.enable_grad():
            weight = self.weight.detach().requires_grad_()
            held, self.weight = self.weight, weight
            try:
                (result,) = torch.autograd.grad(self.apply(z.detach()), weight, y)
            finally:
                self.weight = held
        return result

    def transposed(self) -> Tensor:
        """The weight of Wᵀ as a map of the same kind, differentiable; only of maps that have a kind."""
        raise NotImplementedError

    def terms(self, state: torch.Size) -> int:
        """At most so many roundings lie between a component of Wz and its terms (for error bounds, T9)."""
        return state.numel() + self.weight[0].numel()

    def matrix(self, state: torch.Size) -> Tensor:
        """W as a matrix of ``state.numel()`` rows: the images of the unit vectors, one product for all."""
        n = state.numel()
        units = torch.eye(n, dtype=self.weight.dtype, device=self.weight.device).reshape(n, *state)
        return self.apply(units).reshape(n, n).T


class DenseMap(LinearMap):
    """z -> z Wᵀ on the last dimension."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.kind = "dense" if type(self) is DenseMap else None

    def apply(self, z: Tensor) -> Tensor:  # (samples, features)
        return z @ self.weight.T

    def apply_plus(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(x, z, self.weight.T) if z.ndim == 2 else super().apply_plus(z, x)

    def adjoint(self, y: Tensor) -> Tensor:
        return y @ self.weight

    def weight_gradient(self, z: Tensor, y: Tensor) -> Tensor:
        return y.T @ z

    def transposed(self) -> Tensor:
        return self.weight.T

    def terms(self, state: torch.Size) -> int:
        return self.weight.shape[1]

    def matrix(self, state: torch.Size) -> Tensor:
        return self.weight


class ConvMap(LinearMap):
    """A convolution of stride 1 that keeps the size, in 1 to 3 dimensions.

    Its adjoint is again such a convolution, with the kernel flipped in space and its two channel
    axes exchanged; written so it runs on the forward kernels, which are the fast ones.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[weight.ndim - 3]
        self._stride = (1,) * (weight.ndim - 2)
        self._padding = tuple(size // 2 for size in weight.shape[2:])
        self._flipped: Tensor | None = None
        self.kind = "conv" if type(self) is ConvMap else None

    def apply(self, z: Tensor) -> Tensor:  # (samples, channels, *space)
        return convolve(z, self.weight, None, self._stride, self._padding)

    def apply_plus(self, z: Tensor, x: Tensor) -> Tensor:
        return convolve(z, self.weight, x, self._stride, self._padding)

    def adjoint(self, y: Tensor) -> Tensor:
        if self._flipped is None:
            self._flipped = self.transposed().detach().contiguous(memory_format=_memory_format(self.weight))
        return self._convolve(y, self._flipped, padding=self._padding)

    def weight_gradient(self, z: Tensor, y: Tensor) -> Tensor:
        found = binding.weight_gradient(z, y, self.weight)
        if found is not None:
            return found
        ones = [1] * len(self._padding)
        wanted = [False, True, False]
        return torch.ops.aten.convolution_backward(
            y, z, self.weight, None, ones, self._padding, ones, False, [0] * len(ones), 1, wanted
        )[1]

    def transposed(self) -> Tensor:
        return self.weight.flip(tuple(range(2, self.weight.ndim))).transpose(0, 1)

    def terms(self, state: torch.Size) -> int:
        return self.weight[0].numel()


def _memory_format(weight: Tensor) -> torch.memory_format:
    channels_last = weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format


class Operator(nn.Module, ABC):
    """A nonnegative linear operator with a learned weight.

    A subclass says in `bind` how a weight acts; its first axis counts output units.

    Args:
        shape: the weight's shape.
        state_ndim: how many trailing dimensions one sample has (1 for a vector, 3 for an image).
        weight_norm: parametrise each output unit's weights as w = g v / ‖v‖, as the paper does.
        device, dtype: of the parameters, as in torch's own layers.

    A graph operator, z -> A z Wᵀ for a fixed adjacency A >= 0:

    >>> import torch, pcdeq
    >>> class GraphMap(pcdeq.LinearMap):
    ...     def __init__(self, weight, adjacency):
    ...         super().__init__(weight)
    ...         self.adjacency = adjacency
    ...     def apply(self, z):
    ...         return self.adjacency @ z @ self.weight.T
    ...     def adjoint(self, y):
    ...         return self.adjacency.T @ y @ self.weight
    >>> class Graph(pcdeq.Operator):
    ...     def __init__(self, adjacency, features):
    ...         super().__init__((features, features), state_ndim=2)
    ...         self.register_buffer("adjacency", adjacency)
    ...     def bind(self, weight):
    ...         return GraphMap(weight, self.adjacency.to(weight.dtype))
    >>> ring = torch.eye(5).roll(1, 0)
    >>> pcdeq.PcDEQ(Graph(ring, features=3), activation="tanh")(torch.randn(2, 5, 3)).shape
    torch.Size([2, 5, 3])
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        state_ndim: int,
        weight_norm: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dtype is not None and not dtype.is_floating_point:
            raise UsageError(f"an operator's weight is of a floating point dtype, got {dtype}")
        if len(shape) < 2 or min(shape) < 1:
            raise UsageError(f"an operator's weight needs two or more axes of at least 1, got {tuple(shape)}")
        self.shape = tuple(shape)
        self.state_ndim = state_ndim
        self.weight_norm = weight_norm
        if weight_norm:
            self.weight_v = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            rows = (shape[0], *[1] * (len(shape) - 1))
            self.weight_g = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))
        else:
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The paper's start: uniform on [0, 1) times sqrt(1e-4 / (rows + columns))."""
        direction = self.weight_v if self.weight_norm else self.weight
        direction.uniform_(0, 1).mul_(math.sqrt(1e-4 / (direction.shape[0] + direction.shape[1])))
        if self.weight_norm:
            self.weight_g.copy_(row_norm(direction))

    def _stored(self) -> tuple[Tensor, ...]:
        return (self.weight_v, self.weight_g) if self.weight_norm else (self.weight,)

    def effective_weight(self) -> Tensor:
        """The weight in use: >= 0, normalised, differentiable."""
        v, g = self._stored() if self.weight_norm else (self.weight, None)
        plain = torch.compiler.is_compiling() or not is_transformed()
        if plain and not torch.is_grad_enabled():
            return nonnegative_weight(v, g)
        return (NonnegativeWeight if plain else TransformedWeight).apply(v, g)  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def effective_weight_in(self, dtype: torch.dtype) -> Tensor:
        """The weight in use, computed in another dtype from the stored parameters."""
        return nonnegative_weight(*(parameter.to(dtype) for parameter in self._stored()))

    @torch.no_grad()
    def fix_(self) -> None:
        """Replace the parameters by the weight that they make: a constant from now on."""
        weight = self.effective_weight().detach()
        if self.weight_norm:
            del self.weight_v, self.weight_g
        self.weight_norm, self.weight = False, nn.Parameter(weight, requires_grad=False)

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return self._stored()[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""
        return self._stored()[0].dtype

    @abstractmethod
    def bind(self, weight: Tensor) -> LinearMap:
        """The linear map of this weight, which is `effective_weight()` or one of its dtype variants."""

    def check_input(self, x: Tensor) -> None:
        """Raise `UsageError` unless one sample of x has a shape this operator takes."""

    def extra_repr(self) -> str:
        return f"{self.shape}, weight_norm={self.weight_norm}"


class Dense(Operator):
    """A square nonnegative matrix on the last dimension; takes the keywords of `Operator`."""

    def __init__(self, features: int, **options: Any) -> None:
        super().__init__((features, features), state_ndim=1, **options)
        self.features = features

    def bind(self, weight: Tensor) -> LinearMap:
        return DenseMap(weight)

    def check_input(self, x: Tensor) -> None:
        if x.shape[-1] != self.features:
            raise UsageError(
                f"the layer has {self.features} features but the input's last dimension is {x.shape[-1]} "
                f"(shape {tuple(x.shape)})"
            )


class Conv(Operator):
    """A nonnegative convolution that keeps channels and size, in ``dims`` = 1, 2 or 3 dimensions."""

    def __init__(self, dims: int, channels: int, kernel_size: int = 3, **options: Any) -> None:
        if not isinstance(kernel_size, int) or kernel_size < 1 or kernel_size % 2 == 0:
            raise UsageError(f"kernel_size must be one odd number, so that the size is kept; got {kernel_size}")
        shape = (channels, channels, *[kernel_size] * dims)
        super().__init__(shape, state_ndim=dims + 1, **options)
        self.channels = channels

    def bind(self, weight: Tensor) -> LinearMap:
        return ConvMap(weight)

    def check_input(self, x: Tensor) -> None:
        if x.shape[-self.state_ndim] != self.channels:
            raise UsageError(
                f"the layer has {self.channels} channels but the input has {x.shape[-self.state_ndim]} "
                f"(shape {tuple(x.shape)}, channels are dimension {-self.state_ndim})"
            )


@torch.no_grad()
def project_(model: nn.Module) -> nn.Module:
    """Clamp the parameters of every operator in the model at 0, in place: the paper's projection.

    Call it after each optimiser step, or attach it to any optimiser once:

    >>> import torch, pcdeq
    >>> layer = pcdeq.PcDEQLinear(4)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> handle = optimizer.register_step_post_hook(lambda *_: pcdeq.project_(layer))

    It is not needed for the guarantee, since the weight in use is clamped anyway; it makes the
    training dynamics exactly the paper's.
    """
    _project(model)
    return model


def _project(module: nn.Module) -> None:
    parameters = module._parameters if isinstance(module, Operator) else {}
    for parameter in parameters.values():
        if parameter is not None:
            parameter.clamp_(min=0.0)
    for child in module._modules.values():  # in a small network `modules()` takes longer than to clamp
        if child is not None:
            _project(child)


# The package's own maps, by kind.
MAPS: dict[str, type[LinearMap]] = {"dense": DenseMap, "conv": ConvMap}
