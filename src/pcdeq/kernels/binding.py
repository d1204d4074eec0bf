"""The one way to the C kernels: each kernel once, what it takes, how it lies in memory, how many threads it gets.

A kernel stands for plain torch that computes the same up to rounding, and where it does not apply (another dtype or
device, no compiler at install time, somebody who watches what torch does) the function here declines: it returns None,
and its caller goes on in torch. Tensors go to C as DLPack capsules, never as addresses, and C checks each against the
others itself. What C cannot see is checked here: that a tensor is what it seems, and that its storage holds it.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any, NamedTuple, Protocol

import torch  # its OpenMP runtime must be loaded before the kernels
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.dlpack import to_dlpack  # pyright: ignore[reportPrivateImportUsage]

from pcdeq.errors import UsageError

# What the functions of the compiled module take; module.c has the same number.
INTERFACE = 6
# A dense weight is multiplied with one sample at a time: good while the weight stays in the cache.
LARGEST_DENSE = 256
# Below this tolerance the kernel would take most steps of convolutions by plain sums, which torch has as well.
FINEST_CONV = 1e-6
# Gradients of weights are worth their transforms for images from this size on, and so many tiles of all samples.
TILE, SMALLEST_IMAGE, FEWEST_TILES = 4, 3, 32
# Below so many multiplications of a product, or numbers of a pass, a second thread costs more than it saves.
PARALLEL_PRODUCT, PARALLEL_PASS = 200_000, 32_768


def _load() -> tuple[Any, str]:
    """The compiled module, or None and why not."""
    if os.environ.get("PCDEQ_KERNELS") == "0":
        return None, "torch, as PCDEQ_KERNELS=0 asks"
    try:
        module = importlib.import_module("pcdeq._kernels")
    except ModuleNotFoundError:
        return None, "torch: the C kernels were not built, for which pip needs gcc or clang"
    except ImportError as error:
        reason = f"the C kernels of pcdeq cannot be loaded and are not used: {error}"
        if any(name in str(error) for name in ("GOMP_", "omp_", "__kmpc_")):
            reason += " (of an OpenMP runtime that torch has not loaded; build pcdeq where its torch is, with gcc)"
    else:
        if getattr(module, "INTERFACE", None) == INTERFACE:
            return module, ""
        reason = "the C kernels of pcdeq are of another version and not used: install it anew"
    warnings.warn(reason, stacklevel=2)
    return None, f"torch: {reason}"


_KERNELS, _WHY_NOT = _load()
_CODES = {} if _KERNELS is None else {name: code for code, name in enumerate(_KERNELS.ACTIVATIONS)}


def engine() -> str:
    """What runs the kernels' work on a CPU, for people: C and its threads, or torch and why."""
    return _WHY_NOT if _KERNELS is None else f"C, {_threads(1, 0)} threads"


class Form(NamedTuple):
    """z = s(Wz + offset), or u = slope * (W'u + offset), in the form that the kernels know."""

    kind: str  # "dense" on (samples, n), or "conv" on (samples, c, *space)
    weight: Tensor  # (n, n), or (c, c, *kernel)
    transposed: bool  # multiply with the adjoint
    activation: str  # a name; "linear" for the adjoint equation, which has a slope
    offset: Tensor  # x >= 0, or the incoming gradient
    slope: Tensor | None = None


class Solved(NamedTuple):
    """What a solve has found, sample by sample, and in short: how many failed, the most steps, the largest residual.

    ``plain`` samples were solved by plain sums, at the end at least: Winograd's rounding might have hidden a component,
    or is too much for the tolerance.
    """

    value: Tensor
    steps: Tensor  # (samples,) int64
    residual: Tensor  # (samples,) float32, relative
    converged: Tensor  # (samples,) bool
    summary: tuple[int, int, float]
    plain: int


def solve(
    form: Form,
    start: Tensor | None,
    base: Tensor | None,
    box: tuple[float, float] | tuple[Tensor, Tensor] | None,
    *,
    tol: float,
    decay: float,
    steps_before: int,
    max_steps: int,
) -> Solved | None:
    """Anderson's method with memory 1, sample by sample to its end, while the sample lies in the cache.

    Args:
        start: the first iterate; left out, it is s(base + offset).
        base: a guess of the product at the solution, of one sample's shape; 0 if left out.
        box: where iterates are kept; it must hold 0.
        steps_before: the steps that the start stands for, which count.
    """
    given = [t for t in (form.weight, form.offset, form.slope, start, base) if t is not None]
    if not _takes(*given) or _needs_graph(*given) or not _knows(form, tol):
        return None
    low_and_high = (-torch.inf, torch.inf) if box is None else box
    if isinstance(low_and_high[0], Tensor):  # of an activation without a supremum
        return None
    samples, places = len(form.offset), form.offset.numel() // form.weight.shape[0]
    work = form.weight.numel() * places
    if _lacks_threads(work, PARALLEL_PRODUCT):
        return None
    layout = _layout(form.offset)
    offset, slope, start = (None if t is None else _lay_out(t, layout) for t in (form.offset, form.slope, start))
    base = None if base is None or start is not None else _lay_out(base[None], layout)
    assert offset is not None
    value = torch.empty_like(offset)
    steps = torch.empty(samples, dtype=torch.int64, device="cpu")
    residual = torch.empty(samples, dtype=torch.float32, device="cpu")
    converged = torch.empty(samples, dtype=torch.bool, device="cpu")
    summary = _call(
        _KERNELS.solve,
        form.kind == "conv",
        form.transposed,
        _CODES[form.activation],
        offset,
        form.weight.contiguous(),
        slope,
        start,
        base,
        value,
        steps,
        residual,
        converged,
        tol,
        decay,
        *low_and_high,
        steps_before,
        max_steps,
        _threads(work, PARALLEL_PRODUCT),
    )
    return None if summary is None else Solved(value, steps, residual, converged, summary[:3], summary[3])


def _knows(form: Form, tol: float) -> bool:
    """Whether there is a kernel for this product and activation that is worth its while and exact enough."""
    if form.activation not in _CODES:
        return False
    if form.kind == "dense":
        return form.offset.ndim == 2 and form.weight.ndim == 2 and len(form.weight) <= LARGEST_DENSE
    of_images = form.offset.ndim == 4 and form.weight.shape[2:] == (3, 3)
    return form.kind == "conv" and of_images and tol >= FINEST_CONV and bool(_KERNELS.VECTORISED)


def convolve(
    x: Tensor, weight: Tensor, plus: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor | None:
    """A convolution of images in float64 by plain sums, padded with zeros, and what is to be added to it."""
    given = [t for t in (x, weight, plus) if t is not None]
    if not _takes(*given, dtype=torch.float64) or _needs_graph(*given) or not _KERNELS.VECTORISED:
        return None
    if x.ndim != 4 or weight.ndim != 4 or len(set(stride)) != 1:
        return None
    kernel, step = weight.shape[2:], stride[0]
    sizes = [(n + 2 * pad - k) // step + 1 for n, pad, k in zip(x.shape[2:], padding, kernel, strict=True)]
    work = weight.numel() * len(x) * sizes[0] * sizes[1]
    if min(sizes) < 1 or _lacks_threads(work, PARALLEL_PRODUCT):
        return None
    layout = _layout(x)
    y = torch.empty(len(x), len(weight), *sizes, dtype=x.dtype, device=x.device, memory_format=layout)
    plus = None if plus is None else _lay_out(plus, layout)
    arguments = (*kernel, step, *padding, _lay_out(x, layout), y, weight.contiguous(), plus)
    return y if _call(_KERNELS.convolve, *arguments, _threads(work, PARALLEL_PRODUCT)) else None


def weight_gradient(z: Tensor, u: Tensor, weight: Tensor) -> Tensor | None:
    """The gradient of <u, Wz> for the weight of a 3x3 convolution that keeps the size of images."""
    if not _takes(z, u, weight) or _needs_graph(z, u) or not _KERNELS.VECTORISED:
        return None
    if z.ndim != 4 or z.shape != u.shape or weight.shape != (z.shape[1], z.shape[1], 3, 3):
        return None
    samples, _, height, width = z.shape
    work = weight.numel() * samples * height * width
    tiles = samples * -(-height // TILE) * -(-width // TILE)
    if min(height, width) < SMALLEST_IMAGE or tiles < FEWEST_TILES or _lacks_threads(work, PARALLEL_PRODUCT):
        return None
    layout, gradient = _layout(z), torch.empty(weight.shape, dtype=z.dtype, device=z.device)
    given = (_lay_out(z, layout), _lay_out(u, layout), gradient)
    return gradient if _call(_KERNELS.weight_gradient, *given, _threads(work, PARALLEL_PRODUCT)) else None


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    *,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor | None:
    """Batch norm of channels-last images by their statistics, of which the running ones take a part; or by these."""
    if weight is None or bias is None or mean is None or variance is None:
        return None
    if not _takes(x, weight, bias, mean, variance) or not x.shape[1:2] == mean.shape == variance.shape:
        return None
    layout_is_ours = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    if not layout_is_ours or _lacks_threads(x.numel(), PARALLEL_PASS):  # torch's own is good
        return None
    if not training:
        return None if _needs_graph(x, weight, bias, mean, variance) else _infer(x, weight, bias, mean, variance, eps)
    if x.numel() == x.shape[1] or not all(map(_is_writable, (mean, variance))):  # torch says what is wrong
        return None
    return Declared.apply(_BatchNorm(mean, variance, momentum, eps), x, weight, bias)  # pyright: ignore[reportReturnType]


def _infer(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor | None:
    y, rows = torch.empty_like(x), (t.contiguous() for t in (weight, bias, mean, variance))
    return y if _call(_KERNELS.batch_norm_inference, x, *rows, y, eps, _threads(x.numel(), PARALLEL_PASS)) else None


class _BatchNorm(NamedTuple):
    """Batch norm in training, for `Declared`."""

    mean: Tensor
    variance: Tensor
    momentum: float
    eps: float

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        y, statistics = torch.empty_like(x), torch.empty(3, x.shape[1], dtype=torch.float32, device="cpu")
        out = (y, statistics, self.eps, _threads(x.numel(), PARALLEL_PASS))
        if not _call(_KERNELS.batch_norm_forward, x, weight.contiguous(), bias.contiguous(), *out):
            return None
        self.mean.lerp_(statistics[0], self.momentum)
        self.variance.lerp_(statistics[2], self.momentum)
        return y, (x, weight, statistics)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, statistics: Tensor) -> tuple[Tensor, ...]:
        given = (grad, x, weight, statistics)
        found = None if not _takes(*given) or _needs_graph(*given) else self._backward_by_kernel(*given)
        if found is not None:
            return found
        saved = (None, None, statistics[0], statistics[1], True, self.eps, (True, True, True))
        return torch.ops.aten.native_batch_norm_backward(grad, x, weight, *saved)

    def _backward_by_kernel(
        self, grad: Tensor, x: Tensor, weight: Tensor, statistics: Tensor
    ) -> tuple[Tensor, ...] | None:
        x, grad = (_lay_out(t, torch.channels_last) for t in (x, grad))
        weight, statistics = weight.contiguous(), statistics.contiguous()
        grads = (torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight))
        inputs = (x, grad, weight, statistics)
        done = _call(_KERNELS.batch_norm_backward, *inputs, *grads, _threads(x.numel(), PARALLEL_PASS))
        return grads if done else None


class Kernel(Protocol):
    """A kernel with its gradient: what to save for it, and the gradients of each input."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]] | None: ...

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, ...]: ...


class Declared(torch.autograd.Function):
    """A kernel with a declared backward, as torch sees it."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, *inputs: Tensor) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = kernel.forward(*inputs)
        if found is None:
            return None
        value, saved = found
        ctx.save_for_backward(*saved)
        ctx.kernel, ctx.kinds = kernel, [(t.shape, t.dtype, t.device) for t in saved]
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = []
        for given, (shape, dtype, device) in zip(ctx.saved_tensors, ctx.kinds, strict=True):
            if given.shape != shape:
                shapes = f"{tuple(given.shape)} for one of {tuple(shape)}"
                raise UsageError(f"a hook for saved tensors gave back a tensor of shape {shapes}; it must keep it")
            saved.append(given.to(device, dtype))
        return None, *ctx.kernel.backward(grad, *saved)


def _takes(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether there are kernels, nobody needs to see what torch does, and these are numbers that C can read."""
    return _KERNELS is not None and _is_unwatched() and all(_is_plain(x, dtype) for x in tensors)


def are_plain(*tensors: Tensor, dtype: torch.dtype) -> bool:
    """Whether these are numbers on a CPU, and nobody needs to see what torch does with them."""
    return _is_unwatched() and not _needs_graph(*tensors) and all(_is_plain(x, dtype) for x in tensors)


def _is_unwatched() -> bool:
    watched = torch.compiler.is_compiling() or is_tracing()
    return not watched and _get_current_dispatch_mode() is None and forward_ad._current_level < 0


def _is_plain(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether x is of a dtype and in the memory of this process; a subclass may hold its numbers elsewhere."""
    kind = type(x)
    if not (kind is Tensor or kind is Parameter) or x.dtype is not dtype or not x.is_cpu or x.is_nested:
        return False
    batched = is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x)
    if batched or x.layout is not torch.strided or x.is_neg() or not x.numel():
        return False
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.untyped_storage().nbytes() >= x.itemsize * (x.storage_offset() + last + 1)


def _is_writable(x: Tensor) -> bool:
    """Whether torch can write to this vector in place."""
    frozen = x.is_inference() and not torch.is_inference_mode_enabled()
    return not (frozen or x._is_zerotensor() or _needs_graph(x)) and (x.stride(0) > 0 or len(x) == 1)


def _needs_graph(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _layout(x: Tensor) -> torch.memory_format:
    images = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if images else torch.contiguous_format


def _lay_out(x: Tensor, layout: torch.memory_format) -> Tensor:
    return x.contiguous(memory_format=layout if x.ndim == 4 else torch.contiguous_format)


def _lacks_threads(work: int, worth: int) -> bool:
    """Whether torch would share this work among threads, of which a kernel built without OpenMP has one."""
    return _KERNELS.MOST_THREADS == 1 and work >= worth and torch.get_num_threads() > 1


def _threads(work: int, worth: int) -> int:
    return min(torch.get_num_threads(), _KERNELS.MOST_THREADS) if work >= worth else 1


def _call(kernel: Any, *arguments: Any) -> Any:
    """What the kernel returns; None where C refuses, before it has touched anything.

    It sees what Python does not, such as memory that is not aligned or not there.
    """
    try:
        return kernel(*(to_dlpack(a) if isinstance(a, Tensor) else a for a in arguments))
    except ValueError:
        return None
