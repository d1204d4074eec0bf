"""The other side of a certificate: pictures within a radius that are given another class, found by gradients.

What a search finds is a fact, what it does not find is no proof. So the accuracy that is left after it is at least the
certified one, and the gap between the two is what nobody knows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pcdeq.errors import UsageError
from pcdeq.proofs.intervals import Limits, ends

STEPS, RESTARTS = 20, 3


def withstood(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    radius: float | Tensor,
    limits: Limits | None = None,
    steps: int = STEPS,
    restarts: int = RESTARTS,
    seed: int = 0,
) -> Tensor:
    """Which images keep their label under projected gradient steps (Madry et al. 2018), (n,).

    Each restart begins at another place of the box and goes along the sign of the gradient of the smallest lead, in
    steps that become smaller. The arguments are those of `pcdeq.certify`.

    >>> import torch, pcdeq
    >>> model = torch.nn.Sequential(pcdeq.PcDEQLinear(4), torch.nn.Linear(4, 3)).eval()
    >>> images = torch.randn(5, 4)
    >>> labels = model(images).argmax(1)
    >>> kept = [withstood(model, images, labels, radius=radius).sum().item() for radius in (0.0, 10.0)]
    >>> kept[0], kept[0] > kept[1]
    (5, True)
    """
    if steps < 1 or restarts < 1:
        raise UsageError(f"steps and restarts must be at least 1, got {steps} and {restarts}")
    radius = torch.as_tensor(radius, dtype=images.dtype, device=images.device)
    low, high = ends(images, radius, limits)
    kept = model(images).argmax(1) == labels
    generator = torch.Generator().manual_seed(seed)
    for _ in range(restarts):
        left = kept.nonzero()[:, 0]
        if not len(left):
            break
        share = torch.rand(images[left].shape, generator=generator, dtype=images.dtype).to(images.device)
        near, below, above = low[left] + share * (high[left] - low[left]), low[left], high[left]
        for step in range(steps):
            (grad,) = _gradient(model, near, labels[left])
            stride = radius * (1 - step / steps) / 2
            near = torch.minimum(torch.maximum(near - stride * grad.sign(), below), above)
            with torch.no_grad():
                kept[left] &= model(near).argmax(1) == labels[left]
    return kept


@torch.enable_grad()
def _gradient(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """The gradient of by how much each label leads the next class."""
    images = images.detach().requires_grad_()
    scores = model(images)
    others = scores.scatter(1, labels[:, None], -torch.inf)
    return torch.autograd.grad((scores.gather(1, labels[:, None])[:, 0] - others.amax(1)).sum(), images)
