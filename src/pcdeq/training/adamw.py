"""torch's AdamW with a faster step for small networks on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from pcdeq.kernels import KERNELS, in_memory

# torch's own step, within what runs the hooks that users have registered.
_TORCHS = torch.optim.AdamW.step
if not hasattr(_TORCHS, "hooked"):
    _TORCHS = Optimizer.profile_hook_step(_TORCHS)
# Options that only torch's own step has.
_NOT_KNOWN = ("amsgrad", "maximize", "foreach", "capturable", "differentiable")


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`: same options, same state, same numbers up to rounding.

    Where parameters lie on a CPU in float32, in any layout without gaps, a step is one call of C; on a small network
    torch's fused one takes longer to prepare its lists than to compute. Everything else is left to torch.

    >>> parameter = torch.nn.Parameter(torch.ones(3))
    >>> optimizer = AdamW([parameter], lr=0.1)
    >>> parameter.sum().backward()
    >>> optimizer.step()
    >>> parameter.data
    tensor([0.8990, 0.8990, 0.8990])
    """

    @cached_property
    def _seen(self) -> dict[Tensor, _Seen]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:  # of pickle, and of `load_state_dict`
        super().__setstate__(state)
        self.__dict__.pop("_seen", None)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; torch's own where the kernel does not apply, as in the first step, which makes the state."""
        unusual = KERNELS is None or closure is not None or self._is_watched()
        groups = None if unusual else self._for_kernel()
        if KERNELS is None or groups is None:
            return _TORCHS(self, closure)
        for group, moved, entries in groups:
            options = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            KERNELS.adamw(entries, *options, torch.get_num_threads())
            increment_version(moved)  # a backward pass that needs the old values then says so
        return None

    # torch would wrap it, which takes longer than the step.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        if not set_to_none:
            super().zero_grad(set_to_none)
        for group in self.param_groups if set_to_none else ():
            for parameter in group["params"]:
                parameter.grad = None

    def _is_watched(self) -> bool:
        """Whether hooks, a profiler or a gradient scaler want to know of the step."""
        hooks = (self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks)
        hooks += (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
        scaled = getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None
        return any(hooks) or scaled or torch.autograd.profiler._is_profiler_enabled

    def _for_kernel(self) -> list[tuple[dict[str, Any], list[Tensor], list[tuple[int, ...]]]] | None:
        """What the kernel takes: of each group its options and parameters, and of these sizes and addresses."""
        groups = []
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor) or any(group[name] for name in _NOT_KNOWN):
                return None
            if not group.get("decoupled_weight_decay", True):
                return None
            moved, entries = [], []
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                entry = self._entry(parameter, grad)
                if entry is None:
                    return None
                moved.append(parameter)
                entries.append(entry)
            groups.append((group, moved, entries))
        return groups

    def _entry(self, parameter: Tensor, grad: Tensor) -> tuple[int, ...] | None:
        """How many numbers a parameter has, and where it, its gradient, its running means and its step lie."""
        state, seen = self.state.get(parameter), self._seen.get(parameter)
        if not in_memory(grad):
            return None
        if grad.stride() != parameter.stride():
            grad = parameter.grad = in_order_of(parameter, grad)
        if not state:
            return None
        if seen is None or not seen.is_of(parameter, state):
            seen = _Seen.of(parameter, state)
            if seen is None:
                return None
            self._seen[parameter] = seen
        if grad.shape != seen.shape or grad.stride() != seen.strides:
            return None
        return seen.size, seen.address, grad.data_ptr(), *seen.moments


class _Seen(NamedTuple):
    """A parameter and its state, which the kernel was found to take: to look each time takes longer than a step."""

    size: int
    shape: torch.Size
    strides: tuple[int, ...]
    address: int
    mean: Tensor
    square: Tensor
    step: Tensor
    moments: tuple[int, int, int]  # where these three lie

    @classmethod
    def of(cls, parameter: Tensor, state: dict[str, Tensor]) -> _Seen | None:
        """Look closely; a state in another order in memory than the parameter, as from a file, is put into that."""
        shape, strides = parameter.shape, parameter.stride()
        if not in_memory(parameter) or not _has_no_gaps(parameter):
            return None
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = in_order_of(parameter, state[name])
        mean, square, step = tensors = (state["exp_avg"], state["exp_avg_sq"], state["step"])
        if not all(map(in_memory, tensors)) or step.numel() != 1 or not mean.shape == square.shape == shape:
            return None
        moments = (mean.data_ptr(), square.data_ptr(), step.data_ptr())
        return cls(parameter.numel(), shape, strides, parameter.data_ptr(), *tensors, moments)

    def is_of(self, parameter: Tensor, state: dict[str, Tensor]) -> bool:
        """Whether all are still where they were."""
        return (
            parameter.data_ptr() == self.address
            and parameter.shape == self.shape
            and parameter.stride() == self.strides
            and state["exp_avg"] is self.mean
            and state["exp_avg_sq"] is self.square
            and state["step"] is self.step
        )


def in_order_of(parameter: Tensor, value: Tensor) -> Tensor:
    """A tensor of the parameter's shape, with its numbers in memory in the parameter's order; any other as it is.

    torch's fused steps on a CPU go through memory without looking, and so does our kernel.
    """
    if value.shape != parameter.shape or value.layout != parameter.layout or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _has_no_gaps(x: Tensor) -> bool:
    """Whether its numbers lie side by side in memory, each once, in whatever order."""
    return x.permute(sorted(range(x.ndim), key=lambda d: (x.stride(d), x.shape[d]), reverse=True)).is_contiguous()
