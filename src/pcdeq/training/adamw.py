"""torch's AdamW with a faster step for small networks on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from pcdeq.kernels import KERNELS

# torch's own step, within what runs the hooks that users have registered.
_TORCHS = torch.optim.AdamW.step
if not hasattr(_TORCHS, "hooked"):
    _TORCHS = Optimizer.profile_hook_step(_TORCHS)
# Options that only torch's own step has.
_NOT_KNOWN = ("amsgrad", "maximize", "foreach", "capturable", "differentiable")


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`: same options, same state, same numbers up to rounding.

    Where parameters lie on a CPU in float32, a step is one call of C; on a small network torch's fused one takes
    longer to prepare its lists than to compute. Everything else is left to torch.

    >>> parameter = torch.nn.Parameter(torch.ones(3))
    >>> optimizer = AdamW([parameter], lr=0.1)
    >>> parameter.sum().backward()
    >>> optimizer.step()
    >>> parameter.data
    tensor([0.8990, 0.8990, 0.8990])
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; torch's own where the kernel does not apply, as in the first step, which makes the state."""
        groups = None if closure is not None or self._is_watched() else self._for_kernel()
        if KERNELS is None or groups is None:
            return _TORCHS(self, closure)
        for group, entries in groups:
            options = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            KERNELS.adamw(entries, *options, torch.get_num_threads())
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

    def _for_kernel(self) -> list[tuple[dict[str, Any], list[tuple[int, ...]]]] | None:
        """What the kernel takes: of each group its options, and of its parameters sizes and addresses."""
        groups = []
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor) or any(group[name] for name in _NOT_KNOWN):
                return None
            entries = []
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                moments = self._moments(parameter)
                if moments is None or not _is_plain(grad):
                    return None
                entries.append((parameter.numel(), parameter.data_ptr(), grad.data_ptr(), *moments))
            groups.append((group, entries))
        return groups

    def _moments(self, parameter: Tensor) -> tuple[int, ...] | None:
        """Addresses of the running means and of the count of steps, if the kernel can use them."""
        state = self.state.get(parameter)
        if not state or parameter.dtype != torch.float32 or not parameter.is_contiguous():
            return None
        tensors = (state["exp_avg"], state["exp_avg_sq"], state["step"])
        if not all(map(_is_plain, tensors)):
            return None
        return tuple(tensor.data_ptr() for tensor in tensors)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous()
