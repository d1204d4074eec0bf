"""A trained network made ready for inference alone: the same answers from less work.

Batch norm by running statistics is one multiplication and one addition for each channel, so it goes into
the affine layer before it or after it; the weights of equilibrium layers are normalised once.
"""

from __future__ import annotations

import copy
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from pcdeq.errors import UsageError
from pcdeq.implicit import no_autocast
from pcdeq.layers import PcDEQ
from pcdeq.solvers import SolveStats, report

_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d


def freeze(model: nn.Sequential) -> nn.Sequential:
    """A copy of a network of layers in line, such as `build` gives, for inference and without gradients.

    Its parameters are constants: what is done to the model afterwards does not reach the copy. Its answers
    are those of ``model.eval()`` up to rounding and the solver's tolerance.

    >>> import torch, pcdeq
    >>> model = pcdeq.build("pcdeq-1-mc-tanh").eval()
    >>> fast = pcdeq.freeze(model)
    >>> len(model), len(fast)
    (18, 12)
    >>> images = torch.rand(4, 1, 28, 28)
    >>> bool((fast(images) - model(images)).abs().max() < 1e-4)
    True
    """
    if not isinstance(model, nn.Sequential):
        raise UsageError(f"freeze takes an nn.Sequential, whose layers follow each other, not {type(model).__name__}")
    layers = [(name, copy.deepcopy(layer).eval()) for name, layer in model.named_children()]
    layers = _fold_forward(_fold_back(layers))
    frozen = [(name, FrozenPcDEQ(layer) if isinstance(layer, PcDEQ) else layer) for name, layer in layers]
    return _Frozen(OrderedDict(frozen)).requires_grad_(False).eval()


Layers = list[tuple[str, nn.Module]]


class _Frozen(nn.Sequential):
    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)

    def train(self, mode: bool = True) -> _Frozen:
        if mode:
            raise UsageError("a frozen network cannot be trained; train the model that it was made from")
        return super().train(False)


class FrozenPcDEQ(nn.Module):
    """An equilibrium layer whose weight is a constant."""

    weight: Tensor
    last_forward: SolveStats | None

    def __init__(self, layer: PcDEQ) -> None:
        super().__init__()
        self.register_buffer("weight", layer.operator.effective_weight().detach())
        self.layer = layer
        self.last_forward = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # as in PcDEQ.forward
            return torch.compiler.disable(self._equilibrium)(x)  # pyright: ignore[reportReturnType, reportArgumentType]
        return self._equilibrium(x)

    def _equilibrium(self, x: Tensor) -> Tensor:
        layer = self.layer
        with no_autocast(x.device.type):
            solution = layer.solve_with(self.weight, x)
        self.last_forward = SolveStats.of(solution)
        report(solution, layer.solver, "forward")
        z = solution.value
        return z if z.shape == x.shape else z.reshape(x.shape)


def _fold_back(layers: Layers) -> Layers:
    """Fold each batch norm into the affine layer right before it."""
    result: Layers = []
    for name, layer in layers:
        before = result[-1][1] if result else None
        if isinstance(layer, nn.BatchNorm2d) and isinstance(before, nn.Conv2d):
            result[-1] = (result[-1][0], fuse_conv_bn_eval(before, layer))
        elif isinstance(layer, nn.BatchNorm1d) and isinstance(before, nn.Linear):
            result[-1] = (result[-1][0], fuse_linear_bn_eval(before, layer))
        else:
            result.append((name, layer))
    return result


def _fold_forward(layers: Layers) -> Layers:
    """Fold each other batch norm into the next affine layer, past averages, which it commutes with."""
    result: Layers = []
    for index, (name, layer) in enumerate(layers):
        if isinstance(layer, _BatchNorm):
            after = [other for _, other in layers[index + 1 :] if not _is_transparent(other)]
            if after and _take_over(layer, after[0]):
                continue
        result.append((name, layer))
    return result


def _is_transparent(layer: nn.Module) -> bool:
    """Whether what is done to each channel before this layer can as well be done after it."""
    if isinstance(layer, nn.AvgPool2d):
        return layer.padding in (0, (0, 0)) and not layer.ceil_mode and layer.divisor_override is None
    return isinstance(layer, nn.Flatten)


@torch.no_grad()
def _take_over(norm: _BatchNorm, layer: nn.Module) -> bool:
    """Make an affine layer do what the batch norm before it does; False where it cannot."""
    padded = isinstance(layer, nn.Conv2d) and (layer.padding not in (0, (0, 0)) or layer.groups != 1)
    if not isinstance(layer, nn.Linear | nn.Conv2d) or padded or not norm.track_running_stats:
        return False
    deviation = (norm.running_var.double() + norm.eps).sqrt()  # pyright: ignore[reportOptionalMemberAccess]
    scale = (norm.weight.double() if norm.affine else torch.ones_like(deviation)) / deviation
    shift = (norm.bias.double() if norm.affine else 0.0) - norm.running_mean.double() * scale  # pyright: ignore
    weight = layer.weight.double()
    places = weight.shape[1] // len(scale)  # of each channel, where images were flattened
    scale, shift = scale.repeat_interleave(places), shift.repeat_interleave(places)
    rest = (1,) * (weight.ndim - 2)
    bias = (weight * shift.view(1, -1, *rest)).flatten(1).sum(1)
    if layer.bias is not None:
        bias = bias + layer.bias.double()
    layer.weight.copy_(weight * scale.view(1, -1, *rest))
    layer.bias = nn.Parameter(bias.to(layer.weight.dtype))
    return True
