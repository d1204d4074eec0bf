"""An epidemic with importation on ten thousand people, and whom to protect: python examples/epidemic.py

Person i is infected by a contact j at the rate W_ij z_j, from outside at the rate x_i, and recovers at the rate 1. The
endemic level is where both balance, (1 - z)(Wz + x) = z, or z = (Wz + x) / (1 + Wz + x): exactly a softsign layer. So
there is one, plain iteration finds it, and bounds and gradients are those of any layer.
"""

import torch
from torch import Tensor

import pcdeq

PEOPLE, CONTACTS, PROTECTED = 10_000, 40_000, 200


def contacts(seed: int = 0) -> Tensor:
    """Who meets whom, both ways, (2, 2 · CONTACTS): some people meet many."""
    generator = torch.Generator().manual_seed(seed)
    sociable = torch.exp(torch.randn(PEOPLE, generator=generator))
    one, other = torch.multinomial(sociable, 2 * CONTACTS, replacement=True, generator=generator).reshape(2, -1)
    return torch.stack([torch.cat([one, other]), torch.cat([other, one])])


def epidemic(indices: Tensor, rates: Tensor) -> pcdeq.PcDEQ:
    return pcdeq.PcDEQ(
        pcdeq.Sparse(indices, rates, PEOPLE),
        activation="softsign",
        injection=lambda x: x,  # importation is a rate already
        solver=pcdeq.Anderson(tol=1e-9, max_steps=500),
    )


def importance(indices: Tensor, rates: Tensor, gradient: Tensor) -> Tensor:
    """By how much the total falls, to first order, if all contacts of a person end."""
    lost = (rates * gradient).repeat(2)
    return torch.zeros(PEOPLE, dtype=rates.dtype).index_add(0, indices.flatten(), lost)


def protect(people: Tensor, indices: Tensor, rates: Tensor, x: Tensor) -> float:
    """The total when these people meet nobody and bring nothing in."""
    safe = torch.zeros(PEOPLE, dtype=torch.bool)
    safe[people] = True
    left = torch.where(safe[indices].any(0), 0.0, rates)
    return float(epidemic(indices, left).solve((x * ~safe)[None]).value.sum())


def main() -> None:
    indices = contacts()
    close = torch.rand(CONTACTS, generator=torch.Generator().manual_seed(1)).double().repeat(2)  # how close they meet
    rates, x = 0.6 * close**4, torch.full((PEOPLE,), 1e-3).double()
    layer = epidemic(indices, rates)
    z = layer(x[None])
    z.sum().backward()
    box = layer.enclose(x[None], width=1e-9)
    products = layer.last_forward.steps + layer.last_backward.steps
    print(f"{z.detach().sum():.3f} of {PEOPLE} people are infected at a time; {products} products, with the gradient")
    print(f"proved: {bool(box.certified)}, {box.lower.sum():.6f} to {box.upper.sum():.6f}")
    gradient = layer.operator.weight.grad[0]
    worst = int(gradient.argmax())
    first, second = indices[:, worst].tolist()
    print(
        f"the contact that matters most is that of {first} and {second}: {gradient[worst]:.3f} people per unit of rate"
    )
    degree = torch.bincount(indices[0], minlength=PEOPLE)
    chosen = {
        "the most important": importance(indices, rates, gradient).topk(PROTECTED).indices,
        "those with the most contacts": degree.topk(PROTECTED).indices,
        "anybody": torch.arange(PROTECTED),
    }
    for whom, people in chosen.items():
        print(f"protect {PROTECTED} people, {whom}: {protect(people, indices, rates, x):.1f} infected")


if __name__ == "__main__":
    main()
