"""Full precision for proofs, whatever surrounds them (T9).

A margin for rounding speaks of products that are plain sums in the dtype of their factors. Much in torch may make them
something else: autocast, TF32, oneDNN's bfloat16, convolutions by Winograd or FFT, denormal numbers taken for 0. Every
proof runs inside `full_precision`, which turns all of that off, and leaves it as it was.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# What torch keeps a precision for, in the order in which one inherits from those before it.
_PRECISIONS = (
    ("generic", "all"), ("mkldnn", "all"), ("cuda", "all"),
    *((backend, op) for backend in ("mkldnn", "cuda") for op in ("matmul", "conv", "rnn")),
)  # fmt: skip
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiply in the dtype of the factors, and convolve by plain sums, in this block or function.

    >>> import torch
    >>> x = torch.tensor([[1 + 2**-20]])
    >>> with torch.autocast("cpu"):
    ...     rounded = x @ x
    ...     with full_precision():
    ...         print(bool(x @ x > 1), bool(rounded > 1))
    True False
    """
    with ExitStack() as stack:
        for device in _DEVICES:  # one setting a thread and device
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if float(_DENORMAL * 1.0) == 0 and torch.set_flush_denormal(False):  # likewise
            stack.callback(torch.set_flush_denormal, True)
        stack.enter_context(_SETTINGS)
        if torch.accelerator.is_available() or not _sums_plainly(torch._C._get_mkldnn_enabled()):
            stack.enter_context(_PlainConvolutions())
        yield


_DENORMAL = torch.tensor(2.0**-1050, dtype=torch.float64, device="cpu")


class _Settings:
    """The settings of the process, which is strict while any thread is within: the first one in keeps them."""

    def __init__(self) -> None:
        self.lock, self.inside = threading.Lock(), 0
        self.before: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = _make_strict()
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                _restore(*self.before)


_SETTINGS = _Settings()


def _make_strict() -> tuple[Any, ...]:
    """Set everything to float32 as it is, and return what was set."""
    matmul, cudnn = _older(torch.get_float32_matmul_precision), _older(lambda: torch.backends.cudnn.allow_tf32)
    precisions = []
    for key in _PRECISIONS:
        precisions.append(torch._C._get_fp32_precision_getter(*key))
        torch._C._set_fp32_precision_setter(*key, "none")  # so that the next ones show what they do not inherit
    (nnpack,) = torch.backends.nnpack.set_flags(False)
    _set_older("highest" if matmul else None, None if cudnn is None else False)
    for key in _PRECISIONS[3:]:
        torch._C._set_fp32_precision_setter(*key, "ieee")
    return matmul, cudnn, precisions, nnpack


def _restore(matmul: str | None, cudnn: bool | None, precisions: Sequence[str], nnpack: bool) -> None:
    _set_older(matmul, cudnn)
    torch.backends.nnpack.set_flags(nnpack)
    for key, precision in zip(_PRECISIONS, precisions, strict=True):
        torch._C._set_fp32_precision_setter(*key, precision)


def _older(read: Callable[[], Any]) -> Any:
    """One of torch's older settings, which raise where newer ones say something else; None then."""
    try:
        return read()
    except RuntimeError:
        return None


def _set_older(matmul: str | None, cudnn: bool | None) -> None:
    if matmul is not None:
        torch.set_float32_matmul_precision(matmul)
    if cudnn is not None:
        torch.backends.cudnn.allow_tf32 = cudnn


class _PlainConvolutions(TorchFunctionMode):
    """Convolutions by `plain_convolution` where torch's own are not known to be plain sums."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (plain_convolution if func in _CONVOLUTIONS else func)(*args, **(kwargs or {}))


def plain_convolution(
    input: Tensor,  # (*batch, channels, *space)
    weight: Tensor,  # (outputs, channels / groups, *kernel)
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """What torch.conv1d, conv2d and conv3d compute, as one product of matrices for each place of the kernel.

    In whatever order a device sums up a product of matrices, each term is rounded at most as often as there are terms.

    >>> import torch
    >>> x, weight = torch.randn(2, 4, 9, 9), torch.randn(6, 2, 3, 3)
    >>> found = plain_convolution(x, weight, stride=2, padding=1, groups=2)
    >>> torch.allclose(found, torch.conv2d(x, weight, stride=2, padding=1, groups=2), atol=1e-5)
    True
    """
    kernel = weight.shape[2:]
    dims = len(kernel)
    stride, dilation = (_each(number, dims) for number in (stride, dilation))
    reach = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    pads = [(n // 2, n - n // 2) for n in reach] if padding == "same" else None
    pads = pads or [(n, n) for n in _each(0 if isinstance(padding, str) else padding, dims)]
    x = F.pad(input.reshape(-1, *input.shape[-dims - 1 :]), [n for pair in reversed(pads) for n in pair])
    x = x.unflatten(1, (groups, -1))  # (n, groups, channels, *space)
    sizes = [(size - far - 1) // step + 1 for size, far, step in zip(x.shape[3:], reach, stride, strict=True)]
    weights = weight.unflatten(0, (groups, -1))  # (groups, outputs, channels, *kernel)
    total = x.new_zeros(())
    for place in itertools.product(*map(range, kernel)):
        ends = zip(place, dilation, sizes, stride, strict=True)
        seen = x[(..., *(slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, n, s in ends))]
        total = total + weights[(..., *place)] @ seen.flatten(3)
    total = total.reshape(*input.shape[: -dims - 1], len(weight), *sizes)
    return total if bias is None else total + bias.reshape(-1, *[1] * dims)


def _each(number: int | Sequence[int], dims: int) -> Sequence[int]:
    return (number,) * dims if isinstance(number, int) else (*number,) * (dims // len(number))


@cache
def _sums_plainly(onednn: bool) -> bool:
    """Whether the CPU's convolutions, with oneDNN or without, round no more than a sum: tried once, on hostile data."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return not any(map(_rounds_too_much, (1, 3, 5)))


def _rounds_too_much(size: int, convolve: Callable[..., Tensor] = torch.conv2d) -> bool:
    """Compare with float64, for numbers from 1e-8 to 1, all of which a plain sum has to a few roundings."""
    x, weight = torch.rand(16, 8, 13, 13, device="cpu") ** 20, torch.rand(8, 8, size, size, device="cpu") ** 5
    exact = torch.conv2d(x.double(), weight.double(), padding=size // 2)
    error = (convolve(x, weight, padding=size // 2) - exact).abs()
    return bool((error > (weight[0].numel() / 2 + 1) * torch.finfo(x.dtype).eps * exact).any())
