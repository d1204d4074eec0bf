"""A dense equilibrium layer between two batch norms, in training, as one node of the graph.

In the paper's L network these three take a few microseconds of arithmetic each, and torch's calls and graph around them
ten times as long. Same numbers as layer by layer up to rounding, and layer by layer wherever the kernels do not apply.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from pcdeq import native
from pcdeq.errors import PcdeqError
from pcdeq.implicit import no_autocast, once
from pcdeq.kernels import is_plain
from pcdeq.layers import PcDEQ, PcDEQLinear
from pcdeq.models.explicit import normalise, normalise_gradients
from pcdeq.rule import Rule

_BLOCK = (nn.BatchNorm1d, PcDEQLinear, nn.BatchNorm1d)


def run(layers: list[nn.Module], x: Tensor) -> Tensor:
    """What the layers make of x, one after the other."""
    while layers:
        block = layers[:3]
        usual = tuple(map(type, block)) == _BLOCK and not any(map(_is_watched, block))
        rule = _rule_for_kernel(*block, x) if usual else None  # pyright: ignore[reportArgumentType]
        if rule is None:
            x, layers = layers[0](x), layers[1:]
        else:
            x, layers = _run_block(*block, rule, x), layers[3:]  # pyright: ignore[reportArgumentType]
    return x


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody wants to know what goes into a module or comes out of it, or has changed what it does."""
    return bool(
        "forward" in module.__dict__
        or module._compiled_call_impl is not None
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
    )


def _rule_for_kernel(first: nn.BatchNorm1d, layer: PcDEQ, second: nn.BatchNorm1d, x: Tensor) -> Rule | None:
    """The layer's rule if kernels can make both passes through the three; else None."""
    if torch.is_autocast_enabled("cpu"):
        return None
    if not _is_usual(first) or not _is_usual(second) or x.ndim != 2 or len(x) < 2:
        return None
    rule = layer.rule_of_one_node(x)
    if rule is None or not native.applies(rule, x, *layer.operator.raw) or not native.is_usual(rule.adjoint_solver):
        return None
    features = x.shape[1:]
    tensors = (t for norm in (first, second) for t in _tensors(norm))
    return rule if all(t is not None and t.shape == features and is_plain(t) for t in tensors) else None


def _is_usual(norm: nn.BatchNorm1d) -> bool:
    tracks = norm.track_running_stats and norm._buffers.get("num_batches_tracked") is not None
    return norm.training and tracks and norm.momentum is not None


def _tensors(norm: nn.BatchNorm1d) -> tuple[Tensor | None, ...]:
    """What the norm has learned; None for what there is not."""
    parameters, buffers = norm._parameters, norm._buffers  # looked up this way they are found in half the time
    return parameters.get("weight"), parameters.get("bias"), buffers.get("running_mean"), buffers.get("running_var")


def _run_block(first: nn.BatchNorm1d, layer: PcDEQ, second: nn.BatchNorm1d, rule: Rule, x: Tensor) -> Tensor:
    options = ((first.momentum, first.eps), (second.momentum, second.eps))
    out = _Block.apply(x, rule, options, *layer.operator.raw, *_tensors(first), *_tensors(second))
    for norm in (first, second):
        norm._buffers["num_batches_tracked"].add_(1)  # pyright: ignore[reportOptionalMemberAccess]
    return out  # pyright: ignore[reportReturnType]


class _Block(torch.autograd.Function):
    """Batch norm, equilibrium, batch norm."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, rule: Rule, options: Any, v: Tensor, g: Tensor, *norms: Tensor
    ) -> Tensor:
        y, first = normalise(x, *norms[:4], *options[0])  # pyright: ignore[reportArgumentType]
        solution, weight = native.forward(rule, y, v, g)
        rule.record_forward(solution)
        z = solution.value
        out, second = normalise(z, *norms[4:], *options[1])  # pyright: ignore[reportArgumentType]
        saved = (x, norms[0], first, y, weight, v, g, z, norms[4], second)
        ctx.save_for_backward(*saved)
        ctx.rule, ctx.shapes = rule, [t.shape for t in saved]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rule: Rule = ctx.rule
        saved = ctx.saved_tensors
        # Hooks for saved tensors may give back others than they were given.
        if [t.shape for t in saved] != ctx.shapes:
            raise PcdeqError("a hook for saved tensors has given back a tensor of another shape")
        with torch.no_grad(), no_autocast("cpu"):
            x, scale, first, y, weight, v, g, z, other_scale, second = map(_plain, saved)
            grad_z, *grads_second = normalise_gradients(_plain(grad), z, other_scale, second)
            solution, grad_y, grads = native.backward(rule, grad_z, z, weight, y, v, g)
            rule.record_backward(solution)
            rule.observe(z, rule.activation.slope_of_value, rule.bind(weight))  # pyright: ignore[reportArgumentType]
            grad_x, *grads_first = normalise_gradients(grad_y, x, scale, first)
        found = once((grad_x, *grads, *grads_first, *grads_second), grad.new_zeros((), requires_grad=True))
        return found[0], None, None, *found[1:5], None, None, *found[5:], None, None


def _plain(x: Tensor) -> Tensor:
    """The numbers of x where the kernels find them."""
    return x if is_plain(x) else torch.empty(x.shape, dtype=torch.float32, device="cpu").copy_(x)
