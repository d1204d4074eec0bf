"""Demand inversion (Berry, Levinsohn & Pakes 1995) with proved bounds: python examples/demand_inversion.py

Consumer i buys product j with probability w_j a_ij / (1 + Σ_k a_ik w_k), where a_ij = exp(μ_ij) is what sets him apart
and w_j = exp(δ_j) what all see in the product. Given market shares S, δ is to be found. With weights ω_i of consumers,

    w_j = S_j / Σ_i ω_i a_ij / (1 + Σ_k a_ik w_k),

a harmonic mean of affine functions: positive, monotone and concave. Far out the 1 does not count, and the spectral
radius of what is left is 1 minus the share of the outside good (ΣS/Σω): below 1 there is exactly one solution.
The data are Nevo's cereals and BLP's automobiles, which ship with pyblp: ``pip install pcdeq[demand]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import pcdeq

# What pyblp's tutorials start from.
NEVO_SIGMA = np.diag([0.3302, 2.4526, 0.0163, 0.2441])
NEVO_PI = np.array(
    [[5.4819, 0, 0.2037, 0], [15.8935, -1.2, 0, 2.6342], [-0.2506, 0, 0.0511, 0], [1.2650, 0, -0.8091, 0]]
)
BLP_SIGMA = np.diag([3.612, 0, 4.628, 1.818, 1.050, 2.056])
BLP_PI = np.array([[0], [-43.501], [0], [0], [0], [0]])


@dataclass(frozen=True)
class Markets:
    """All markets as one batch, products padded to the largest market; products x, tastes ν and demographics d."""

    products: Tensor  # (markets, products, characteristics)
    tastes: Tensor  # (markets, consumers, characteristics)
    demographics: Tensor  # (markets, consumers, demographics)
    weights: Tensor  # (markets, consumers)
    shares: Tensor  # (markets, products), 1 where there is no product
    real: Tensor  # (markets, products): whether there is one
    rows: Tensor  # (products,): where each of the real ones stands in the table

    def consumers(self, sigma: Tensor, pi: Tensor) -> tuple[Tensor, Tensor]:
        """a = exp(μ), μ = x (Σν + Πd), (markets, products, consumers), and the 1 of the outside good.

        Both are divided by the largest a of each consumer, so that none overflows; that changes no share.
        """
        mu = self.products @ (self.tastes @ sigma.mT + self.demographics @ pi.mT).mT
        largest = mu.amax(1, keepdim=True).clamp(min=0).detach()
        return torch.exp(mu - largest) * self.real[:, :, None], torch.exp(-largest).mT

    def logit(self) -> Tensor:
        """The answer if all consumers were alike, S_j / S_0: where everybody starts."""
        outside = 1 - (self.shares * self.real).sum(1, keepdim=True)
        return torch.where(self.real, self.shares / outside, 1.0)


def demand(markets: Markets, **options) -> pcdeq.ConcaveMap:
    """The map w -> S / Σ ω a / (1 + Σ a w) of a batch of markets, given a and 1 as `Markets.consumers` scales them."""
    real, shares, weights = markets.real, markets.shares, markets.weights[:, :, None]

    def fn(w: Tensor, a: Tensor, one: Tensor) -> Tensor:
        inclusive = one + a.mT @ w[:, :, None]  # (markets, consumers, 1)
        return shares / torch.where(real, (a @ (weights / inclusive))[:, :, 0], 1.0)

    # Padding is a product of constant w = 1, so that its part of the asymptotic mapping is 0.
    return pcdeq.ConcaveMap(fn, asymptotic=lambda w, a, one: fn(w, a, 0 * one) * real, **options)


def _batched(table: np.ndarray, columns: list[np.ndarray], ids: np.ndarray, fill: float = 0.0) -> Tensor:
    """Columns of a table, market by market, padded."""
    rows = [np.stack([column[table["market_ids"] == market] for column in columns], 1) for market in ids]
    padded = np.full((len(ids), max(map(len, rows)), len(columns)), fill)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(padded)


def read(path: str) -> np.ndarray:
    return np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")


def load(name: str, outside: float | None = None):
    """One of the two data sets: pyblp's problem, our batch, Σ and Π; perhaps with another share of the outside good."""
    import pyblp

    pyblp.options.verbose = False
    if name == "nevo":
        products, agents = read(pyblp.data.NEVO_PRODUCTS_LOCATION), read(pyblp.data.NEVO_AGENTS_LOCATION)
        x2, known = ["prices", "sugar", "mushy"], ["income", "income_squared", "age", "child"]
        seen, demographics = " + ".join(known), [agents[key] for key in known]
        sigma, pi = NEVO_SIGMA, NEVO_PI
    else:
        products, agents = read(pyblp.data.BLP_PRODUCTS_LOCATION), read(pyblp.data.BLP_AGENTS_LOCATION)
        x2, seen = ["prices", "hpwt", "air", "mpd", "space"], "I(1 / income)"
        demographics, sigma, pi = [1 / agents["income"]], BLP_SIGMA, BLP_PI
    if outside is not None:
        for market in np.unique(products["market_ids"]):
            inside = products["market_ids"] == market
            products["shares"][inside] *= (1 - outside) / products["shares"][inside].sum()
    formulations = pyblp.Formulation("1 + prices"), pyblp.Formulation(" + ".join(["1", *x2]))
    problem = pyblp.Problem(formulations, products, pyblp.Formulation(f"0 + {seen}"), agents)
    ids = np.unique(products["market_ids"])
    features = [np.ones(len(products)), *(products[key] for key in x2)]
    # A characteristic about which tastes do not vary has no nodes.
    drawn = iter(range(len(features)))
    nodes = [agents[f"nodes{next(drawn)}"] if sigma[k].any() else np.zeros(len(agents)) for k in range(len(features))]
    shares = _batched(products, [products["shares"]], ids, fill=np.nan)[:, :, 0]
    markets = Markets(
        _batched(products, features, ids),
        _batched(agents, nodes, ids),
        _batched(agents, demographics, ids),
        _batched(agents, [agents["weights"]], ids)[:, :, 0],
        shares.nan_to_num(nan=1.0),
        ~shares.isnan(),
        torch.from_numpy(np.argsort(products["market_ids"], kind="stable")),
    )
    return problem, markets, torch.from_numpy(sigma), torch.from_numpy(pi).double()


def main() -> None:
    for name in ("nevo", "automobiles"):
        _, markets, sigma, pi = load(name)
        fn, start = demand(markets, solver=pcdeq.Anderson(tol=1e-13, memory=5, max_steps=2000)), markets.logit()
        variable = sigma.clone().requires_grad_()
        given = markets.consumers(sigma, pi)
        solution = fn.solve(start, *given)
        box = fn.enclose(start, *given, rtol=1e-11)
        found = fn.exists(start, *given)
        off = (found.upper - (markets.shares * markets.real).sum(1) / markets.weights.sum(1)).abs().max()
        print(f"{name}: {len(start)} markets, {int(markets.real.sum())} products, {solution.outcome.value}")
        print(f"   evaluations a market: {solution.steps.double().mean():.1f}, at most {int(solution.steps.max())}")
        wide = float((box.upper / box.lower).log()[markets.real].max())
        print(f"   δ proved to {wide:.0e} in {int(box.certified.sum())} markets")
        print(f"   {found}, 1 minus the outside share to {off:.0e}")
        delta = fn(start, *markets.consumers(variable, pi)).log()
        (gradient,) = torch.autograd.grad((delta * markets.real).sum(), variable)
        print(f"   gradient of Σδ with respect to Σ: {[round(x, 4) for x in gradient.diagonal().tolist()]}")


if __name__ == "__main__":
    main()
