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

import torch
from torch import Tensor, nn

from pcdeq.errors import UsageError


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
        self._padding = [size // 2 for size in weight.shape[2:]]
        self._flipped: Tensor | None = None
        self.kind = "conv" if type(self) is ConvMap else None

    def apply(self, z: Tensor) -> Tensor:  # (samples, channels, *space)
        return self._convolve(z, self.weight, padding=self._padding)

    def apply_plus(self, z: Tensor, x: Tensor) -> Tensor:
        return self.apply(z).add_(x)

    def adjoint(self, y: Tensor) -> Tensor:
        if self._flipped is None:
            flipped = self.weight.detach().flip(tuple(range(2, self.weight.ndim))).transpose(0, 1)
            self._flipped = flipped.contiguous(memory_format=_memory_format(self.weight))
        return self._convolve(y, self._flipped, padding=self._padding)

    def weight_gradient(self, z: Tensor, y: Tensor) -> Tensor:
        ones = [1] * len(self._padding)
        wanted = [False, True, False]
        return torch.ops.aten.convolution_backward(
            y, z, self.weight, None, ones, self._padding, ones, False, [0] * len(ones), 1, wanted
        )[1]

    def terms(self, state: torch.Size) -> int:
        return self.weight[0].numel()


def _memory_format(weight: Tensor) -> torch.memory_format:
    channels_last = weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format


def _passes(parameter: Tensor, grad: Tensor) -> Tensor:
    """Where the gradient of max(parameter, 0) passes.

    At parameter >= 0 it always does, as through a clamp, so that with `project_` after each step the
    dynamics are the paper's. Below 0 a gradient whose descent step raises the parameter is let through,
    so that no weight stays dead.
    """
    return (parameter >= 0) | (grad < 0)


class _NonnegativeWeight(torch.autograd.Function):
    """max(v, 0) or, with a g, g v / ‖v‖ by rows for v and g clamped at 0; gradients also bring back what is below 0.

    A row of zeros has no direction. Its weight is 0; v learns as if its norm were 1, and g along the
    diagonal, so that the row can come back even from g = 0.
    """

    @staticmethod
    def forward(ctx, v: Tensor, g: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(v, g)
        return nonnegative_weight(v, g)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        v, g = ctx.saved_tensors
        if g is None:
            return grad * _passes(v, grad), None
        direction, norm, empty = _directions(v)
        rows = tuple(range(1, v.ndim))
        along = (grad * direction).sum(rows, keepdim=True)
        grad_v = (g.clamp(min=0.0) / norm) * (grad - direction * along)
        grad_g = along + empty * (grad.sum(rows, keepdim=True) * math.sqrt(v.shape[0] / v.numel()))
        return grad_v * _passes(v, grad_v), grad_g * _passes(g, grad_g)


def nonnegative_weight(v: Tensor, g: Tensor | None = None) -> Tensor:
    """The weight in use, from the parameters that are learned."""
    if g is None:
        return v.clamp(min=0.0)
    direction, _, _ = _directions(v)
    return direction * g.clamp(min=0.0)


def _directions(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """max(v, 0) by rows with norm 1, those norms, and which rows are 0, whose norm counts as 1."""
    positive = v.clamp(min=0.0)
    norm = _row_norm(positive)
    empty = norm == 0
    norm = norm + empty
    return positive / norm, norm, empty


class Operator(nn.Module, ABC):
    """A nonnegative linear operator with a learned weight.

    A subclass says in `bind` how a weight acts; its first axis counts output units.

    Args:
        shape: the weight's shape.
        state_ndim: how many trailing dimensions one sample has (1 for a vector, 3 for an image).
        weight_norm: parametrise each output unit's weights as w = g v / ‖v‖, as the paper does.

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

    def __init__(self, shape: tuple[int, ...], *, state_ndim: int, weight_norm: bool = True) -> None:
        super().__init__()
        if len(shape) < 2 or min(shape) < 1:
            raise UsageError(f"an operator's weight needs two or more axes of at least 1, got {tuple(shape)}")
        self.shape = tuple(shape)
        self.state_ndim = state_ndim
        self.weight_norm = weight_norm
        if weight_norm:
            self.weight_v = nn.Parameter(torch.empty(shape))
            self.weight_g = nn.Parameter(torch.empty(shape[0], *[1] * (len(shape) - 1)))
        else:
            self.weight = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The paper's start: uniform on [0, 1) times sqrt(1e-4 / (rows + columns))."""
        direction = self.weight_v if self.weight_norm else self.weight
        direction.uniform_(0, 1).mul_(math.sqrt(1e-4 / (direction.shape[0] + direction.shape[1])))
        if self.weight_norm:
            self.weight_g.copy_(_row_norm(direction))

    def _stored(self) -> tuple[Tensor, ...]:
        return (self.weight_v, self.weight_g) if self.weight_norm else (self.weight,)

    def effective_weight(self) -> Tensor:
        """The weight in use: >= 0, normalised, differentiable."""
        return _NonnegativeWeight.apply(*self._stored())  # pyright: ignore[reportReturnType]

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

    @abstractmethod
    def bind(self, weight: Tensor) -> LinearMap:
        """The linear map of this weight, which is `effective_weight()` or one of its dtype variants."""

    def check_input(self, x: Tensor) -> None:
        """Raise `UsageError` unless one sample of x has a shape this operator takes."""

    def extra_repr(self) -> str:
        return f"{self.shape}, weight_norm={self.weight_norm}"


class Dense(Operator):
    """A square nonnegative matrix on the last dimension."""

    def __init__(self, features: int, *, weight_norm: bool = True) -> None:
        super().__init__((features, features), state_ndim=1, weight_norm=weight_norm)
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

    def __init__(self, dims: int, channels: int, kernel_size: int = 3, *, weight_norm: bool = True) -> None:
        if not isinstance(kernel_size, int) or kernel_size < 1 or kernel_size % 2 == 0:
            raise UsageError(f"kernel_size must be one odd number, so that the size is kept; got {kernel_size}")
        shape = (channels, channels, *[kernel_size] * dims)
        super().__init__(shape, state_ndim=dims + 1, weight_norm=weight_norm)
        self.channels = channels

    def bind(self, weight: Tensor) -> LinearMap:
        return ConvMap(weight)

    def check_input(self, x: Tensor) -> None:
        if x.shape[-self.state_ndim] != self.channels:
            raise UsageError(
                f"the layer has {self.channels} channels but the input has {x.shape[-self.state_ndim]} "
                f"(shape {tuple(x.shape)}, channels are dimension {-self.state_ndim})"
            )


def _row_norm(v: Tensor) -> Tensor:
    """‖v‖ by rows; in float64 where there is one, because the square of a small float32 is 0."""
    wide = None if v.device.type == "mps" else torch.float64
    return torch.linalg.vector_norm(v, dim=tuple(range(1, v.ndim)), keepdim=True, dtype=wide).to(v.dtype)


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
