"""How much a piece of code asks of a device: operators, and waits of the host for an answer.

Both are the same on every device, so a CPU can tell what an accelerator would have to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pcdeq import activations
from pcdeq.solvers import numbers

# Operators that only say how memory is to be read, and start nothing on a device.
VIEWS = frozenset(
    ["detach", "alias", "view", "_unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "select"]
).union(["slice", "unbind", "split", "as_strided", "lift_fresh", "empty", "empty_like", "new_empty"])
PRODUCTS = frozenset(("mm", "addmm", "bmm", "convolution", "convolution_backward"))
WAITS = frozenset(("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"))


class Operations(TorchDispatchMode):
    """Counts what is asked of torch while it is active.

    Attributes:
        operators: how often each was called, views aside.
        waits: how often the host had to wait for a result: `item`, `tolist`, `bool`, `nonzero`, `numpy` and their like.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.waits = 0
        self._patches = [patch.object(Tensor, name, self._waiting(name)) for name in ("tolist", "numpy")]

    @property
    def beside_products(self) -> int:
        """Operators that are no product with a weight."""
        return sum(count for name, count in self.operators.items() if name not in PRODUCTS)

    def __enter__(self) -> Operations:
        for one in self._patches:
            one.start()
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        for one in self._patches:
            one.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.waits += 1
        elif name not in VIEWS:
            self.operators[name] += 1
        return func(*args, **(kwargs or {}))

    def _waiting(self, name: str) -> Callable[..., Any]:
        """tolist and numpy read a CPU's memory without asking torch."""
        original = getattr(Tensor, name)

        def count(tensor: Tensor, *args: Any, **options: Any) -> Any:
            self.waits += 1
            return original(tensor, *args, **options)

        return count


@contextmanager
def as_on_accelerator() -> Iterator[None]:
    """Solve on the CPU as if its memory were a device's, which the host waits for."""
    nowhere = frozenset[str]()
    with patch.object(numbers, "READABLE", nowhere), patch.object(activations, "SLOW_NUMBERS", nowhere):
        yield
