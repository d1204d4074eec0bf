"""A map of yours as one object: maps with known answers, and maps that are none of the kind."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import pcdeq
from pcdeq.concave.bounds import adjoint_bound
from pcdeq.errors import ConvergenceError, ConvergenceWarning, UsageError

EXACT = pcdeq.Anderson(tol=1e-14, max_steps=2000)
GOLDEN = (3 + math.sqrt(5)) / 2  # of z = 1 + sqrt(z)


def matrix(n=4, radius=0.8, seed=0):
    """A nonnegative matrix of this spectral radius."""
    found = torch.rand(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return found * radius / torch.linalg.eigvals(found).abs().max()


def affine(radius):
    """z = Az + b, unbounded, with its asymptotic mapping, its exact answer and a batch of b."""
    a, b = matrix(radius=radius), torch.rand(3, 4, generator=torch.Generator().manual_seed(1)).double() + 0.1
    exact = torch.linalg.solve(torch.eye(4).double() - a, b.T).T
    return pcdeq.ConcaveMap(lambda z, b: z @ a.T + b, asymptotic=lambda z, b: z @ a.T), b, exact


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


class TestSolving:
    @pytest.mark.parametrize(
        "solver",
        [pcdeq.Picard(tol=1e-13, max_steps=5000), EXACT, pcdeq.Anderson(tol=1e-13, memory=3), pcdeq.Newton(tol=1e-13)],
    )
    @pytest.mark.parametrize("radius", [0.3, 0.95])
    def test_unbounded_maps(self, solver, radius):
        fn, b, exact = affine(radius)
        solution = fn.solve(zeros(3, 4), b, solver=solver)
        assert solution.converged.all()
        torch.testing.assert_close(solution.value, exact, rtol=1e-11, atol=0)

    @pytest.mark.parametrize("start", [0.0, 1e-6, 1.0, 1e6])
    def test_from_anywhere(self, start):
        fn, b, exact = affine(0.9)
        solution = fn.solve(torch.full((3, 4), start).double(), b, solver=EXACT)
        torch.testing.assert_close(solution.value, exact, rtol=1e-11, atol=0)

    def test_small_components_are_as_exact_as_large_ones(self):
        scale = torch.tensor([[1e-9, 1.0, 1e9]]).double()
        fn = pcdeq.ConcaveMap(lambda z: scale * (1 + (z / scale).sum(-1, keepdim=True).sqrt()))
        exact = ((math.sqrt(3) + math.sqrt(7)) / 2) ** 2  # t = 1 + sqrt(3t)
        for solver in (pcdeq.Picard(tol=1e-10), pcdeq.Anderson(tol=1e-10)):
            value = fn.solve(zeros(1, 3), solver=solver).value
            torch.testing.assert_close(value / scale, torch.full((1, 3), exact, dtype=torch.float64), rtol=1e-8, atol=0)

    def test_each_sample_counts_its_own_steps(self):
        rate = torch.tensor([[0.01], [0.9]]).double()
        solution = pcdeq.ConcaveMap(lambda z: rate * z + 1).solve(zeros(2, 1), solver=pcdeq.Picard(tol=1e-10))
        assert solution.steps[0] < 15
        assert solution.steps[1] > 100

    def test_a_vector_is_one_sample(self):
        fn = pcdeq.ConcaveMap(lambda z: 1 + z.sqrt())
        solution = fn.solve(zeros(3), solver=EXACT)
        assert solution.value.shape == (3,)
        assert solution.converged.shape == (1,)
        box = fn.enclose(zeros(3))
        assert box.lower.shape == (3,)
        assert bool(box.certified)

    def test_a_certified_solve_proves_its_tolerance(self):
        fn, b, exact = affine(0.99)
        solution = fn.solve(zeros(3, 4), b, solver=pcdeq.Certified(pcdeq.Anderson(tol=1e-9, max_steps=2000)))
        assert solution.converged.all()
        assert (solution.residual < 1e-9).all()
        assert ((solution.value - exact).norm(dim=1) <= solution.residual * solution.value.norm(dim=1)).all()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_few_digits(self, dtype):
        found = pcdeq.ConcaveMap(lambda z: (z + 1).sqrt()).solve(torch.ones(2, 3, dtype=dtype)).value
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), torch.full((2, 3), (1 + 5**0.5) / 2).double(), rtol=1e-2, atol=0)

    def test_empty(self):
        fn = pcdeq.ConcaveMap(lambda z: 1 + z.sqrt())
        assert fn.solve(zeros(0, 3)).value.shape == (0, 3)
        assert fn(zeros(0, 3)).shape == (0, 3)


class TestGradients:
    def test_gradcheck(self):
        a = matrix(3).requires_grad_()
        b = (torch.rand(2, 3).double() + 0.1).requires_grad_()
        fn = pcdeq.ConcaveMap(lambda z, a, b: (z @ a.T + b).log1p() + 0.1, solver=EXACT)
        assert torch.autograd.gradcheck(lambda a, b: fn(zeros(2, 3), a, b), (a, b))

    @pytest.mark.parametrize("solver", [pcdeq.Newton(tol=1e-13), pcdeq.Certified(pcdeq.Anderson(tol=1e-10))])
    def test_closures_and_other_solvers(self, solver):
        a = torch.tensor([[0.5], [0.9]]).double().requires_grad_()
        z = pcdeq.ConcaveMap(lambda z: a * z + 1, solver=solver)(zeros(2, 1))
        z.sum().backward()
        torch.testing.assert_close(a.grad, 1 / (1 - a.detach()) ** 2, rtol=1e-7, atol=0)

    def test_memory_does_not_grow_with_the_steps(self):
        b = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)

        def saved(tol):
            sizes = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
                pcdeq.ConcaveMap(lambda z: 0.9 * z + b, solver=pcdeq.Picard(tol=tol, max_steps=1000))(zeros(1, 3))
            return sum(sizes)

        assert saved(1e-2) == saved(1e-12)

    @pytest.mark.parametrize("granted", [None, 1e-13])
    @pytest.mark.parametrize("tol", [1e-2, 1e-12])
    def test_the_adjoint_s_error_is_bounded(self, granted, tol):
        a = matrix(5, 0.9, seed=3)
        fn = pcdeq.ConcaveMap(lambda z: (z @ a.T + 0.2).sqrt(), rounding=granted, solver=EXACT)
        fn.adjoint_solver = pcdeq.Anderson(tol=tol)
        z = fn.solve(zeros(2, 5)).value
        grad = torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).double()
        found = fn.adjoint(z, grad)
        jacobian = 0.5 * (z @ a.T + 0.2).rsqrt()[:, :, None] * a
        exact = torch.linalg.solve(torch.eye(5).double() - jacobian.mT, grad)
        assert found.certified.all()
        assert ((found.value - exact).abs() <= found.error + 1e-14).all()
        assert float(found.error.max()) < 100 * tol + 1e-10

    def test_a_wrong_adjoint_has_a_large_bound(self):
        fn = pcdeq.ConcaveMap(lambda z: 0.5 * z + 1)
        z = torch.tensor([[2.0]]).double()
        bound = adjoint_bound(fn.bind(z), z, torch.tensor([[2.5]]).double(), torch.ones(1, 1).double())
        assert 0.5 <= float(bound) < 0.500001  # y = 2

    def test_no_bound_where_the_adjoint_does_not_exist(self):
        fn = pcdeq.ConcaveMap(lambda z: 1.5 * z + 1)
        z = torch.ones(1, 1).double()
        assert adjoint_bound(fn.bind(z), z, z, z).isinf().all()


class TestBounds:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("radius", [0.5, 0.99])
    def test_they_hold_the_answer(self, radius, dtype):
        fn, b, _ = affine(radius)
        a = matrix(radius=radius).to(dtype)
        fn = pcdeq.ConcaveMap(lambda z, b: z @ a.T + b)
        b = b.to(dtype)
        exact = torch.linalg.solve(torch.eye(4).double() - a.double(), b.double().T).T
        box = fn.enclose(torch.zeros(3, 4, dtype=dtype), b)
        assert box.certified.all()
        assert (box.lower.double() <= exact).all()
        assert (box.upper.double() >= exact).all()
        if radius == 0.5:  # near 1 a small residual says little, and no width was asked for
            assert float((box.width / box.lower).max()) < 1e-4

    def test_refined_to_a_width(self):
        fn, b, exact = affine(0.99)
        for options in ({"width": 1e-9}, {"rtol": 1e-11}):
            box = fn.enclose(zeros(3, 4), b, **options)
            assert box.certified.all()
            assert ((box.lower <= exact * (1 + 1e-13)) & (exact <= box.upper * (1 + 1e-13))).all()
            assert (box.width <= options.get("width", torch.inf)).all()
            assert (box.width <= options.get("rtol", torch.inf) * box.lower).all()

    def test_a_width_below_the_rounding_is_not_certified(self):
        fn, b, _ = affine(0.9)
        assert not fn.enclose(zeros(3, 4), b, rtol=1e-17).certified.any()

    def test_near_a_kink(self):
        """min(z/2 + 1, 2): the kink is at z* itself."""
        fn = pcdeq.ConcaveMap(lambda z: torch.minimum(z / 2 + 1, torch.tensor(2.0).double()))
        box = fn.enclose(zeros(1, 1), rtol=1e-12)
        assert box.certified.all() and float(box.lower) <= 2 <= float(box.upper)

    def test_the_rounding_that_is_granted_is_believed(self):
        """A map that is off by 1e-6 of its value: bounds are as wide as that, and hold."""

        def coarse(z):
            return (1 + z.sqrt()) * (1 + 1e-6 * torch.sin(1e7 * z))

        box = pcdeq.ConcaveMap(coarse, rounding=1e-6).enclose(zeros(1, 1))
        assert box.certified.all() and float(box.lower) <= GOLDEN <= float(box.upper)
        assert 1e-7 < float(box.width) < 1e-4

    def test_the_map_at_the_bounds_points_inward(self):
        fn, b, _ = affine(0.9)
        box = fn.enclose(zeros(3, 4), b)
        assert (fn.fn(box.lower, b) >= box.lower * (1 - 1e-15)).all()
        assert (fn.fn(box.upper, b) <= box.upper * (1 + 1e-15)).all()


class TestRate:
    def test_no_faster_than_it_is(self):
        fn = pcdeq.ConcaveMap(lambda z: 1 + z.sqrt())
        rate = fn.rate(zeros(1, 1), tol=1e-8)
        z, steps = zeros(1, 1), 0
        before = None
        while abs(math.log(float(z) / GOLDEN) if z > 0 else 1) > 1e-8:
            z, steps = 1 + z.sqrt(), steps + 1
            distance = abs(math.log(float(z) / GOLDEN))
            if before is not None and distance > 1e-10:
                assert distance <= rate.factor * before
            before = distance
        assert steps <= rate.steps

    def test_none_without_an_upper_bound(self):
        assert pcdeq.ConcaveMap(lambda z: 1.1 * z + 1).rate(zeros(1, 1)).steps is None


class TestExistence:
    @pytest.mark.parametrize(("radius", "verdict"), [(0.999999, "exists"), (1.000001, "does not exist")])
    def test_proved_on_both_sides_of_the_border(self, radius, verdict):
        fn, b, _ = affine(radius)
        found = fn.exists(zeros(3, 4), b)
        assert found.verdict == (verdict,) * 3
        assert found.proved.all()
        assert bool(found) == (radius < 1)
        assert (found.lower <= radius + 1e-12).all() and (found.upper >= radius - 1e-12).all()
        if radius < 1:
            assert (fn.fn(found.witness, b) <= found.witness).all()

    def test_on_the_border_nothing_is_said(self):
        found = pcdeq.ConcaveMap(lambda z: z + 1, asymptotic=lambda z: z).exists(zeros(1, 2))
        assert found.verdict == ("undecided",)
        assert not found.proved.any()

    def test_without_the_asymptotic_mapping_no_proof_that_there_is_none(self):
        found = pcdeq.ConcaveMap(lambda z: 1.2 * z + 1).exists(zeros(1, 2))
        assert found.verdict == ("does not exist",)
        assert not found.proved.any()

    def test_a_map_that_stops_growing_late(self):
        """Up to 1e30 it looks like 2z + 1; a limit cannot know, and what is proved is right."""
        fn = pcdeq.ConcaveMap(lambda z: torch.clamp(2 * z + 1, max=1e30))
        found = fn.exists(zeros(1, 1))
        assert found.verdict == ("exists",) or not found.proved.any()

    def test_reducible_maps(self):
        a = torch.tensor([[0.5, 1.0], [0.0, 0.9]]).double()
        found = pcdeq.ConcaveMap(lambda z: z @ a.T + 1, asymptotic=lambda z: z @ a.T).exists(zeros(1, 2))
        assert found.verdict == ("exists",) and found.proved.all()
        assert float(found.upper) == pytest.approx(0.9, rel=1e-3)

    def test_said_in_words(self):
        size = torch.tensor([[0.5], [2.0], [1.0]]).double()
        fn = pcdeq.ConcaveMap(lambda z: size * z + 1, asymptotic=lambda z: size * z)
        words = "1 of 3 samples have a fixed point (1 proved), 1 have none (1 proved), 1 undecided"
        assert words in str(fn.exists(zeros(3, 1)))


HOSTILE = {
    "convex": lambda z: 0.1 + z.square(),
    "decreasing": lambda z: 1 / (1 + z),
    "negative": lambda z: z - 1,
    "zero at zero": torch.sqrt,
    "NaN": lambda z: z * torch.nan,
    "NaN far out": lambda z: torch.where(z > 1.5, torch.nan, 1 + 0.3 * z),
    "infinite": lambda z: torch.full_like(z, torch.inf),
    "not monotone in one component": lambda z: 1 + torch.stack([z[:, 0], (3 - z[:, 0]).clamp(min=0)], 1) / 4,
}


class TestHostile:
    """Maps that are not of the class: a clear answer, not a wrong one."""

    @pytest.mark.parametrize("name", HOSTILE)
    def test_check_finds_a_counterexample(self, name):
        report = pcdeq.ConcaveMap(HOSTILE[name]).check(zeros(1, 2))
        assert not report
        failed = [v for v in (report.positive, report.monotone, report.scalable, report.concave) if not v]
        assert failed and all(verdict.counterexample is not None for verdict in failed)
        assert "not " in str(report)

    @pytest.mark.parametrize("name", HOSTILE)
    def test_nothing_is_claimed(self, name):
        fn = pcdeq.ConcaveMap(HOSTILE[name], rounding=1e-13)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            assert not fn.enclose(zeros(1, 2)).certified.any()
            found = fn.exists(zeros(1, 2))
            assert not found and not found.proved.any()
            assert fn.rate(zeros(1, 2)).steps is None

    def test_a_warning_says_why_there_are_no_bounds(self):
        with pytest.warns(ConvergenceWarning, match=r"samples \[0\]: fn is not positive, monotone and scalable"):
            pcdeq.ConcaveMap(HOSTILE["decreasing"]).enclose(zeros(1, 2))

    def test_without_a_fixed_point_the_solve_says_so(self):
        fn = pcdeq.ConcaveMap(lambda z: 1.5 * z + 1, asymptotic=lambda z: 1.5 * z)
        with pytest.warns(ConvergenceWarning, match=r"samples \[0\] have no fixed point .* radius .* 1.5"):
            fn.solve(zeros(1, 2))
        with pytest.raises(ConvergenceError, match="no fixed point"):
            fn.solve(zeros(1, 2), solver=pcdeq.Anderson(tol=1e-6, throw=True))

    def test_with_one_at_infinity_the_solve_says_that_it_does_not_know(self):
        with pytest.warns(ConvergenceWarning, match=r"of samples \[0\] it is not known"):
            pcdeq.ConcaveMap(lambda z: z + 1).solve(zeros(1, 1))

    def test_one_bad_sample_leaves_the_others_alone(self):
        size = torch.tensor([[0.5], [torch.nan], [2.0], [0.25]]).double()
        fn = pcdeq.ConcaveMap(lambda z: size * z + 1, asymptotic=lambda z: size * z)
        good, exact = [0, 3], torch.tensor([[2.0], [4 / 3]], dtype=torch.float64)
        with pytest.warns(ConvergenceWarning, match=r"samples \[2\] have no fixed point and of samples \[1\]"):
            solution = fn.solve(zeros(4, 1), solver=pcdeq.Anderson(tol=1e-12))
        assert solution.converged.tolist() == [True, False, False, True]
        torch.testing.assert_close(solution.value[good], exact, rtol=1e-11, atol=0)
        with pytest.warns(ConvergenceWarning, match=r"samples \[1\]: fn is not positive"):
            box = fn.enclose(zeros(4, 1), rtol=1e-10)
        assert box.certified.tolist() == [True, False, False, True]
        assert (box.lower[good] <= exact).all() and (box.upper[good] >= exact).all()
        assert fn.exists(zeros(4, 1)).verdict == ("exists", "undecided", "does not exist", "exists")

    def test_one_convex_sample_leaves_the_others_alone(self):
        power = torch.tensor([[0.5], [2.0]]).double()
        fn = pcdeq.ConcaveMap(lambda z: 0.2 + 0.2 * torch.exp(power * torch.log(z + 1)), rounding=1e-13)
        with pytest.warns(ConvergenceWarning, match=r"samples \[1\]"):
            box = fn.enclose(zeros(2, 1))
        assert box.certified.tolist() == [True, False]

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: pcdeq.ConcaveMap(3), "fn must be a function"),
            (lambda: pcdeq.ConcaveMap(torch.sqrt, rounding=1.0), "rounding must be a small relative error"),
            (lambda: pcdeq.ConcaveMap(torch.sqrt, solver=3), "solver must be"),
            (lambda: pcdeq.ConcaveMap(torch.sqrt).solve(torch.zeros(2, dtype=torch.int64)), "int64"),
            (lambda: pcdeq.ConcaveMap(torch.sqrt).solve([0.0]), "the first argument is a point"),
            (lambda: pcdeq.ConcaveMap(torch.sqrt).solve(-torch.ones(2)), "nonnegative cone, but has a component -1"),
            (lambda: pcdeq.ConcaveMap(lambda z: z[:1]).solve(torch.zeros(2, 3)), r"\(2, 3\) to .* \(1, 3\)"),
            (lambda: pcdeq.ConcaveMap(lambda z: None).solve(torch.zeros(2, 3)), "to NoneType; it must keep the shape"),
            (lambda: pcdeq.ConcaveMap(torch.sqrt).enclose(torch.zeros(2), rtol=0.0), "rtol must be above 0"),
            (lambda: pcdeq.ConcaveMap(torch.sqrt).rate(torch.zeros(2), tol=0.0), "tol must be above 0"),
            (lambda: pcdeq.ConcaveMap(torch.sqrt).adjoint(torch.ones(2), torch.ones(3)), r"shape \(2,\), got \(3,\)"),
        ],
    )
    def test_mistakes_are_one_clear_line(self, call, message):
        with pytest.raises(UsageError, match=message):
            call()
