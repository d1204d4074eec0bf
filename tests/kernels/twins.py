"""What each kernel computes, in plain torch: the twins that tests compare with; and what both are given."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pcdeq.kernels import binding
from pcdeq.kernels.binding import Form

LIMITS = {"tol": 1e-5, "decay": 0.9, "steps_before": 0, "max_steps": 300}
LAST = torch.channels_last
ACTIVATIONS = {
    "tanh": torch.tanh,
    "softsign": lambda y: y / (1 + y),
    "relu6": lambda y: y.clamp(max=6.0),
    "sigmoid": torch.sigmoid,
    "1-exp": lambda y: -torch.expm1(-y),
    "hard-tanh": lambda y: y.clamp(max=1.0),
    "hard-sigmoid": lambda y: (y / 6 + 0.5).clamp(max=1.0),
}


def product(form: Form, z: Tensor) -> Tensor:
    """Wz, or that with the adjoint, in the dtype of z."""
    weight = form.weight.to(z.dtype)
    if form.kind == "dense":
        return z @ (weight if form.transposed else weight.T)
    if form.transposed:
        return nn.functional.conv_transpose2d(z, weight, padding=1)
    return nn.functional.conv2d(z, weight, padding=1)


def evaluate(form: Form, z: Tensor) -> Tensor:
    """g(z)."""
    return apply(form, product(form, z))


def apply(form: Form, product: Tensor) -> Tensor:
    """g(z) given Wz."""
    y = product + form.offset.to(product.dtype)
    return y * form.slope.to(y.dtype) if form.slope is not None else ACTIVATIONS[form.activation](y)


def solution(form: Form, steps: int = 20_000) -> Tensor:
    """z = g(z) in float64, by plain iteration to its end."""
    z = torch.zeros_like(form.offset, dtype=torch.float64)
    for _ in range(steps):
        z, before = evaluate(form, z), z
        if torch.equal(z, before) or float((z - before).abs().max()) <= 1e-15 * float(z.abs().max()):
            break
    return z


def norm(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1)


def per_sample(x: Tensor, like: Tensor) -> Tensor:
    return x.view(-1, *[1] * (like.ndim - 1))


def anderson(
    form: Form, point: Tensor, box, *, tol: float, decay: float, steps_before: int, max_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The safeguarded method with memory 1, all samples side by side: value, steps and whether each converged."""
    low, high = (-torch.inf, torch.inf) if box is None else box
    value = last = residual = torch.zeros_like(point)
    best = largest = torch.zeros(len(point), dtype=point.dtype)
    power = torch.ones_like(best)
    plain = active = torch.ones(len(point), dtype=torch.bool)
    steps = torch.full((len(point),), steps_before)
    converged = ~active
    for step in range(steps_before, max_steps):
        now = evaluate(form, point)
        r = now - point
        size = norm(r)
        value = torch.where(per_sample(active, now), now, value)
        steps = steps + active
        met = (size < tol * norm(now)) | (size == 0)
        converged = converged | (active & met)
        active = active & ~met & ~size.isnan()
        if not active.any():
            break
        accept = plain | (size <= torch.minimum(best, largest * power * decay))
        change = r - residual
        weight = (r * change).flatten(1).sum(1) / change.square().flatten(1).sum(1)
        weight = torch.where((weight < 1) & (step > steps_before), weight, 0.0)
        ahead = now + per_sample(weight, now) * (last - now)
        point = torch.where(per_sample(accept, now), ahead, last).clamp(low, high)
        power = torch.where(accept & ~plain, power * decay, power)
        best = torch.where(accept, size, best)
        largest = torch.where(plain, torch.maximum(largest, size), largest)
        plain = ~accept | (weight == 0)
        last, residual = now, r
    return value, steps, converged


def make_form(shape, samples=3, activation="tanh", transposed=False, seed=0, gain=0.8) -> Form:
    """A random equation of this state's shape; W has row sums, and column sums, of about `gain`."""
    random = torch.Generator().manual_seed(seed)
    width = shape[0]
    if len(shape) == 1:
        weight = gain * 2 / width * torch.rand(width, width, generator=random)
    else:
        weight = gain * 2 / (9 * width) * torch.rand(width, width, 3, 3, generator=random)
    offset = torch.rand(samples, *shape, generator=random)
    if activation != "linear":
        return Form("dense" if len(shape) == 1 else "conv", weight, transposed, activation, offset)
    slope = torch.rand(samples, *shape, generator=random)
    return Form("dense" if len(shape) == 1 else "conv", weight, transposed, activation, offset - 0.5, slope)


def make_images(shape=(4, 5, 6, 7), seed=0):
    random = torch.Generator().manual_seed(seed)
    x = (3 * torch.randn(shape, generator=random) + 2).contiguous(memory_format=LAST)
    channels = shape[1]
    weight, bias, mean = (torch.randn(channels, generator=random) for _ in range(3))
    return x, weight, bias, mean, torch.rand(channels, generator=random) + 0.5


def norm_by_kernel(x, *rest, training=True, momentum=0.3, eps=1e-5):
    return binding.batch_norm(x, *rest, training=training, momentum=momentum, eps=eps)


def norm_gradients(grad, x, weight, statistics):
    """Those of batch norm in training, given mean and 1 / deviation."""
    saved = (None, None, statistics[0], statistics[1], True, 1e-5, (True, True, True))
    return torch.ops.aten.native_batch_norm_backward(grad.detach(), x, weight, *saved)


def weight_gradient(z: Tensor, u: Tensor) -> Tensor:
    """That of <u, Wz> with respect to the 3x3 weight of a convolution that keeps the size."""
    weight = torch.zeros(z.shape[1], z.shape[1], 3, 3, dtype=z.dtype)
    given = (u, z, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    return torch.ops.aten.convolution_backward(*given)[1]
