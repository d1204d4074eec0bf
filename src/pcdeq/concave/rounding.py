"""How much does a map of yours round? A running error analysis, operation by operation (Wilkinson; Higham 2002, ch. 3).

Beside each tensor goes a bound on how far it may be from the one that real arithmetic would give. A sum of n products
in any order is off by at most n eps/2 Σ|products|, more or less; a monotone function maps the ends of an interval to
the ends of the result. It is a wrapper around torch's own kernels, below autograd: it sees what is computed, not how it
is written, so a backward pass can be analysed as well. What it does not know it refuses by name: then the user says by
how much his map rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pcdeq.activations import ROUNDINGS
from pcdeq.errors import UsageError

aten = torch.ops.aten


class Rounded(Tensor):
    """A tensor with a bound on its rounding error, ``error`` >= |value - exact|, componentwise."""

    value: Tensor
    error: Tensor

    @staticmethod
    def __new__(cls, value: Tensor, error: Tensor) -> Rounded:
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )
        made.value, made.error = value, error
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, kwargs or {}
        rule = RULES.get(packet)
        if rule is None:
            raise UsageError(
                f"the rounding of torch's '{func}' is not known here: say by how much your map rounds, "
                "ConcaveMap(fn, rounding=...)"
            )
        return rule(func, *args, **kwargs)


def evaluate(fn: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """fn(z), and a bound on its absolute rounding error; z itself is exact, and so is what fn closes over."""
    value = fn(Rounded(z, torch.zeros_like(z)))
    return parts(value)


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor and the bound on its error: 0 for one that is no result."""
    return (x.value, x.error) if isinstance(x, Rounded) else (x, torch.zeros_like(x))


def _operands(*given: Any) -> list[tuple[Tensor, Tensor]]:
    """Tensors and numbers with their errors; a number loses digits where it meets a dtype below float64."""
    dtype = next(x.dtype for x in given if isinstance(x, Rounded))
    lost = 0.0 if dtype is torch.float64 else torch.finfo(dtype).eps / 2
    found = []
    for x in given:
        if isinstance(x, Tensor):
            found.append(parts(x if x.is_floating_point() else x.to(dtype)))
        else:
            number = torch.tensor(float(x), dtype=torch.float64)
            found.append((number, lost * number.abs()))
    return found


def _made(value: Tensor, error: Tensor, terms: float = 1) -> Rounded:
    """The result of an operation whose own error bound was computed with so many roundings."""
    kind = torch.finfo(value.dtype)
    error = error * (1 + (8 + 2 * terms) * kind.eps) + kind.tiny
    return Rounded(value, torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf))


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps


def _structural(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Views, copies and choices of components: the errors go where the values go."""

    def run(part: int) -> Any:
        chosen = pytree.tree_map(
            lambda x: parts(x)[part] if isinstance(x, Tensor) and x.is_floating_point() else x, (args, kwargs)
        )
        return func(*chosen[0], **chosen[1])

    values, errors = run(0), run(1)
    if isinstance(values, Tensor):
        return Rounded(values, errors)
    return type(values)(Rounded(v, e) for v, e in zip(values, errors, strict=True))


def _fresh(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Constants, which need only the shape: they are exact."""
    plain = pytree.tree_map(lambda x: parts(x)[0] if isinstance(x, Rounded) else x, (args, kwargs))
    return func(*plain[0], **plain[1])


def _compared(func: Any, a: Any, b: Any) -> Tensor:
    """A comparison, of numbers that are further apart than they are off: else rounding might turn it round."""
    (x, dx), (y, dy) = _operands(a, b)
    off = (dx + dy) * (1 + 4 * _eps(x))
    if bool(((off > 0) & ~((x - y).abs() > off)).any()):
        raise UsageError(
            f"the map compares two numbers that rounding may have turned round ('{func}'): write it with "
            "torch.minimum, torch.maximum or clamp, or say by how much it rounds, ConcaveMap(fn, rounding=...)"
        )
    return func.overloadpacket(x, y)


def _sign(func: Any, x: Tensor) -> Tensor:
    """Known where the number is further from 0 than it is off."""
    value, _ = parts(x)
    _compared(aten.gt.Scalar, x, 0.0)
    return func(value)


def _monotone(digits: float, floor: float = -torch.inf) -> Callable[..., Rounded]:
    """A monotone function of one tensor, defined from the floor on, accurate to so many eps of its result."""

    def rule(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Rounded:
        value, error = parts(x)
        ends = value, (value - error).clamp(min=floor), value + error
        middle, low, high = (func(end, *args, **kwargs) for end in ends)
        off = torch.maximum((high - middle).abs(), (middle - low).abs())
        size = torch.maximum(torch.maximum(high.abs(), low.abs()), middle.abs())
        # The ends value -+ error were rounded, too.
        moved = torch.where(error > 0, 4 * _eps(value) * (off + size), 0.0)
        return _made(middle, off + digits * _eps(value) * size + moved)

    return rule


def _on_one_side(rule: Callable[..., Rounded]) -> Callable[..., Rounded]:
    """A rule for a function that is monotone for positive numbers: elsewhere nothing is known."""

    def guarded(func: Any, x: Any, *args: Any, **kwargs: Any) -> Rounded:
        value, error = parts(x)
        result = rule(func, x, *args, **kwargs)
        return Rounded(result.value, torch.where(value - error > 0, result.error, torch.inf))

    return guarded


def _power(func: Any, x: Any, exponent: Any) -> Rounded:
    if isinstance(exponent, Tensor):
        raise UsageError("the rounding of a power whose exponent is a tensor is not known here; use rounding=")
    if float(exponent) == 2:
        return _multiply(aten.mul.Tensor, x, x)
    if float(exponent) < 0:
        return _on_one_side(_monotone(ROUNDINGS / 2))(func, x, exponent)
    return _monotone(ROUNDINGS / 2, floor=0.0)(func, x, exponent)  # of a number below 0 it is not a number


def _subtract_from(func: Any, a: Any, b: Any, alpha: float = 1) -> Rounded:
    """b - alpha a, which is what torch makes of 1 - x."""
    return _add(aten.sub.Tensor, b if isinstance(b, Tensor) else torch.full_like(parts(a)[0], b), a, alpha)


def _add(func: Any, a: Any, b: Any, alpha: float = 1) -> Rounded:
    (x, dx), (y, dy) = _operands(a, b)
    value = func.overloadpacket(x, y, alpha=alpha)
    return _made(value, dx + abs(alpha) * dy + _eps(value) * (value.abs() + (abs(alpha) != 1) * (alpha * y).abs()))


def _multiply(func: Any, a: Any, b: Any) -> Rounded:
    (x, dx), (y, dy) = _operands(a, b)
    value = func.overloadpacket(x, y)
    return _made(value, x.abs() * dy + y.abs() * dx + dx * dy + _eps(value) * value.abs())


def _divide(func: Any, a: Any, b: Any) -> Rounded:
    (x, dx), (y, dy) = _operands(a, b)
    value = func.overloadpacket(x, y)
    least = y.abs() - dy * (1 + 4 * _eps(value))
    off = (dx + value.abs() * (1 + 4 * _eps(value)) * dy) / least
    return _made(value, torch.where(least > 0, off, torch.inf) + _eps(value) * value.abs())


def _slope_of_tanh(func: Any, grad: Any, value: Any) -> Rounded:
    return _multiply(
        aten.mul.Tensor, grad, _subtract_from(aten.rsub.Scalar, _multiply(aten.mul.Tensor, value, value), 1.0)
    )


def _slope_of_sigmoid(func: Any, grad: Any, value: Any) -> Rounded:
    slope = _multiply(aten.mul.Tensor, value, _subtract_from(aten.rsub.Scalar, value, 1.0))
    return _multiply(aten.mul.Tensor, grad, slope)


def _choose(func: Any, a: Any, b: Any) -> Rounded:
    """The larger or the smaller of two: monotone in both, and exact."""
    (x, dx), (y, dy) = _operands(a, b)
    return _between(func(x, y), func(x - dx, y - dy), func(x + dx, y + dy))


def _extreme(func: Any, x: Any, *dims: Any) -> Rounded:
    value, error = parts(x)
    return _between(func(value, *dims), func(value - error, *dims), func(value + error, *dims))


def _between(value: Tensor, low: Tensor, high: Tensor) -> Rounded:
    """A value between two ends that were rounded once."""
    off = torch.maximum(high - value, value - low)
    return _made(value, off + torch.where(off > 0, 2 * _eps(value) * torch.maximum(low.abs(), high.abs()), 0.0))


def _absolute(func: Any, x: Any) -> Rounded:
    value, error = parts(x)
    return Rounded(func(value), error)


def _sum(func: Any, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rounded:
    value, error = parts(x)
    dims = list(range(value.ndim)) if dim is None or dim == [] else dim
    dims = [dims] if isinstance(dims, int) else dims
    terms = 1
    for axis in dims:
        terms *= value.shape[axis]

    def total(y: Tensor) -> Tensor:
        return y.sum(dims, keepdim) if dims else y

    result = func(value, **kwargs) if dim is None else func(value, dim, keepdim, **kwargs)
    mean = terms if func.overloadpacket is aten.mean else 1
    off = (total(error) + terms * _eps(value) / 2 * total(value.abs())) / mean
    return _made(result, off + _eps(value) * result.abs(), terms)


def _product(func: Any, a: Any, b: Any) -> Rounded:
    (x, dx), (y, dy) = _operands(a, b)
    value, terms = func(x, y), x.shape[-1]
    sizes = func(x.abs(), y.abs())
    off = func(x.abs(), dy) + func(dx, y.abs() + dy)
    return _made(value, off + terms * _eps(value) / 2 * sizes, terms)


def _product_and_sum(func: Any, base: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Any:
    plain = {aten.addmm: aten.mm.default, aten.baddbmm: aten.bmm.default, aten.addmv: aten.mv.default}
    if beta != 1 or alpha != 1:
        raise UsageError(f"the rounding of torch's '{func}' with beta or alpha is not known here; use rounding=")
    return _add(aten.add.Tensor, base, _product(plain[func.overloadpacket], a, b))


def _where(func: Any, condition: Tensor, a: Any, b: Any) -> Rounded:
    (x, dx), (y, dy) = _operands(a, b)
    condition = parts(condition)[0]
    return Rounded(func(condition, x, y), torch.where(condition, *torch.broadcast_tensors(dx, dy)))


def _fill(func: Any, x: Rounded, mask: Tensor, number: float) -> Rounded:
    """In place, as the backward passes of minimum and maximum do it."""
    x.value.masked_fill_(mask, number)
    x.error.masked_fill_(mask, 0.0)
    return x


def _scatter_add(func: Any, base: Any, dim: int, index: Tensor, source: Any, alpha: float = 1) -> Rounded:
    """Sums of chosen components: at most as many terms as there are indices."""
    if alpha != 1:
        raise UsageError(f"the rounding of torch's '{func}' with alpha is not known here; use rounding=")
    (x, dx), (y, dy) = _operands(base, source)
    terms = y.shape[dim]
    sizes = func(x.abs(), dim, index, y.abs())
    off = func(dx, dim, index, dy) + terms * _eps(x) / 2 * sizes
    return _made(func(x, dim, index, y), off, terms)


_FUNCTION = _monotone(ROUNDINGS / 2)
_VIEWS = (
    aten.view, aten._unsafe_view, aten.reshape, aten.expand, aten.permute, aten.transpose, aten.t, aten.slice,
    aten.select, aten.index, aten.index_select, aten.gather, aten.unsqueeze, aten.squeeze, aten.flip, aten.roll,
    aten.cat, aten.stack, aten.clone, aten.detach, aten.alias, aten.unbind, aten.split, aten.split_with_sizes,
    aten.diagonal, aten.as_strided, aten.repeat, aten.select_backward, aten.slice_backward, aten.lift_fresh,
    aten.unfold, aten.contiguous, aten.tril, aten.triu,
)  # fmt: skip
_CONSTANTS = (
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.new_zeros, aten.new_ones, aten.new_full
)  # fmt: skip
_FUNCTIONS = (
    aten.exp, aten.expm1, aten.exp2, aten.log, aten.log1p, aten.log2, aten.log10, aten.tanh, aten.sigmoid, aten.atan,
    aten.softplus,
)  # fmt: skip
RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_VIEWS, _structural),
    **dict.fromkeys(_CONSTANTS, _fresh),
    **dict.fromkeys(_FUNCTIONS, _FUNCTION),
    **dict.fromkeys((aten.gt, aten.ge, aten.lt, aten.le, aten.eq, aten.ne), _compared),
    **dict.fromkeys((aten.neg, aten.clamp, aten.clamp_min, aten.clamp_max, aten.relu), _monotone(0)),
    **dict.fromkeys((aten.reciprocal, aten.rsqrt), _on_one_side(_FUNCTION)),
    **dict.fromkeys((aten.maximum, aten.minimum), _choose),
    **dict.fromkeys((aten.amax, aten.amin), _extreme),
    **dict.fromkeys((aten.sum, aten.mean), _sum),
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot), _product),
    **dict.fromkeys((aten.addmm, aten.baddbmm, aten.addmv), _product_and_sum),
    **dict.fromkeys((aten.index_add, aten.scatter_add), _scatter_add),
    **dict.fromkeys((aten.add, aten.sub), _add),
    aten.rsub: _subtract_from,
    aten.mul: _multiply,
    aten.div: _divide,
    aten.sqrt: _monotone(1, floor=0.0),
    aten.pow: _power,
    aten.abs: _absolute,
    aten.sgn: _sign,
    aten.tanh_backward: _slope_of_tanh,
    aten.sigmoid_backward: _slope_of_sigmoid,
    aten.where: _where,
    aten.masked_fill_: _fill,
}
