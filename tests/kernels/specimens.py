"""A zoo of tensors: strange ones, and others that only look so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from twins import LAST

GUARD = 12345.0


class Subclass(Tensor):
    """A tensor of somebody's own."""


def guarded(x: Tensor) -> Tensor:
    """The same numbers in the middle of a larger piece of memory."""
    buffer = torch.full((x.numel() + 64,), GUARD, dtype=x.dtype)
    inside = buffer[32:-32].as_strided(x.shape, x.stride() if is_dense(x) else x.contiguous().stride(), 32)
    inside.copy_(x)
    inside.buffer = buffer
    return inside


def is_unreal(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


def is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=LAST))


def guards_survive(x: Tensor) -> bool:
    buffer = getattr(x, "buffer", None)
    if buffer is None:
        return True
    guards = torch.cat([buffer[:32], buffer[-32:]])
    return torch.equal(guards, torch.full_like(guards, GUARD))


def resized(factor: float):
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x.untyped_storage().resize_(int(x.untyped_storage().nbytes() * factor) // 4 * 4)
        return x

    return change


def misaligned(x: Tensor) -> Tensor:
    buffer = bytearray(4 * x.numel() + 4)
    return torch.frombuffer(buffer, dtype=torch.float32, offset=1, count=x.numel()).view(x.shape).copy_(x)


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def shifted_past_the_end(x: Tensor) -> Tensor:
    longer = torch.cat([x.flatten(), x.flatten()])
    view = longer[x.numel() :].view(x.shape)
    longer.untyped_storage().resize_(4 * x.numel())
    return view


# What is done to a good tensor; some of it the kernels must take, with the numbers that it has.
TAKEN = {
    "as it is": lambda x: x,
    "in other memory": lambda x: x.clone(),
    "between guards": guarded,
    "first and last dimension turned": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every other number": lambda x: torch.stack([x, torch.full_like(x, GUARD)], -1)[..., 0],
    "a storage that grew": resized(3.0),
    "a parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "of inference mode": inference,
}
STRANGE = {
    "strides of 0": lambda x: x[..., :1].expand(x.shape),
    "all strides of 0": lambda x: x.flatten()[0].expand(x.shape),
    "windows that overlap": lambda x: (0.02 * torch.rand(x.numel() + 8)).as_strided(x.shape, [1] * x.ndim),
    "one more": lambda x: torch.cat([x, x[:1]]),
    "one less": lambda x: x[:-1],
    "last one more": lambda x: torch.cat([x, x[..., :1]], -1),
    "last one less": lambda x: x[..., :-1],
    "one dimension more": lambda x: x[None],
    "one dimension less": lambda x: x.flatten(0, 1) if x.ndim > 1 else x[0],
    "flat": lambda x: x.flatten(),
    "a number": lambda x: torch.tensor(1.0),
    "empty": lambda x: x[:0],
    "empty in the middle": lambda x: torch.empty(*x.shape[:-1], 0),
    "empty and huge": lambda x: torch.empty([0] + [2**20] * (x.ndim - 1)),
    "a storage that shrank": resized(0.5),
    "a storage that is gone": resized(0.0),
    "a view past the end": shifted_past_the_end,
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "int32": lambda x: (100 * x).int(),
    "int64": lambda x: (100 * x).long(),
    "bool": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "real part": lambda x: torch.complex(x, x).real,
    "imaginary part of a conjugate": lambda x: torch.complex(x, -x).conj().imag,
    "a subclass": lambda x: x.as_subclass(Subclass),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "a negative view": lambda x: torch._neg_view(-x),
    "lazy zeros": lambda x: torch._efficientzerotensor(x.shape),
    "misaligned": misaligned,
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "quantised": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "wants a gradient": lambda x: x.clone().requires_grad_(),
    "channels last": lambda x: x.contiguous(memory_format=LAST) if x.ndim == 4 else x.clone(),
}
SPECIMENS = TAKEN | STRANGE
# torch itself reads beyond the memory of these.
UNREADABLE = {"a storage that shrank", "a storage that is gone", "a view past the end"}

quiet = pytest.mark.filterwarnings("ignore:.*(Sparse|nested|quant|not writable|FakeTensor|complex).*:UserWarning")
