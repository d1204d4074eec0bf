"""Thompson's and Hilbert's metrics, the natural ones of a cone.

With M(x/y) = max xᵢ/yᵢ: Thompson's metric is log max{M(x/y), M(y/x)}, the sup norm in logarithmic
coordinates; Hilbert's is log M(x/y) M(y/x), which forgets the length of a vector. Monotone scalable maps
do not expand the first, monotone homogeneous ones do not expand either (Lemmens & Nussbaum, Nonlinear
Perron-Frobenius Theory, ch. 2). The rate of T4 is a Lipschitz constant in the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcdeq.errors import UsageError
from pcdeq.theory.mappings import require_cone


def thompson(x: Tensor, y: Tensor) -> Tensor:
    """Thompson's distance ``max |log xᵢ - log yᵢ|`` over the last dimension.

    Components where both are 0 do not count; where only one is, the distance is infinite.

    >>> import torch
    >>> x = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 3.0]]).double()
    >>> thompson(x, torch.tensor([1.0, 4.0, 0.0]).double()).exp()
    tensor([2., inf], dtype=torch.float64)
    """
    return _log_ratio(x, y).abs().amax(-1)


def hilbert(x: Tensor, y: Tensor) -> Tensor:
    """Hilbert's distance max log(xᵢ/yᵢ) - min log(xᵢ/yᵢ) over the last dimension.

    It is 0 for multiples of one another. Zeros are treated as in `thompson`.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0, 0.0]).double()
    >>> [round(hilbert(x, y).exp().item(), 9) for y in (7 * x, torch.tensor([4.0, 2.0, 0.0]))]
    [1.0, 4.0]
    """
    log_ratio = _log_ratio(x, y)
    counts = ((x > 0) | (y > 0)).expand_as(log_ratio)
    high = torch.where(counts, log_ratio, -torch.inf).amax(-1)
    low = torch.where(counts, log_ratio, torch.inf).amin(-1)
    distance = torch.where(log_ratio.isinf().any(-1), torch.inf, high - low)
    return torch.where(counts.any(-1), distance, 0.0)


def _log_ratio(x: Tensor, y: Tensor) -> Tensor:
    """log(x/y), and 0 where both are 0."""
    if x.ndim == 0 or y.ndim == 0 or x.shape[-1] != y.shape[-1] or x.shape[-1] == 0:
        raise UsageError(f"vectors must have the same number of components, got {tuple(x.shape)} and {tuple(y.shape)}")
    require_cone(x=x, y=y)
    dtype = torch.promote_types(x.dtype, y.dtype)
    x, y = x.to(dtype), y.to(dtype)
    return torch.where((x == 0) & (y == 0), 0.0, x.log() - y.log())
