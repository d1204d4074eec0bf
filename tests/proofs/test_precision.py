"""Proofs are made in full precision, by plain sums, whatever surrounds them (T9)."""

import copy
import threading
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from torch import nn

import pcdeq
from pcdeq.equation import Equation
from pcdeq.export.program import plan_export
from pcdeq.proofs import precision
from pcdeq.proofs.certify import class_decided
from pcdeq.proofs.precision import full_precision, plain_convolution
from pcdeq.solvers import run

EXACT = pcdeq.Anderson(tol=1e-14, max_steps=5000)
STRICT = (*["none"] * 3, *["ieee"] * 6, False, False, True)


def settings():
    """All that may make a product something else; the last is whether there are denormal numbers."""
    found = [torch._C._get_fp32_precision_getter(*key) for key in precision._PRECISIONS]
    denormal = bool(torch.tensor(2.0**-1040, dtype=torch.float64) * 0.5 > 0)
    return (*found, torch._C._get_nnpack_enabled(), torch.is_autocast_enabled("cpu"), denormal)


@contextmanager
def nothing():
    yield


@contextmanager
def matmul_precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def setting(backend, op, value):
    before = torch._C._get_fp32_precision_getter(backend, op)
    torch._C._set_fp32_precision_setter(backend, op, value)
    try:
        yield
    finally:
        torch._C._set_fp32_precision_setter(backend, op, before)


@contextmanager
def without_onednn():
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def deterministic():
    torch._C._set_deterministic_algorithms(True)  # the public one first imports a compiler
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


@contextmanager
def flushing():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


SURROUNDINGS = {
    "nothing": nothing,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "matmul at medium": lambda: matmul_precision("medium"),
    "oneDNN's matmul in bf16": lambda: setting("mkldnn", "matmul", "bf16"),
    "oneDNN's convolutions in bf16": lambda: setting("mkldnn", "conv", "bf16"),
    "all in bf16": lambda: setting("generic", "all", "bf16"),
    "TF32": lambda: setting("cuda", "matmul", "tf32"),
    "without oneDNN": without_onednn,
    "deterministic": deterministic,
    "flushing": flushing,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_settings_are_strict_inside_and_as_they_were_outside(name):
    with SURROUNDINGS[name]():
        before = settings()
        with full_precision(), full_precision():
            assert settings() == STRICT
        assert settings() == before


def test_the_last_thread_out_restores_the_settings():
    inside, out, found = threading.Event(), threading.Event(), []

    def prove():
        with full_precision():
            inside.set()
            out.wait(10)
            found.append(torch._C._get_fp32_precision_getter("mkldnn", "matmul"))

    with setting("mkldnn", "matmul", "bf16"):
        with full_precision():  # the first one in, which is out before the other
            thread = threading.Thread(target=prove)
            thread.start()
            assert inside.wait(10)
        out.set()
        thread.join()
        assert found == ["ieee"]
        assert torch._C._get_fp32_precision_getter("mkldnn", "matmul") == "bf16"


class Watched(pcdeq.LinearMap):
    """A matrix that writes down in which settings it is multiplied."""

    seen: ClassVar[list[tuple[object, ...]]] = []

    def apply(self, z):
        self.seen.append(settings())
        return z @ self.weight.T

    def adjoint(self, y):
        self.seen.append(settings())
        return y @ self.weight


class Watching(pcdeq.Operator):
    def __init__(self):
        super().__init__((4, 4), state_ndim=1)

    def bind(self, weight):
        return Watched(weight)


def entrances():
    """Every way to a proof."""
    torch.manual_seed(0)
    layer = pcdeq.PcDEQ(Watching(), warm_start=False)
    model = nn.Sequential(layer, nn.Linear(4, 3)).eval()
    x = torch.randn(2, 4)
    certified = pcdeq.Certified(pcdeq.Anderson(tol=1e-3))
    return {
        "enclose": lambda: layer.enclose(x),
        "enclose a width": lambda: layer.enclose(x, width=1e-9),
        "enclose_gradient": lambda: layer.enclose_gradient(x, torch.ones_like(x)),
        "certify": lambda: pcdeq.certify(model, x),
        "certify a radius": lambda: pcdeq.certify(model, x, radius=0.01),
        "Certified": lambda: layer.solve(x, solver=certified),
        "until": lambda: layer.solve(x, until=class_decided(model[1:])),
    }


@pytest.mark.parametrize("name", ["autocast", "matmul at medium", "all in bf16", "flushing"])
@pytest.mark.parametrize("entrance", entrances())
def test_every_proof_multiplies_in_full_precision(entrance, name):
    Watched.seen.clear()
    with torch.no_grad(), SURROUNDINGS[name]():
        entrances()[entrance]()
    assert STRICT in Watched.seen
    if entrance not in ("Certified", "until"):  # whose solves only look for a point
        assert set(Watched.seen) == {STRICT}


def boundary_images(model, images):
    """Pictures between pairs of pictures where the two classes are all but equal; their classes; and their lead."""
    left, right = (torch.randn(images, 6).double() for _ in range(2))
    different = model(left).argmax(1) != model(right).argmax(1)
    left, right = left[different], right[different]
    start = model(left).argmax(1)
    for _ in range(14):
        middle = (left + right) / 2
        same = (model(middle).argmax(1) == start)[:, None]
        left, right = torch.where(same, middle, left), torch.where(same, right, middle)
    scores = model(left.float().double())
    return left.float(), scores.argmax(1), scores.diff().abs()[:, 0]


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_classes_near_a_boundary_are_proved_right_or_not_at_all(name):
    right, decided = 0, 0
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 6), pcdeq.PcDEQLinear(6, "sigmoid"), nn.Linear(6, 2)).eval()
        with torch.no_grad():
            model[2].bias[1] += model(torch.randn(60, 6)).diff().median().neg()  # both classes, about as often
        exact = copy.deepcopy(model).double()
        exact[1].solver = pcdeq.Anderson(tol=1e-12)
        with torch.no_grad():
            images, classes, lead = boundary_images(exact, 60)
        with SURROUNDINGS[name]():
            certificate = pcdeq.certify(model, images)
        sure = certificate.proved & (lead > 1e-7)  # of the referee, whose weights were normalised in float64
        assert certificate.classes[sure].equal(classes[sure])
        right, decided = right + int(sure.sum()), decided + len(sure)
    assert decided > 50 and right > 0.9 * decided


@pytest.mark.parametrize("name", ["nothing", "without oneDNN"])
def test_bounds_of_convolutions_hold_for_batches_of_sixteen(name):
    """From there on torch takes Winograd's convolutions without oneDNN, which round far more than margins cover."""
    for seed in (222, 246, 270, 282):
        torch.manual_seed(seed)
        layer = pcdeq.PcDEQConv2d(1, "softsign", weight_norm=False, warm_start=False)
        with torch.no_grad():
            layer.operator.weight.copy_(torch.rand(1, 1, 3, 3) ** 3 * 10 ** float(torch.rand(()) * 2 - 1.5))
            x = torch.randn(16, 1, 6, 6) * 2 - 1
            with SURROUNDINGS[name]():
                box, equation = layer.enclose(x), layer.equation(x)
            linear = layer.operator.bind(equation.map.weight.double())
            exact = run(Equation(linear, layer.activation, equation.x.double()).problem(), EXACT).value
        assert box.certified.all()
        assert ((box.lower <= exact * (1 + 1e-11)) & (exact * (1 - 1e-11) <= box.upper)).all()


def test_the_trial_of_convolutions_tells_winograd_from_sums():
    assert not any(precision._rounds_too_much(size, plain_convolution) for size in (1, 3, 5))
    with full_precision():
        assert not any(map(precision._rounds_too_much, (1, 3, 5)))
    if torch.backends.nnpack.is_available():
        with without_onednn():
            assert precision._rounds_too_much(3)
            with full_precision():
                assert not precision._rounds_too_much(3)


OPTIONS = (
    {}, {"padding": 1}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}, {"padding": "same"},
    {"padding": "valid"}, {"groups": 2}, {"groups": 2, "padding": "same", "dilation": 3},
)  # fmt: skip


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_plain_convolutions_are_torchs(dims, options):
    torch.manual_seed(0)
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[dims - 1]
    x = torch.randn(2, 4, *(9, 8, 7)[:dims]).double()
    weight = torch.randn(6, 4 // options.get("groups", 1), *[3] * dims).double()
    bias = torch.randn(6).double()
    expected = convolve(x, weight, bias, **options)
    torch.testing.assert_close(plain_convolution(x, weight, bias, **options), expected)
    torch.testing.assert_close(plain_convolution(x[0], weight, **options), convolve(x[0], weight, **options))


def test_where_convolutions_are_not_plain_they_are_replaced(monkeypatch):
    """As on a GPU, whose algorithm nobody knows."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    seen = []
    monkeypatch.setattr(precision, "plain_convolution", lambda *a, **k: seen.append(a) or plain_convolution(*a, **k))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), pcdeq.PcDEQConv2d(2), nn.Flatten(), nn.Linear(2 * 36, 3)).eval()
    images = torch.randn(3, 1, 8, 8)
    certificate = pcdeq.certify(model, images)
    assert certificate.share == 1.0 and certificate.classes.equal(model(images).argmax(1))
    assert seen


def test_an_exports_bound_is_not_measured_under_autocast():
    model = pcdeq.build("pcdeq-1-l-tanh").eval()
    pixels = torch.rand(4, 1, 28, 28)
    plain = plan_export(model, steps=20, calibration=pixels).measured
    with SURROUNDINGS["autocast"]():
        assert plan_export(model, steps=20, calibration=pixels).measured == plain
