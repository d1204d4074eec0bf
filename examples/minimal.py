"""The idea of pcdeq in one sitting: a layer that cannot diverge, its gradient and its error bars, in plain torch.

The layer is the solution z of z = tanh(Wz + x) with W >= 0 and x > 0. Whatever the size of W there is exactly one,
z > 0, and plain iteration reaches it from anywhere: g(z) = tanh(Wz + x) is monotone (W >= 0), and concave with
g(0) > 0, so that g(tz) > t g(z) for 0 < t < 1. Written without the package, which does the same faster, for other
activations and convolutions, and with rounding in its bounds; tests/test_examples.py compares the two.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def iterate(step, z: Tensor, tol: float = 1e-10, most: int = 10_000) -> Tensor:
    """Plain iteration, until a step changes next to nothing."""
    for _ in range(most):
        before, z = z, step(z)
        if (z - before).norm() <= tol * z.norm():
            break
    return z


class Equilibrium(torch.autograd.Function):
    """Forward solves z = tanh(Wz + x). Backward needs z alone, not the way there: memory does not grow with steps.

    By the implicit function theorem dL/dx is the solution u of u = D(Wᵀu + v), where D = 1 - z² is the slope of tanh
    at the solution and v = dL/dz; and dL/dW = u zᵀ. Plain iteration solves that, too.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, x: Tensor) -> Tensor:
        z = iterate(lambda z: torch.tanh(z @ weight.T + x), torch.zeros_like(x))
        ctx.save_for_backward(weight, z)
        return z

    @staticmethod
    def backward(ctx, v: Tensor) -> tuple[Tensor, Tensor]:
        weight, z = ctx.saved_tensors
        slope = 1 - z.square()
        u = iterate(lambda u: slope * (u @ weight + v), torch.zeros_like(v))
        return u.T @ z, u


class Layer(nn.Module):
    """Any real input, the same shape out; the clamp keeps W nonnegative, whatever an optimiser does to it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) / features)

    def forward(self, x: Tensor) -> Tensor:
        return Equilibrium.apply(self.weight.clamp(min=0), F.softplus(x, beta=5))


def bounds(weight: Tensor, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Error bars: low <= solution <= high, from a point z > 0 near the solution (in exact arithmetic).

    If g(high) <= high, iteration from high only falls, to the one solution, which is thus below high; and the same from
    below. Concavity makes z(1 + e) such a point as soon as e is about as large as the error of z: try, and double.
    """
    error = torch.full_like(z[:, :1], 1e-12)
    while True:
        low, high = z * (1 - error).clamp(min=0), z * (1 + error)
        above, below = torch.tanh(low @ weight.T + x), torch.tanh(high @ weight.T + x)
        proved = ((above >= low) & (below <= high)).all(1, keepdim=True)
        if proved.all():
            return above, below  # a step further, which are bounds, too
        error = torch.where(proved, error, 2 * error)


if __name__ == "__main__":
    torch.manual_seed(0)
    layer, x = Layer(50).double(), torch.randn(4, 50, dtype=torch.float64)
    layer.weight.data *= 4  # a norm of about 2: no contraction, where other equilibrium layers may have no solution
    z = layer(x)
    z.sum().backward()
    low, high = bounds(layer.weight.detach().clamp(min=0), F.softplus(x, beta=5), z.detach())
    print(f"every entry of the solution is known to {float((high - low).max()):.0e}, proved")
