"""Every kind of claim that the package makes about layers, put before the referee.

A claim is counted where it is made, and is false where the referee proves the opposite. An error that is not the
package's own counts as a failure, too. Only what the package does is done in odd surroundings (`Score.around`): cases
and verdicts are made in plain ones.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from hostile import referee
from hostile.generators import Case, Rng, case_of, exact, hostile_input, layer_case
from hostile.surroundings import without_kernels
from torch import Tensor

import pcdeq
from pcdeq.equation import Adjoint

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}  # of a residual, relative to the size of the values


class Score:
    """How many claims of each kind were made, and which were false."""

    def __init__(self, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.around = around
        self.made: Counter[str] = Counter()
        self.false: Counter[str] = Counter()
        self.details: list[str] = []

    def add(self, kind: str, made: np.ndarray | int | bool, wrong: np.ndarray | bool, detail: object = "") -> None:
        """Some claims of a kind, and which of them are false."""
        self.made[kind] += int(np.sum(made))
        wrong = np.logical_and(made, wrong)
        if wrong.any():
            self.false[kind] += int(wrong.sum())
            self.details.append(f"{kind}: {detail}")


@contextmanager
def quiet() -> Iterator[None]:
    """A solve that does not converge says so, and overflows are part of the game."""
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
        yield


# ------------------------------------------------------------------------------------------------- layers


def about_a_layer(score: Score, rng: Rng) -> str:
    """Enclosures, solves and gradients of one layer."""
    case = layer_case(rng)
    truth = case.truth.enclose(case.injected)
    name = describe(case)
    for claim in (enclosures, solves, certified_solves, questions, gradients, adjoints, neighbours):
        if claim is enclosures or rng.random() < 0.4:
            claim(score, rng, case, truth, name)
    return name


def describe(case: Case) -> str:
    layer = case.layer
    kind, weight = type(layer).__name__, case.truth.weight
    return (
        f"{kind} {tuple(case.x.shape)} {layer.activation.name} {case.x.dtype}, weight to {float(weight.max()):.3g}, "
        f"input {float(case.injected.min()):.3g} to {float(case.injected.max()):.3g}"
    )


def outside(case: Case, box: pcdeq.Enclosure, truth: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """For which samples the bounds are proved wrong; a NaN is no bound."""
    lower, upper = case.flat(box.lower), case.flat(box.upper)
    return (~(lower <= truth[1]) | ~(upper >= truth[0])).any(1)


def enclosures(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    width = None if rng.random() < 0.7 else float(10 ** rng.uniform(-12, 0))
    with score.around():
        box = case.layer.enclose(case.x, width=width)
    made = box.certified.numpy()
    score.add("enclosure", made, outside(case, box, truth), name)
    if width is not None:
        wide = (box.width.reshape(case.samples, -1) > width).any(1).numpy()
        score.add("width", made, wide, name)


def solves(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    """Converged answers: the residual of what is returned is below tol, up to rounding; and where plain torch, with the
    same solver, comes within 10 tol of z*, they do not end further than 100 tol from it, but for `_rule_ends_far`."""
    tol = float(10 ** rng.uniform(-6, -2))
    kinds = (pcdeq.Anderson, pcdeq.Anderson, pcdeq.Picard, pcdeq.Newton)
    solver = kinds[int(rng.integers(len(kinds)))](tol=tol, max_steps=500)
    with score.around():
        solution = case.layer.solve(case.x, solver=solver)
    with without_kernels():
        plain = case.layer.solve(case.x, solver=solver)
    dtype = torch.promote_types(
        torch.promote_types(case.x.dtype, case.layer.operator.effective_weight().dtype), torch.float32
    )
    z = case.flat(solution.value)
    value = case.truth.map(z, case.injected)
    residual = _norm(value - z) / np.maximum(_norm(value), np.finfo(float).tiny)
    converged = solution.converged.numpy()
    score.add("converged: residual", converged, ~(residual <= tol + ROUNDING[dtype]), f"{name} {solver}")
    middle = (truth[0] + truth[1]) / 2
    known = np.isfinite(truth[1]).all(1) & plain.converged.numpy()
    far = _norm(z - middle) > 100 * tol * _norm(middle)
    near = known & (_norm(case.flat(plain.value) - middle) <= 10 * tol * _norm(middle))
    wrong = converged & far & near
    excused = np.zeros_like(wrong)
    excused[wrong] = _rule_ends_far(case, truth, tol, wrong)
    score.add("converged: as plain torch", converged & known & ~excused, wrong, f"{name} {solver}")
    score.add("converged: excused, as exact plain iteration ends far, too", excused, False)


def _rule_ends_far(case: Case, truth: tuple, tol: float, which: np.ndarray) -> np.ndarray:
    """Whether plain iteration in long double, from g(0) by the same rule and tol, ends further than 100 tol from z*.

    There the rule itself is met far from z*, in exact arithmetic (W = 1, hard-tanh: z grows by x a step, whatever its
    size), and where an accelerated solve ends is decided by the last digit of its secants: an answer near z* is luck.
    """
    x, middle = case.injected[which], (truth[0] + truth[1])[which] / 2
    z, going = case.truth.curve.value(x), np.ones(int(which.sum()), bool)
    for _ in range(100_000):
        new = np.where(going[:, None], case.truth.map(z, x), z)
        going &= ~(_norm(new - z) < tol * _norm(new))
        z = new
        if not going.any():
            break
    return ~going & (_norm(z - middle) > 100 * tol * _norm(middle))


def _norm(values: np.ndarray) -> np.ndarray:
    return np.sqrt((values * values).sum(1))


def certified_solves(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    tol = float(10 ** rng.uniform(-5, -1))
    inner = pcdeq.Anderson if rng.random() < 0.7 else pcdeq.Picard
    with score.around():
        solution = case.layer.solve(case.x, solver=pcdeq.Certified(inner(tol=tol, max_steps=300)))
    z, made = case.flat(solution.value), solution.converged.numpy()
    distance = np.maximum(np.maximum(truth[0] - z, z - truth[1]), 0)  # at least so far from z*
    bound = np.minimum(exact(solution.residual), tol)
    # The value comes back in the dtype of x, which may have fewer digits than the proof.
    rounding = 0.0 if case.x.dtype in ROUNDING else float(torch.finfo(case.x.dtype).eps)
    allowed = (bound * (1 + 1e-6) + rounding) * _norm(z)
    score.add("certified solve", made, ~(_norm(distance) <= allowed), name)


def questions(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    """Every box that a question is asked about holds z*, if it says so."""
    seen: list[pcdeq.Enclosure] = []
    threshold = float(rng.choice(np.nan_to_num(truth[0].astype(float)).ravel())) * float(1 + 10 ** rng.uniform(-9, -1))

    def question(box: pcdeq.Enclosure) -> Tensor:
        seen.append(box)
        return ((box.lower > threshold) | (box.upper <= threshold)).flatten(1).all(1) & box.certified

    with score.around():
        solution = case.layer.solve(case.x, until=question)
    lower, upper = truth
    above, below = (lower > threshold), (upper <= threshold)
    decided = solution.converged.numpy()
    score.add("question decided", decided & np.isfinite(upper).all(1), ~(above | below).all(1), name)
    first = seen[0]
    score.add("enclosure in a question", first.certified.numpy(), outside(case, first, truth), name)


def gradients(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    grad = rng.normal(size=tuple(case.x.shape)) * 10 ** rng.uniform(-12, 12)
    grad = np.where(rng.random(grad.shape) < 0.1, 0, grad)
    if rng.random() < 0.1:
        grad[0] = float(rng.choice((np.inf, np.nan)))
    with score.around():
        box = case.layer.enclose_gradient(case.x, torch.from_numpy(grad))
    rows = grad.reshape(case.samples, -1).astype(np.longdouble)
    finite = np.isfinite(rows).all(1)
    low, high = case.truth.gradient(case.injected, np.where(finite[:, None], rows, 0))
    raw = exact(case.x).reshape(case.samples, -1)
    slope = 1 / (1 + np.exp(-5 * raw)) if case.layer.activation.kind == 1 else (raw > 0) * np.longdouble(1)
    lower, upper = case.flat(box.lower), case.flat(box.upper)
    low, high = (np.where(np.isfinite(end), end * slope, end) for end in (low, high))
    tiny = 64 * EPS_OF_LONG * np.maximum(np.abs(low), np.abs(high))
    made, wrong = box.certified.numpy(), ~((lower <= high + tiny) & (upper >= low - tiny)).all(1)
    score.add("gradient enclosure", made & finite, wrong, name)
    score.add("nothing proved of NaN", ~finite, made, f"gradient: {name}")


EPS_OF_LONG = np.finfo(np.longdouble).eps


def adjoints(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    """The proved error of an adjoint solve, at the slope in memory."""
    equation = case.layer.equation(case.x)
    slope = equation.slope(equation(equation.at_zero()))
    grad = torch.from_numpy(rng.normal(size=tuple(equation.x.shape))).to(slope.dtype)
    tol = float(10 ** rng.uniform(-5, -1))
    adjoint = Adjoint(equation.map, slope, grad)
    with score.around():
        solution = pcdeq.Certified(pcdeq.Anderson(tol=tol, max_steps=300)).solve_adjoint(adjoint)
    exactly = case.truth.adjoint(case.flat(slope), case.flat(grad))
    u, made = case.flat(solution.value), solution.converged.numpy()
    error = _norm(u - exactly)
    wrong = ~(error <= np.minimum(exact(solution.residual), tol) * (1 + 1e-6) * _norm(u) + 1e-15 * _norm(exactly))
    score.add("certified adjoint", made & np.isfinite(exactly).all(1), wrong, name)


def neighbours(score: Score, rng: Rng, case: Case, truth: tuple, name: str) -> None:
    """A sample that is not a number takes nothing from the others."""
    sick = torch.full_like(case.x[:1], float(rng.choice((np.nan, np.inf))))
    batch, grads = torch.cat([case.x, sick]), torch.ones_like(case.x)
    more = torch.cat([grads, grads[:1]])
    solver = pcdeq.Certified(pcdeq.Anderson(tol=1e-3, max_steps=200))
    for ask in (lambda x: case.layer.enclose(x).certified, lambda x: case.layer.solve(x, solver=solver).converged):
        with score.around():
            alone, together = ask(case.x), ask(batch)
        score.add("neighbours", alone.numpy(), (~together[:-1]).numpy(), name)
        score.add("nothing proved of NaN", bool(sick.isnan().any()), bool(together[-1]), name)
    with score.around():
        alone = case.layer.enclose_gradient(case.x, grads).certified
        together = case.layer.enclose_gradient(batch, more).certified
    score.add("neighbours", alone.numpy(), (~together[:-1]).numpy(), name)


def rates(score: Score, rng: Rng) -> str:
    """The a-priori rate is not below the true factor, and its number of steps is enough."""
    name, floor = str(rng.choice(list(referee.CURVES))), float(10 ** rng.uniform(-16, 12))
    tol = float(10 ** rng.uniform(-8, -1))
    layer = pcdeq.PcDEQLinear(1, activation=name, floor=floor)
    rate = layer.rate(tol)
    found = referee.elasticity(name, floor)
    told = f"{name} floor {floor!r} rate {rate.factor!r} true {found!r}"
    score.add("rate", rate.factor < 1, bool(np.longdouble(rate.factor) < found * (1 - 8 * EPS_OF_LONG)), told)
    if rate.steps is not None and rate.steps < 2000:
        truth = referee.Layer(np.array([[10 ** rng.uniform(-8, 4)]], np.longdouble), name)
        x = np.array([[np.longdouble(floor)]])
        low, high = truth.enclose(x)
        for start in (0.0, referee.CURVES[name].supremum):
            z = np.array([[np.longdouble(start)]])
            for _ in range(rate.steps):
                z = truth.map(z, x)
            away = max(float(np.log(low / z).max()), float(np.log(z / high).max()))
            score.add("steps", np.isfinite(high).all(), away > tol * (1 + 1e-12), told)
    return told


def tangents(score: Score, rng: Rng) -> str:
    """A forward-mode derivative is right or refused, never left out without a word."""
    layer = pcdeq.PcDEQLinear(int(rng.integers(1, 8)), activation=str(rng.choice(list(referee.CURVES)))).double()
    x = torch.from_numpy(rng.normal(size=(2, layer.operator.features)))
    direction = torch.from_numpy(rng.normal(size=tuple(x.shape)))
    recorded = bool(rng.random() < 0.5)
    case = case_of(layer, x)
    name = f"{describe(case)}, {'with' if recorded else 'without'} a graph"
    try:
        with torch.set_grad_enabled(recorded), torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, direction)
            tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    except (NotImplementedError, pcdeq.PcdeqError):
        score.add("tangent", 1, False)
        return name
    step = np.longdouble(1e-7)
    ends = [case_of(layer, x + side * direction * float(step)) for side in (1, -1)]
    after, before = (sum(end.truth.enclose(end.injected)) / 2 for end in ends)
    expected = torch.from_numpy(((after - before) / (2 * step)).astype(float))
    right = tangent is not None and torch.allclose(tangent, expected, rtol=1e-2, atol=1e-4)
    score.add("tangent", 1, not right, name)
    return name


def threads(score: Score, rng: Rng) -> str:
    """Several threads at one layer, with images of different sizes: each has its own right answer."""
    layer = pcdeq.PcDEQConv2d(2, activation=str(rng.choice(list(referee.CURVES))))
    inputs = [hostile_input(rng, (2, 2, side, side)).float().clamp(-1e3, 1e3) for side in range(2, 8)]
    alone = [layer.solve(x).value for x in inputs]
    wrong: list[str] = []

    def work(x: Tensor, expected: Tensor) -> None:
        try:
            for _ in range(3):
                layer(x).sum().backward()
                if not torch.allclose(
                    layer.solve(x, solver=pcdeq.Anderson(tol=1e-6)).value, expected, rtol=0.02, atol=1e-3
                ):
                    wrong.append("another answer")
        except Exception as error:
            wrong.append(repr(error))

    workers = [threading.Thread(target=work, args=pair) for pair in zip(inputs, alone, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    score.add("threads", 1, bool(wrong), wrong[:1])
    return layer.activation.name
