"""One recogniser: of every kind of layer, all analyses agree with what the layer computes."""

from __future__ import annotations

import copy

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from visitors import RADIUS, VISITORS, Exported, conv, dense, deq, exported, noise, norm

import pcdeq
from pcdeq.export.graph import fixed_graph, loop_graph
from pcdeq.export.truncation import contractions, exact_logits, proved_error
from pcdeq.models import Clip
from pcdeq.models.average_pool import AvgPool2d
from pcdeq.models.batch_norm import BatchNorm2d
from pcdeq.proofs.intervals import Bounds, Box
from pcdeq.proofs.linear import Functional
from pcdeq.proofs.network import recognise
from pcdeq.proofs.rules import KINDS, Layer, bound, enclose, enlarge, kind, pull
from pcdeq.proofs.worst_case import worst_case_scores

IMAGE, ROW, SEQUENCE, VOLUME = (3, 6, 6), (5,), (4, 5), (2, 3, 4, 4)
# Of each class of modules that is known: layers of different options, with the shape of a sample that they take.
ZOO = {
    nn.Identity: [(nn.Identity, IMAGE)],
    nn.Dropout: [(lambda: nn.Dropout(0.3), IMAGE), (lambda: nn.Dropout(1.0, inplace=True), ROW)],
    nn.Dropout1d: [(nn.Dropout1d, SEQUENCE)],
    nn.Dropout2d: [(lambda: nn.Dropout2d(0.3, inplace=True), IMAGE)],
    nn.Dropout3d: [(nn.Dropout3d, VOLUME)],
    nn.ReLU: [(nn.ReLU, IMAGE), (lambda: nn.ReLU(inplace=True), ROW)],
    nn.LeakyReLU: [(nn.LeakyReLU, IMAGE), (lambda: nn.LeakyReLU(0.7, inplace=True), ROW)],
    nn.Hardtanh: [(nn.Hardtanh, ROW), (lambda: nn.Hardtanh(-0.1, 0.3, inplace=True), IMAGE)],
    nn.ReLU6: [(nn.ReLU6, IMAGE), (lambda: nn.ReLU6(inplace=True), ROW)],
    nn.Tanh: [(nn.Tanh, IMAGE)],
    nn.Sigmoid: [(nn.Sigmoid, ROW)],
    nn.MaxPool1d: [(lambda: nn.MaxPool1d(2), SEQUENCE), (lambda: nn.MaxPool1d(3, 1, 1), ROW)],
    nn.MaxPool3d: [(lambda: nn.MaxPool3d(2), VOLUME)],
    nn.MaxPool2d: [
        (lambda: nn.MaxPool2d(2), IMAGE),
        (lambda: nn.MaxPool2d(3, 2, 1, 2, ceil_mode=True), IMAGE),
        (lambda: nn.MaxPool2d(2), SEQUENCE),
    ],
    nn.AvgPool2d: [
        (lambda: nn.AvgPool2d(2), IMAGE),
        (lambda: nn.AvgPool2d((3, 2), 2, 1, ceil_mode=True), IMAGE),
        (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), IMAGE),
        (lambda: nn.AvgPool2d(2, divisor_override=3), IMAGE),
    ],
    AvgPool2d: [(lambda: AvgPool2d(2), IMAGE)],
    nn.AvgPool1d: [(lambda: nn.AvgPool1d(2), SEQUENCE), (lambda: nn.AvgPool1d(3, 2, 1), SEQUENCE)],
    nn.AvgPool3d: [(lambda: nn.AvgPool3d((3, 2, 2), 1, 1, divisor_override=5), VOLUME)],
    nn.AdaptiveAvgPool1d: [(lambda: nn.AdaptiveAvgPool1d(2), SEQUENCE), (lambda: nn.AdaptiveAvgPool1d(7), SEQUENCE)],
    nn.AdaptiveAvgPool2d: [
        (lambda: nn.AdaptiveAvgPool2d(1), IMAGE),
        (lambda: nn.AdaptiveAvgPool2d((4, None)), IMAGE),
        (lambda: nn.AdaptiveAvgPool2d((9, 2)), IMAGE),
        (lambda: nn.AdaptiveAvgPool2d(3), SEQUENCE),
    ],
    nn.AdaptiveAvgPool3d: [(lambda: nn.AdaptiveAvgPool3d((2, 3, 1)), VOLUME)],
    nn.ZeroPad1d: [(lambda: nn.ZeroPad1d((2, -1)), ROW)],
    nn.ZeroPad2d: [(lambda: nn.ZeroPad2d(2), IMAGE), (lambda: nn.ZeroPad2d((1, 0, -2, 3)), IMAGE)],
    nn.ZeroPad3d: [(lambda: nn.ZeroPad3d(1), VOLUME)],
    nn.Flatten: [(nn.Flatten, IMAGE), (lambda: nn.Flatten(2), IMAGE), (lambda: nn.Flatten(-2, -1), IMAGE)],
    nn.Unflatten: [(lambda: nn.Unflatten(1, (3, 1)), IMAGE), (lambda: nn.Unflatten(-1, (1, 5)), ROW)],
    nn.Linear: [
        (lambda: nn.Linear(5, 4), ROW),
        (lambda: nn.Linear(5, 3, bias=False), SEQUENCE),
        (lambda: nn.Linear(6, 2), IMAGE),
        (lambda: parametrizations.weight_norm(nn.Linear(5, 4)), ROW),
    ],
    nn.Conv2d: [
        (lambda: nn.Conv2d(3, 4, 3, padding=1), IMAGE),
        (lambda: nn.Conv2d(3, 6, (3, 2), stride=2, padding="valid", groups=3, bias=False), IMAGE),
        (lambda: nn.Conv2d(3, 2, 3, padding="same", dilation=2), IMAGE),
    ],
    nn.Conv1d: [(lambda: nn.Conv1d(4, 6, 3, 2, padding=2, dilation=2, groups=2), SEQUENCE)],
    nn.Conv3d: [(lambda: nn.Conv3d(2, 2, (1, 3, 1), padding="same"), VOLUME)],
    nn.BatchNorm1d: [
        (lambda: norm(nn.BatchNorm1d(5)), ROW),
        (lambda: norm(nn.BatchNorm1d(4)), SEQUENCE),
        (lambda: norm(nn.BatchNorm1d(5, affine=False)), ROW),
    ],
    nn.BatchNorm2d: [(lambda: norm(nn.BatchNorm2d(3)), IMAGE)],
    nn.BatchNorm3d: [(lambda: norm(nn.BatchNorm3d(2)), VOLUME)],
    BatchNorm2d: [(lambda: norm(BatchNorm2d(3)), IMAGE)],
    Clip: [(lambda: Clip(3), IMAGE), (lambda: clip((-0.1, -9.0, 0.5), (0.05, 0.1, 9.0)), IMAGE)],
    pcdeq.PcDEQ: [
        (dense, ROW),
        (lambda: dense(activation="softsign", floor=0.1), SEQUENCE),
        (conv, IMAGE),
        (lambda: deq(lambda **more: pcdeq.PcDEQConv1d(4, "relu6", **more)), SEQUENCE),
    ],
    # Containers are no kinds, but all of the above holds for them.
    pcdeq.Residual: [
        (lambda: pcdeq.Residual(nn.Linear(5, 5), nn.ReLU()), ROW),
        (lambda: pcdeq.Residual(norm(BatchNorm2d(3)), conv(), nn.Dropout(), nn.Conv2d(3, 3, 1)), IMAGE),
        (lambda: pcdeq.Residual(nn.Linear(5, 5), norm(nn.BatchNorm1d(5)), pcdeq.Residual(dense())), ROW),
    ],
    nn.Sequential: [(lambda: nn.Sequential(nn.Linear(5, 3), nn.Sequential(), nn.Linear(3, 5)), ROW)],
}
CASES = [(known, index) for known, cases in ZOO.items() for index in range(len(cases))]


def clip(*limits):
    """Of three channels, whose limits cut off one end of the boxes, both or none."""
    module = Clip(3)
    for buffer, numbers in zip((module.low, module.high), limits, strict=True):
        buffer.copy_(torch.tensor(numbers).view(3, 1, 1))
    return module


def case(known, index, dtype=torch.float64):
    make, shape = ZOO[known][index]
    torch.manual_seed(index)
    return make().to(dtype).eval(), torch.randn(6, *shape, dtype=dtype)


def test_every_known_class_is_in_the_zoo():
    assert set(KINDS) <= set(ZOO)


def test_a_kind_that_lacks_a_rule_is_an_error():
    class Half(Layer):
        def enclose(self, box, tol):
            return box

    with pytest.raises(TypeError, match="Half has no rule for bound, enlarge, pull"):
        kind(nn.GELU)(Half)
    assert nn.GELU not in KINDS


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(("known", "index"), CASES)
class TestEveryKind:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("radius", [0.0, RADIUS])
    def test_the_box_holds_what_is_computed(self, known, index, dtype, radius):
        module, x = case(known, index)
        x = x.to(dtype).double()  # so that the smaller box is about the same numbers
        box = enclose(recognise(module), Box.of(x.to(dtype), radius), 1e-6)
        assert box.proved.all()
        for seed in range(4):
            value = module(x + noise(x, seed, radius))
            slack = 1e-9 * (1 + value.abs())  # the referee's own
            assert box.lower.shape == value.shape
            assert ((box.lower.double() <= value + slack) & (value - slack <= box.upper.double())).all()
        if radius == 0:
            assert (box.upper - box.lower).max() < (1e-2 if dtype == torch.float32 else 1e-5)

    def test_the_bounds_of_the_loss_hold_what_is_computed(self, known, index):
        module, x = case(known, index)
        bounds = bound(recognise(module), Bounds(x, x - RADIUS, x + RADIUS))
        torch.testing.assert_close(bounds.clean, module(x.clone()), rtol=1e-8, atol=1e-8)
        for seed in range(4):
            value = module(x + noise(x, seed))
            assert ((bounds.lower - 1e-8 <= value) & (value <= bounds.upper + 1e-8)).all()

    @pytest.mark.parametrize("radius", [1e-3, RADIUS, 2.0])
    def test_a_functional_that_is_pulled_back_stays_below(self, known, index, radius):
        module, x = case(known, index)
        layers, box = recognise(module), Box.of(x, radius)
        boxes = [enclose(layers[:place], box, 1e-6) for place in range(len(layers))]
        value = module(x.clone())
        image = torch.arange(len(x)).repeat(3)  # of each sample three functionals
        wanted = Functional(
            torch.randn(len(image), *value.shape[1:], dtype=x.dtype), torch.randn(len(image)).double(), image
        )
        found = pull(layers, wanted, boxes)
        gaps = []
        for seed in range(6):
            near = x + noise(x, seed, radius)
            above = (wanted.coefficient * module(near.clone())[image]).flatten(1).sum(1) + wanted.constant
            below = (found.coefficient * near[image]).flatten(1).sum(1) + found.constant
            assert (below <= above + 1e-9 * (1 + above.abs())).all()  # the referee's own rounding
            gaps.append(above - below)
        assert torch.stack(gaps).min() < 10 * radius  # it is a bound, not a number far below

    def test_frozen_and_exported_it_computes_the_same(self, known, index):
        module, x = case(known, index)
        expected = module(x.clone())
        frozen = nn.Sequential(*(layer.freeze() for layer in recognise(module)))
        exported = nn.Sequential(*(layer.export(copy.deepcopy) for layer in recognise(module)))
        for made in (frozen, exported):
            torch.testing.assert_close(made(x.clone()), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(module(x.clone()), expected)
        types = {type(part) for part in exported.modules()}
        assert BatchNorm2d not in types and not any(map(parametrize.is_parametrized, exported.modules()))


def has_equilibria(module):
    return any(isinstance(part, pcdeq.PcDEQ) for part in module.modules())


# The errors of equilibria are those of a truncation: below, and in tests/export/test_truncation.py.
@pytest.mark.parametrize(("known", "index"), [pair for pair in CASES if not has_equilibria(case(*pair)[0])])
def test_errors_grow_no_more_than_is_said(known, index):
    module, x = case(known, index)
    for seed in range(4):
        error = noise(x, seed)
        found = (module(x + error) - module(x.clone())).abs()
        assert (found <= enlarge(recognise(module), error.abs(), iter(())) + 1e-12).all()


# What can follow a tensor of so many dimensions, keeping the number of features, or of channels.
STEPS = {
    2: [
        lambda: nn.Linear(5, 5),
        lambda: parametrizations.orthogonal(nn.Linear(5, 5)),
        lambda: norm(nn.BatchNorm1d(5)),
        nn.ReLU,
        nn.LeakyReLU,
        nn.ReLU6,
        nn.Tanh,
        nn.Dropout,
        nn.Identity,
        dense,
        lambda: dense(activation="sigmoid"),
    ],
    4: [
        lambda: nn.Conv2d(3, 3, 3, padding=1),
        lambda: nn.Conv2d(3, 3, 1),
        lambda: norm(nn.BatchNorm2d(3)),
        lambda: norm(BatchNorm2d(3)),
        lambda: nn.AvgPool2d(1),
        lambda: nn.AdaptiveAvgPool2d(6),
        lambda: clip((-0.5, -1.0, 0.0), (0.5, 0.2, 1.0)),
        lambda: nn.MaxPool2d(3, stride=1, padding=1),
        nn.ReLU,
        nn.Hardtanh,
        nn.Sigmoid,
        nn.Dropout2d,
        conv,
        lambda: nn.Linear(6, 6),
    ],
}


@st.composite
def networks(draw):
    """Random layers in line, some in nested containers and residual branches, some used twice, and a classifier."""
    rank = draw(st.sampled_from([2, 4]))
    torch.manual_seed(draw(st.integers(0, 10**6)))
    layers = [make() for make in draw(st.lists(st.sampled_from(STEPS[rank]), max_size=5))]
    if layers and draw(st.booleans()):
        layers.append(draw(st.sampled_from(layers)))
    start = draw(st.integers(0, len(layers)))
    stop = draw(st.integers(start, len(layers)))
    container = draw(st.sampled_from([pcdeq.Residual, nn.Sequential, None]))
    if container is not None:
        layers[start:stop] = [container(*layers[start:stop])]
    if rank == 4:
        pool = draw(st.sampled_from([nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(3)]))
        layers += [pool, nn.Flatten(), nn.Linear(3 * 3 * 3, 5)]
    elif draw(st.booleans()):
        layers.insert(0, nn.Flatten())
    layers.append(nn.Linear(5, 3))
    shape = ROW if rank == 2 else IMAGE
    return nn.Sequential(*layers).double().eval(), torch.randn(4, *shape, dtype=torch.float64)


@hypothesis.given(networks())
def test_all_visitors_agree_with_a_network_of_the_zoo(drawn):
    model, x = drawn
    with torch.no_grad():
        for visitor in VISITORS:
            if visitor is exported and not has_equilibria(model):
                continue
            visitor(model, x, model(x.clone()))


@hypothesis.given(st.sampled_from([1, 2, 5]), st.integers(0, 10**6), st.booleans())
def test_the_error_of_truncated_residual_networks(steps, seed, in_loops):
    torch.manual_seed(seed)
    block = pcdeq.Residual(norm(BatchNorm2d(3)), conv(), nn.Conv2d(3, 3, 1))
    layers = {"one": block, "two": pcdeq.Residual(conv(activation="tanh", floor=0.2)), "pool": nn.AvgPool2d(2)}
    layers |= {"flat": nn.Flatten(), "classifier": nn.Linear(27, 3)}
    model, pixels = Exported.of(layers, IMAGE).eval(), torch.rand(5, *IMAGE)
    graph = loop_graph(model, 0.1**steps, 500) if in_loops else fixed_graph(model, (steps, steps + 1))
    rates = contractions(graph)
    output = graph.double()(pixels.double())
    logits = output[0] if in_loops else output
    error = float((logits - exact_logits(model, pixels)).abs().max())
    assert 0 < error <= proved_error(graph, rates) < 1e3


class TestTrainingMode:
    """The certified loss, which is for training, takes the mode that layers are in."""

    def test_dropout_drops_the_same_of_the_bounds(self):
        model, x = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double(), torch.randn(4, 5).double()
        labels = torch.tensor([0, 1, 2, 0])
        torch.manual_seed(1)
        scores, worst = worst_case_scores(model, x, labels, RADIUS)
        torch.manual_seed(1)
        mask = F.dropout(torch.ones(4, 8, dtype=x.dtype), 0.5)
        assert 0 < (mask == 0).sum() < mask.numel()
        for seed in range(10):
            found = model[2](mask * model[0](x + noise(x, seed)))
            assert (found - found.gather(1, labels[:, None]) <= worst + 1e-9).all()
        torch.testing.assert_close(scores, model[2](mask * model[0](x)))

    def test_a_batch_norm_used_twice_learns_twice(self):
        norm = nn.BatchNorm1d(5)
        model = nn.Sequential(norm, nn.Linear(5, 5), norm, nn.Linear(5, 3)).double()
        twin, x = copy.deepcopy(model), torch.randn(6, 5).double()
        scores, _ = worst_case_scores(model, x, torch.zeros(6).long(), RADIUS)
        torch.testing.assert_close(scores, twin(x))
        torch.testing.assert_close(model[0].running_var, twin[0].running_var)
        assert model[0].num_batches_tracked == 2

    def test_a_parametrised_weight_is_made_once(self):
        model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 5)), nn.ReLU(), nn.Linear(5, 3)).double()
        twin, x, labels = copy.deepcopy(model), torch.randn(6, 5).double(), torch.zeros(6).long()
        scores, worst = worst_case_scores(model, x, labels, RADIUS)
        torch.testing.assert_close(scores, twin(x))
        torch.testing.assert_close(model.state_dict(), twin.state_dict())
        F.cross_entropy(worst, labels).backward()
        assert model[0].parametrizations.weight.original.grad.abs().max() > 0


def test_containers_are_walked_through_and_paths_are_names():
    shared = nn.Linear(5, 5)
    branch = pcdeq.Residual(shared, nn.Sequential(nn.ReLU(), shared))
    layers = recognise(nn.Sequential(shared, nn.Sequential(branch), nn.Linear(5, 3)))
    assert [(layer.path, type(layer).__name__) for layer in layers] == [
        ("0", "Linear"), ("1.0", "Residual"), ("2", "Linear")
    ]  # fmt: skip
    assert [layer.path for layer in layers[1].layers] == ["1.0.0", "1.0.1.0", "1.0.1.1"]
    assert layers[0].module is layers[1].layers[0].module is layers[1].layers[2].module
