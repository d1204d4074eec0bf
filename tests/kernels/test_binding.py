"""Solves by the kernels are those of their twins in plain torch, in every size, order and number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch
import twins
from twins import LAST, LIMITS, make_form

from pcdeq.kernels import binding
from pcdeq.kernels.binding import Form

pytestmark = pytest.mark.skipif(binding._KERNELS is None, reason=binding.engine())

# channels, height, width: a pixel, lines, odd sizes, channels around the eight of a vector, tiles of four and not
IMAGES = [(1, 1, 1), (3, 1, 1), (8, 1, 7), (5, 6, 1), (7, 5, 5), (8, 4, 4), (9, 9, 10), (16, 13, 3), (33, 7, 8)]
WIDTHS = [1, 2, 7, 8, 9, 31, 80, 87, 256]


def solve(form, start=None, base=None, box=None, **options):
    with torch.no_grad():
        return binding.solve(form, start, base, box, **{**LIMITS, **options})


def assert_solves(form, found, tol=LIMITS["tol"]):
    exact = twins.solution(form)
    assert found is not None and found.converged.all()
    assert found.value.dtype == torch.float32 and found.value.shape == form.offset.shape
    # a residual of tol at a rate below 0.9 is an error below 10 tol
    assert (twins.norm(found.value.double() - exact) <= 10 * tol * twins.norm(exact)).all()
    assert (found.residual < tol).all()
    assert found.summary == (0, int(found.steps.max()), pytest.approx(float(found.residual.max())))


FORMS = [("linear", True), ("linear", False), *((name, side) for name in twins.ACTIVATIONS for side in (False, True))]


class TestSolve:
    def test_knows_the_activations_of_the_twins(self):
        assert set(binding._CODES) == {*twins.ACTIVATIONS, "linear"}

    @pytest.mark.parametrize("shape", [(9,), (80,), (5, 6, 7), (16, 9, 9)], ids=str)
    @pytest.mark.parametrize(("activation", "transposed"), FORMS)
    def test_finds_the_fixed_point(self, shape, activation, transposed):
        form = make_form(shape, activation=activation, transposed=transposed)
        assert_solves(form, solve(form))

    @pytest.mark.parametrize("samples", [1, 5])
    @pytest.mark.parametrize("shape", [*[(width,) for width in WIDTHS], *IMAGES], ids=str)
    def test_every_size(self, shape, samples):
        for activation, transposed in (("softsign", False), ("linear", True)):
            form = make_form(shape, samples, activation, transposed)
            assert_solves(form, solve(form))
            images = form._replace(
                offset=form.offset.contiguous(memory_format=LAST) if len(shape) == 3 else form.offset
            )
            assert torch.equal(solve(images).value, solve(form).value)

    @pytest.mark.parametrize("kind", ["dense", "conv"])
    @pytest.mark.parametrize("activation", ["tanh", "relu6", "linear"])
    @pytest.mark.parametrize("gain", [0.5, 4.0])
    def test_takes_the_steps_of_its_twin(self, kind, activation, gain):
        shape = (24,) if kind == "dense" else (6, 7, 9)
        gain = min(gain, 0.99) if activation == "linear" else gain
        form = make_form(shape, 40, activation, activation == "linear", gain=gain)
        box = None if activation == "linear" else (0.0, 6.0)
        found = solve(form, box=box, tol=1e-4, decay=0.5)
        start = twins.apply(form, torch.zeros_like(form.offset, dtype=torch.float64))
        options = LIMITS | {"tol": 1e-4, "decay": 0.5}
        value, steps, converged = twins.anderson(form, start, box, **options)
        assert converged.all() and found.converged.all()
        # rounding decides a step only where a residual is as good as equal to what it is compared with
        assert ((found.steps - steps).abs() <= 1).all() and (found.steps == steps).float().mean() > 0.9
        assert torch.allclose(found.value.double(), value, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("shape", [(12,), (6, 5, 7)], ids=str)
    def test_rejected_proposals_are_those_of_its_twin(self, shape):
        # A spread-out start and a decay of nearly 0 make the safeguard refuse nearly every proposal.
        form = make_form(shape, 20, "linear", True, gain=0.95)
        start = 100 * torch.randn(form.offset.shape, generator=torch.Generator().manual_seed(1))
        options = {"tol": 1e-4, "decay": 0.01, "steps_before": 0}
        for most in (1, 2, 3, 4, 5, 6, 9, 30):
            found = solve(form, start, **options, max_steps=most)
            value, steps, converged = twins.anderson(form, start.double(), None, **options, max_steps=most)
            assert torch.equal(found.steps, steps) and torch.equal(found.converged, converged)
            assert torch.allclose(found.value.double(), value, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("shape", [(9,), (5, 6, 7)], ids=str)
    @pytest.mark.parametrize("activation", ["sigmoid", "linear"])
    def test_starts_where_it_is_told(self, shape, activation):
        form = make_form(shape, activation=activation)
        base = torch.rand(shape)
        expected = twins.evaluate(form, twins.apply(form, base.double()))
        rounding = {"rtol": 0.0, "atol": 2e-6}  # of sums around 1
        assert torch.allclose(solve(form, base=base, max_steps=1).value.double(), expected, **rounding)
        start = torch.rand(form.offset.shape)
        expected = twins.evaluate(form, start.double())
        assert torch.allclose(solve(form, start, max_steps=1).value.double(), expected, **rounding)
        assert torch.equal(solve(form, start, base, max_steps=1).value, solve(form, start, max_steps=1).value)
        assert_solves(form, solve(form, start))
        assert_solves(form, solve(form, base=base))

    def test_a_base_that_is_no_product_is_mended(self):
        form = make_form((4,))
        base = torch.tensor([torch.nan, torch.inf, -3.0, 1.0])
        assert_solves(form, solve(form, base=base))
        mended = torch.tensor([0.0, torch.finfo(torch.float32).max, 0.0, 1.0])
        assert torch.equal(solve(form, base=base, max_steps=1).value, solve(form, base=mended, max_steps=1).value)

    def test_steps_before_count(self):
        form = make_form((9,))
        assert torch.equal(solve(form, steps_before=3).steps, solve(form).steps + 3)
        found = solve(form, steps_before=2, max_steps=3)
        assert found.steps.tolist() == [3, 3, 3] and not found.converged.any() and found.summary[0] == 3
        assert solve(form, steps_before=3, max_steps=3) is None

    def test_zero_is_an_answer(self):
        form = make_form((6,), 2, "linear", True)
        form.offset[1] = 0
        found = solve(form)
        assert found.converged.all() and found.steps[1] == 1
        assert found.value[1].eq(0).all() and found.residual[1] == 0
        assert solve(make_form((6,), activation="relu6")._replace(offset=torch.zeros(2, 6)), tol=0.0).converged.all()

    @pytest.mark.parametrize("shape", [(9,), (5, 6, 7)], ids=str)
    def test_a_sample_that_is_no_number_stops_alone(self, shape, threads):
        threads(1)
        form = make_form(shape, 4)
        form.offset[1].view(-1)[0] = torch.nan
        form.offset[2].view(-1)[1] = torch.inf
        found, clean = solve(form), solve(make_form(shape, 4))
        assert found.converged.tolist()[::3] == [True, True] and not found.converged[1]
        assert found.steps[1] == 1 and found.residual[1].isnan() and torch.tensor(found.summary[2]).isnan()
        for sample in (0, 3):
            assert torch.equal(found.value[sample], clean.value[sample])

    @pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
    def test_the_adjoint_is_free_of_scale(self, scale):
        form = make_form((12,), activation="linear", transposed=True)
        found = solve(form._replace(offset=form.offset * scale))
        assert torch.allclose(found.value / scale, solve(form).value, rtol=1e-4)
        assert torch.equal(found.steps, solve(form).steps)

    @pytest.mark.parametrize("shape", [(80,), (16, 14, 14)], ids=str)
    @pytest.mark.parametrize("activation", ["tanh", "linear"])
    def test_threads_give_identical_bits(self, shape, activation, kernel_threads):
        form = make_form(shape, 67, activation)
        assert form.weight.numel() * form.offset.numel() // shape[0] >= binding.PARALLEL_PRODUCT
        kernel_threads(1)
        one = solve(form)
        for count in (2, 3, 7):
            kernel_threads(count)
            found = solve(form)
            assert all(torch.equal(a, b) for a, b in zip(one[:4], found[:4], strict=True))
            assert found.summary == one.summary

    def test_samples_do_not_depend_on_their_neighbours(self):
        form = make_form((6, 9, 9), 6)
        whole = solve(form)
        for sample in range(6):
            alone = solve(form._replace(offset=form.offset[sample : sample + 1]))
            assert torch.equal(alone.value[0], whole.value[sample])

    @pytest.mark.parametrize("activation", ["tanh", "linear"])
    def test_any_order_in_memory(self, activation):
        form = make_form((5, 6, 7), 4, activation)
        start, base = torch.rand(4, 5, 6, 7), torch.rand(5, 6, 7)

        def spread(x):
            return torch.stack([x, x], -1)[..., 0] if x is not None else None

        def turned(x):
            return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x is not None else None

        def last(x):
            return x.contiguous(memory_format=LAST) if x is not None and x.ndim == 4 else x

        for change in (spread, turned, last):
            for changed in ("offset", "slope", "weight"):
                other = form._replace(**{changed: change(getattr(form, changed))})
                assert torch.equal(solve(other).value, solve(form).value)
            assert torch.equal(solve(form, change(start)).value, solve(form, start).value)
            assert torch.equal(solve(form, base=change(base)).value, solve(form, base=base).value)
        kept = solve(form._replace(offset=last(form.offset))).value
        assert kept.is_contiguous(memory_format=LAST) and solve(form).value.is_contiguous()


class TestSolveDeclines:
    def test_what_it_does_not_know(self):
        form = make_form((5, 6, 7))
        assert solve(form) is not None
        for activation in ("log1p", "arctan", "isru", "custom"):
            assert solve(form._replace(activation=activation)) is None
        assert solve(form._replace(kind="sparse")) is None
        assert solve(form._replace(activation="linear")) is None  # without a slope

    def test_other_sizes(self):
        wide = binding.LARGEST_DENSE + 1
        assert solve(make_form((wide,))) is None
        form = make_form((5, 6, 7))
        for kernel in ((1, 1), (5, 5), (3, 1), (3,), (3, 3, 3)):
            assert solve(form._replace(weight=torch.rand(5, 5, *kernel))) is None
        assert solve(Form("conv", torch.rand(4, 4, 3), False, "tanh", torch.rand(2, 4, 9))) is None
        assert solve(Form("conv", torch.rand(4, 4, 3, 3, 3), False, "tanh", torch.rand(2, 4, 3, 3, 3))) is None
        assert solve(Form("dense", torch.rand(4, 4), False, "tanh", torch.rand(2, 3, 4))) is None

    def test_a_tolerance_finer_than_its_rounding(self):
        assert solve(make_form((5, 6, 7)), tol=binding.FINEST_CONV) is not None
        assert solve(make_form((5, 6, 7)), tol=binding.FINEST_CONV / 2) is None
        assert solve(make_form((5,)), tol=binding.FINEST_CONV / 2) is not None

    def test_a_box_without_0(self):
        form = make_form((5,))
        assert solve(form, box=(0.0, 1.0)) is not None and solve(form, box=(0.1, 1.0)) is None
        assert solve(form, box=(torch.zeros(3, 1), torch.ones(3, 1))) is None

    def test_where_a_graph_is_wanted(self):
        form = make_form((5,))
        assert binding.solve(form, None, None, None, **LIMITS) is not None
        for name in ("weight", "offset"):
            other = form._replace(**{name: getattr(form, name).clone().requires_grad_()})
            assert binding.solve(other, None, None, None, **LIMITS) is None and solve(other) is not None

    def test_machines_without_vectors(self, monkeypatch):
        class Kernels:
            VECTORISED = 0
            MOST_THREADS, solve = 8, staticmethod(binding._KERNELS.solve)

        monkeypatch.setattr(binding, "_KERNELS", Kernels)
        assert solve(make_form((5, 6, 7))) is None and solve(make_form((5,))) is not None

    def test_nothing_where_there_are_no_kernels(self):
        code = "from pcdeq.kernels import binding as b; assert b._KERNELS is None; print(b.engine())"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PCDEQ_KERNELS": "0"}, capture_output=True, text=True
        )
        assert done.stdout.strip() == "torch, as PCDEQ_KERNELS=0 asks", done.stderr


def test_engine_names_its_threads(threads):
    threads(2)
    assert binding.engine() == f"C, {min(2, binding._KERNELS.MOST_THREADS)} threads"


def test_a_kernel_without_threads_leaves_large_work_to_torch(threads, monkeypatch):
    alone = types.SimpleNamespace(**{name: getattr(binding._KERNELS, name) for name in dir(binding._KERNELS)})
    alone.MOST_THREADS = 1  # as built by clang
    monkeypatch.setattr(binding, "_KERNELS", alone)
    images = torch.rand(32, 8, 16, 16).to(memory_format=torch.channels_last)
    weight, ones = torch.rand(8, 8, 3, 3) / 72, torch.ones(8)
    for number, samples, taken in ((2, 32, False), (1, 32, True), (2, 1, True)):
        threads(number)
        form = binding.Form("conv", weight, False, "tanh", images[:samples])
        solved = binding.solve(form, None, None, (0.0, 1.0), tol=1e-4, decay=0.9, steps_before=1, max_steps=50)
        assert (solved is not None) == taken
        options = {"training": False, "momentum": 0.1, "eps": 1e-5}
        assert (binding.batch_norm(images[:samples], ones, ones, ones, ones, **options) is not None) == taken


@pytest.mark.parametrize(
    ("error", "match"),
    [(ImportError("undefined symbol: GOMP_x"), "cannot be loaded.*GOMP_x.*OpenMP runtime"), (None, "another version")],
)
def test_kernels_that_do_not_fit_warn_once(error, match, monkeypatch):
    def load(name):
        if error is not None:
            raise error
        return object()

    monkeypatch.setattr(binding.importlib, "import_module", load)
    monkeypatch.delenv("PCDEQ_KERNELS", raising=False)
    with pytest.warns(UserWarning, match=match):
        module, reason = binding._load()
    assert module is None and reason.startswith("torch: ")


def test_kernels_that_were_not_built_are_no_news(monkeypatch):
    def load(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(binding.importlib, "import_module", load)
    monkeypatch.delenv("PCDEQ_KERNELS", raising=False)
    assert binding._load()[0] is None
