"""A moving average of the weights, which tells on unseen images more than the last of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_ema_multi_avg_fn

RISE = 10  # in the first steps the average forgets faster: after n of them it keeps at most (1 + n) / (RISE + n)


class Average:
    """The exponential moving average of a network's parameters and of the statistics of its batch norms.

    It is a mean of weights that were projected, so they are nonnegative by themselves. How much it keeps is a
    function of the number of steps, so that these values are all there is to save.

    >>> network = nn.Linear(1, 1, bias=False)
    >>> _ = network.weight.data.fill_(1.0)
    >>> average = Average(network, decay=0.5)
    >>> _ = network.weight.data.fill_(3.0)
    >>> average.update(steps=100)
    >>> with average.applied():
    ...     network.weight.item()
    2.0
    >>> network.weight.item()
    3.0
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self._current = dict(network.named_parameters())
        for name, module in network.named_modules():
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                # In place, always: batch norm and loading keep these tensors.
                self._current |= {f"{name}.{key}": module.get_buffer(key) for key in ("running_mean", "running_var")}
        self.restart()
        self.trained: dict[str, Tensor] | None = None  # what training has come to, while the average is applied

    @torch.no_grad()
    def restart(self) -> None:
        """Begin with the network as it is."""
        self.values = {name: value.detach().clone() for name, value in self._current.items()}

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Take in the network after so many steps."""
        decay = min(self.decay, (1 + steps) / (RISE + steps))
        blend = get_ema_multi_avg_fn(decay)
        blend(list(self.values.values()), [value.detach() for value in self._current.values()], steps)

    @torch.no_grad()
    def load(self, values: dict[str, Tensor]) -> None:
        """Give the network these values."""
        for name, value in self._current.items():
            value.copy_(values[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The network is the average meanwhile."""
        self.trained = {name: value.detach().clone() for name, value in self._current.items()}
        self.load(self.values)
        try:
            yield
        finally:
            self.load(self.trained)
            self.trained = None
