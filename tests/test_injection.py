"""How an input becomes nonnegative, to the last digit: proofs give the injection only a few roundings."""

from __future__ import annotations

import mpmath
import pytest
import torch

from pcdeq.injection import BETA, inject


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softplus_is_exact_to_the_roundings_that_proofs_grant(dtype):
    near_the_threshold = torch.linspace(3.9, 8.1, 200)
    x = torch.cat((torch.linspace(-20, 20, 401), near_the_threshold, torch.tensor([100.0, 1e4]))).to(dtype)
    found = inject(x, kind=1, floor=0.0)
    eps = torch.finfo(dtype).eps
    with mpmath.workdps(60):
        for given, value in zip(x.tolist(), found.tolist(), strict=True):
            exact = mpmath.log1p(mpmath.exp(BETA * mpmath.mpf(given))) / BETA
            assert abs(value - exact) <= (16 + 8 * abs(given)) * eps * exact + torch.finfo(dtype).tiny
    assert (found.diff()[:400] >= 0).all()
