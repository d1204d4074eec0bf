"""Where a solve starts: a guess of the equilibrium learned from earlier ones, at almost no cost.

The equilibrium is the same from every start, so a guess changes only the number of steps, and saves some where
inputs are like earlier ones: with a running mean of Wz*, from which a solve starts at s(x + mean), about half of them.
It is kept like the statistics of batch norm: updated in training, a buffer of the state dict, frozen in evaluation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# After the first batches one in so many is looked at, and replaces this part of the running mean.
FIRST, LOOK_EVERY = 16, 16
MOMENTUM = 0.5
# Threads may share a layer, and the buffer changes its size in place.
_LOCK = threading.Lock()


class WarmStart(nn.Module):
    """A running mean over samples of Wz*.

    The buffer is empty until the first batch shows its shape; inputs of another shape start cold.
    """

    product: Tensor
    observed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("product", torch.empty(0))
        self.register_buffer("observed", torch.zeros((), dtype=torch.int64))
        self._seen: int | None = None  # the same number, where the host need not wait for it

    def guess(self, x: Tensor) -> Tensor | None:
        """A guess of Wz* for inputs like x, of one sample's shape and >= 0; None before anything was learned.

        The theory is about z >= 0, and buffers come from files: what is not a number counts as 0.
        """
        if torch.compiler.is_compiling():  # a lock would break the graph, in which nobody changes the size
            return self._guess(x)
        with _LOCK:
            return self._guess(x)

    def _guess(self, x: Tensor) -> Tensor | None:
        if self.product.shape != x.shape[1:]:
            return None
        return torch.nan_to_num(self.product.to(x.dtype), nan=0.0).clamp(min=0.0)

    @torch.no_grad()
    def observe(self, z: Tensor, apply: Callable[[Tensor], Tensor]) -> None:
        """Learn from a batch of equilibria of an operator."""
        with _LOCK:
            seen = int(self.observed) if self._seen is None else self._seen
            self.observed.add_(1)
            self._seen = seen + 1
        if seen >= FIRST and seen % LOOK_EVERY:
            return
        # NaN for an empty batch: it shows the shape, so that all processes of a group have it.
        value = apply(z.mean(0, keepdim=True))[0]
        with _LOCK:
            weight = MOMENTUM if self.product.shape == value.shape else 1.0
            blended = self._sized(value.shape).lerp(value.to(self.product.dtype), weight)
            # One bad batch must not spoil every solve that follows.
            self.product.copy_(torch.where(blended.isfinite(), blended, self.product))

    def _sized(self, shape: torch.Size) -> Tensor:
        # In place: DistributedDataParallel broadcasts the buffers that it has seen when it was made.
        return self.product if self.product.shape == shape else self.product.resize_(shape).zero_()

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        self._seen = None
        for name in ("mean", "slope", "response"):  # of a dense layer by an earlier version
            state_dict.pop(prefix + name, None)
        if not any(prefix + name in state_dict for name, _ in self.named_buffers()):
            return  # of a layer without a warm start, or of other people's code: this one learns its own
        if prefix + "product" in state_dict:
            self._sized(state_dict[prefix + "product"].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)
