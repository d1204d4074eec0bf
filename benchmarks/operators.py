"""How much a solve asks of a device: operators of torch, and waits of the host; counted, so the same on every machine.

Part of `make bench`; alone: ``python benchmarks/operators.py``. Ours are counted without C, on a CPU and as on an
accelerator, where numbers that steer a solve stay on the device and the host looks rarely.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from cases import Batch, Case
from measure import Contestant, layers_of, without_kernels
from prepare import batches_of
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pcdeq.testing.counting import Operations, as_on_accelerator

CASES = (Case("l", "mnist", "tanh"), Case("mc", "mnist", "tanh"))
WAYS: dict[str, tuple[str, Callable[[], Any]]] = {
    "pcdeq": ("without-c", nullcontext),
    "pcdeq, as on an accelerator": ("without-c", as_on_accelerator),
    "hook": ("hook", nullcontext),
    "torchdeq": ("torchdeq", nullcontext),
    "torchdeq-anderson": ("torchdeq-anderson", nullcontext),
}
WARM_UP = 3  # passes: a warm start has learned by then, and the host knows when to look


def operator_table() -> Table:
    """For the first equilibrium layer of each network, in training."""
    table = Table(title="Operators and waits of a pass of one equilibrium layer in training (batch 64, views aside)")
    for name in ("network", "method", "direction", "products", "operators beside them", "for each product", "waits"):
        table.add_column(name, justify="left" if name in ("network", "method", "direction") else "right")
    for case in CASES:
        batches, _ = batches_of(case.data)
        x = input_of_layer(case, batches)
        for name, (method, around) in WAYS.items():
            layer = layers_of(Contestant(method, case, batches).model)[0].train()
            with without_kernels(), around():
                for direction, counted in zip(("forward", "backward"), count(layer, x), strict=True):
                    products = counted.operators.total() - counted.beside_products
                    ratio = f"{counted.beside_products / products:.0f}"
                    row = (f"{case.topology.upper()} {case.activation}", name, direction)
                    waits = "" if name == "pcdeq" else str(counted.waits)  # a CPU's memory is read as it is
                    table.add_row(*row, str(products), str(counted.beside_products), ratio, waits)
    return table


def input_of_layer(case: Case, batches: list[Batch]) -> Tensor:
    """What the network gives its first equilibrium layer."""
    seen: list[Tensor] = []
    model = case.model().eval()
    handle = layers_of(model)[0].register_forward_hook(lambda _, args, __: seen.append(args[0].detach()))
    with torch.no_grad():
        model(batches[0][0].contiguous(memory_format=torch.channels_last))
    handle.remove()
    return seen[0]


def count(layer: torch.nn.Module, x: Tensor) -> tuple[Operations, Operations]:
    """What a forward and a backward pass ask for."""
    forward, backward = Operations(), Operations()
    for _ in range(WARM_UP):
        given = x.clone().requires_grad_()
        forward, backward = Operations(), Operations()
        with forward:
            z = layer(given)
        grad = torch.randn(z.shape, generator=torch.Generator().manual_seed(0))
        with backward:
            z.backward(grad)
    return forward, backward


if __name__ == "__main__":
    Console(width=150).print(operator_table())
