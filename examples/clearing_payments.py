"""Clearing payments between banks, p = min(owed, Πᵀp + cash) (Eisenberg & Noe): python examples/clearing_payments.py

A bank pays what it owes or, if it cannot, all that it has: its cash, and what others pay it. With cash e > 0 the map
is positive, monotone and concave (a minimum of affine functions), and bounded: there is exactly one clearing vector.
"""

import torch
from scipy.optimize import linprog
from torch import Tensor

import pcdeq

BANKS, SHOCKS = 40, 1000


def market(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """What each bank owes in all, the shares in which it owes it to the others, and its cash."""
    generator = torch.Generator().manual_seed(seed)
    owed = torch.rand(BANKS, BANKS, generator=generator).double() ** 8 * (1 - torch.eye(BANKS))
    owed *= torch.rand(BANKS, 1, generator=generator).double() * 5
    total = owed.sum(1)
    cash = 0.02 + 0.5 * torch.rand(BANKS, generator=generator).double() * total
    return total, owed / total[:, None], cash


def clearing(total: Tensor, shares: Tensor) -> pcdeq.ConcaveMap:
    def payments(p: Tensor, cash: Tensor) -> Tensor:  # (samples, banks): one sample a scenario
        return torch.minimum(p @ shares + cash, total)

    return pcdeq.ConcaveMap(payments, asymptotic=lambda p, cash: 0 * p, solver=pcdeq.Anderson(tol=1e-13))


def by_linear_program(total: Tensor, shares: Tensor, cash: Tensor) -> Tensor:
    """The same vector as the largest that can be paid: max Σp with p <= Πᵀp + e, 0 <= p <= owed."""
    limits = torch.eye(BANKS).double() - shares.T
    found = linprog(-torch.ones(BANKS).numpy(), limits.numpy(), cash.numpy(), bounds=[(0, t) for t in total.tolist()])
    return torch.from_numpy(found.x)


def stress(fn: pcdeq.ConcaveMap, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds on what is paid for every cash in a box, each bank's anywhere between two numbers, from two solves.

    The clearing vector rises with the cash, so that it lies between those of the two corners: proved bounds on them
    are proved bounds on all.
    """
    box = fn.enclose(torch.zeros(2, BANKS).double(), torch.stack([low, high]), rtol=1e-10)
    assert box.certified.all()
    return box.lower[0], box.upper[1]


def main() -> None:
    total, shares, cash = market()
    fn, start = clearing(total, shares), torch.zeros(1, BANKS).double()
    print(f"all claims are of the class: {bool(fn.check(start, cash[None]))}; {fn.exists(start, cash[None])}")
    held = cash[None].clone().requires_grad_()
    paid = fn(start, held)
    difference = (paid.detach()[0] - by_linear_program(total, shares, cash)).abs().max()
    print(
        f"{int((paid < total - 1e-9).sum())} of {BANKS} banks default; the linear program differs by {difference:.0e}"
    )
    (worth,) = torch.autograd.grad(paid.sum(), held)
    print(f"a unit of cash for bank {int(worth.argmax())} lets {worth.max():.2f} units be paid, the most of all")
    low, high = stress(fn, 0.5 * cash, cash)
    print(f"if each bank loses up to half of its cash, {low.sum():.3f} to {high.sum():.3f} is paid, proved")
    sure, never = int((low >= total - 1e-9).sum()), int((high < total - 1e-9).sum())
    print(f"{sure} banks pay in full whatever the shock, {never} in none, {BANKS - sure - never} depend on it")
    shocks = cash * (0.5 + 0.5 * torch.rand(SHOCKS, BANKS, generator=torch.Generator().manual_seed(1)).double())
    seen = fn.solve(torch.zeros(SHOCKS, BANKS).double(), shocks).value
    inside = bool(((seen >= low - 1e-9) & (seen <= high + 1e-9)).all())
    paid = seen.sum(1)
    print(f"{SHOCKS} random shocks, solved as one batch: {paid.min():.3f} to {paid.max():.3f}, within: {inside}")


if __name__ == "__main__":
    main()
