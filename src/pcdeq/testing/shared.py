"""What the conformance classes share."""

from __future__ import annotations

import torch
from torch import Tensor


class Conformance:
    """Tests as methods; plain asserts, so that any runner will do."""

    @classmethod
    def check(cls) -> None:
        """Run all tests here and now, in a notebook or a doctest; the first that fails raises."""
        for name in dir(cls):
            if name.startswith("test_"):
                getattr(cls(), name)()


def uniform(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers in [0, 1) that are the same in every run."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_near(found: Tensor, expected: Tensor, tol: float, what: str) -> None:
    """Equal to ``tol`` times the largest number that is expected."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        found, expected, rtol=0.0, atol=tol * scale, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )
