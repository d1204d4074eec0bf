"""Batch norms whose statistics are those of the network as it is, not of the ones it was on its way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pcdeq.errors import UsageError


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Tensor | Sequence[Tensor]]) -> None:
    """Measure the statistics of every batch norm anew, in one pass over the batches.

    In training a batch norm keeps running averages, which lag behind weights that change quickly: a network can be
    right in training mode and wrong in evaluation. This gives each norm the mean and the unbiased variance of all the
    values that it saw in the pass: over all batches together, summed in float64, however many images each has.

    In the pass norms normalise by the batch, as in training, and everything else is in evaluation mode (no dropout; no
    warm start learns). So the statistics of a norm that no other norm precedes are exactly those of the data, in
    whatever batches they come. Later norms see what earlier ones made of each batch, as in training: take batches at
    least as large as there, in random order. Modes are as before afterwards; if the pass fails, so are the statistics.

    Args:
        model: any module; only its batch norms that keep statistics change.
        batches: training images as they go into the model, or tuples of which they are the first, as a ``DataLoader``
            gives; they are moved to where the model is.

    >>> import pcdeq
    >>> model = nn.Sequential(nn.BatchNorm1d(3), pcdeq.PcDEQLinear(3), nn.BatchNorm1d(3)).eval()
    >>> images = 5 + 2 * torch.randn(100, 3)
    >>> pcdeq.recalibrate(model, images.split(40))
    >>> torch.allclose(model[0].running_mean, images.mean(0)), torch.allclose(model[0].running_var, images.var(0))
    (True, True)
    """
    norms = {
        name: norm
        for name, norm in model.named_modules()
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None
    }
    with _as_before(model, norms.values()), ExitStack() as hooks:
        model.eval()
        sums = {name: _Sums(name) for name in norms}
        for name, norm in norms.items():
            norm.train()
            hooks.callback(norm.register_forward_pre_hook(sums[name].add).remove)
        place = next((parameter.device for parameter in model.parameters()), None)
        count = 0
        for batch in batches:
            images = batch if isinstance(batch, Tensor) else batch[0]
            model(images.to(place))
            count += 1
        if norms and not count:
            raise UsageError("there were no batches; recalibrate takes an iterable of them, which may be used up")
        for name, norm in norms.items():
            sums[name].store(norm)


class _Sums:
    """Count, mean and sum of squares around it, of each channel, of all that a norm has seen."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.batches = 0
        self.mean = self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, _norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """A forward pre-hook: count a batch in (Chan, Golub and LeVeque, 1983)."""
        (x,) = inputs
        count = x.numel() // x.shape[1]
        if count == 1:
            raise UsageError(f"a batch has one value per channel of batch norm {self.name!r}: leave it out")
        variance, mean = torch.var_mean(x.float() if x.dtype.itemsize < 4 else x, (0, *range(2, x.dim())), correction=0)
        mean, squares = mean.cpu().double(), count * variance.cpu().double()
        if not bool((mean.isfinite() & squares.isfinite()).all()):
            raise UsageError(f"batch norm {self.name!r} got infinite values or NaN; check the batches and the weights")
        total, way = self.count + count, mean - self.mean
        self.mean = self.mean + way * (count / total)
        self.squares = self.squares + squares + way.square() * (self.count * count / total)
        self.count, self.batches = total, self.batches + 1

    def store(self, norm: _BatchNorm) -> None:
        """Make these the norm's statistics; a norm that the pass did not reach keeps what it had."""
        if not self.batches:
            return
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.copy_(self.mean)
        norm.running_var.copy_(self.squares / (self.count - 1))
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.fill_(self.batches)


@contextmanager
def _as_before(model: nn.Module, norms: Iterable[nn.Module]) -> Iterator[None]:
    """Every module is in its mode again afterwards; where something goes wrong, norms have their statistics, too."""
    modes = {module: module.training for module in model.modules()}
    kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    try:
        yield
    except BaseException:
        for buffer, value in kept:
            buffer.copy_(value)
        raise
    finally:
        for module, mode in modes.items():
            module.training = mode
