"""The residual connection, as a container that every proof knows."""

from __future__ import annotations

from torch import Tensor, nn

from pcdeq.errors import UsageError


class Residual(nn.Sequential):
    """x + f(x), f the layers in line, which must keep the shape.

    Everything that goes through a network layer by layer (`pcdeq.certify`, the certified loss, `pcdeq.freeze`, exports)
    knows it; of a block of your own it could only see that nothing is known.

    >>> import torch, pcdeq
    >>> from torch import nn
    >>> block = pcdeq.Residual(nn.BatchNorm2d(4), pcdeq.PcDEQConv2d(4), nn.Conv2d(4, 4, 1))
    >>> model = nn.Sequential(block, nn.Flatten(), nn.Linear(4 * 5 * 5, 3)).eval()
    >>> images = torch.randn(6, 4, 5, 5)
    >>> torch.equal(block(images), images + block[2](block[1](block[0](images))))
    True
    >>> pcdeq.certify(model, images).share
    1.0
    """

    def forward(self, input: Tensor) -> Tensor:
        return add(input, super().forward(input))


def add(x: Tensor, branch: Tensor) -> Tensor:
    """Their sum; torch would stretch a tensor of another shape."""
    if branch.shape != x.shape:
        raise UsageError(
            f"the layers of a Residual map shape {tuple(x.shape)} to {tuple(branch.shape)}; they must keep it"
        )
    return x + branch
