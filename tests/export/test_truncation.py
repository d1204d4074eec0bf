"""The bounds on truncation: they hold, they are of use, and they are told from measurements."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from pcdeq.errors import PcdeqError, UsageError
from pcdeq.export.graph import fixed_graph, loop_graph
from pcdeq.export.program import plan_export
from pcdeq.export.truncation import contractions, exact_logits, measured_error, proved_error
from pcdeq.models import MC, SC, L

SHAPE = (1, 20, 20)
PROVABLE = [
    {"activation": "sigmoid"},
    {"activation": "hard-sigmoid"},
    {"activation": "tanh", "floor": 0.1},
    {"activation": "softsign", "floor": 0.05},
    {"activation": "relu6", "floor": 0.5},
]


def network(kind, channels, weight=1.0, seed=0, **options):
    """Equilibrium layers whose rows of W sum to about ``weight``, and batch norms that scale both up and down."""
    torch.manual_seed(seed)
    model = kind(channels, SHAPE, 3, **options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight_g"):
                parameter.fill_(weight / math.sqrt(parameter.shape[0]))
            elif name.endswith("_norm.weight"):
                parameter.uniform_(-2, 2)
    return model


def error_of(graph, model, pixels):
    outputs = graph.double()(pixels.double())
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    return float((logits - exact_logits(model, pixels)).abs().max())


@hypothesis.given(
    st.sampled_from(PROVABLE), st.sampled_from([0.1, 1.0, 30.0]), st.integers(1, 6), st.integers(0, 10**6)
)
def test_the_bound_of_a_fixed_depth_holds(options, weight, steps, seed):
    model = network(L, (6,), weight, seed, **options)
    graph, pixels = fixed_graph(model, (steps,)), torch.rand(8, *SHAPE)
    assert error_of(graph, model, pixels) <= proved_error(graph, contractions(graph))


@pytest.mark.parametrize("weight", [0.3, 10.0])
@pytest.mark.parametrize("options", PROVABLE)
@pytest.mark.parametrize(("kind", "channels"), [(SC, (3,)), (MC, (2, 3, 4))])
def test_it_holds_through_several_layers(kind, channels, options, weight):
    model, pixels = network(kind, channels, weight, **options), torch.rand(4, *SHAPE)
    exact = exact_logits(model, pixels)
    for steps in [(1, 1, 1), (3, 6, 2), (9, 2, 7), (8, 9, 10)]:
        graph = fixed_graph(model, steps[: len(channels)])
        outputs = graph.double()(pixels.double())
        assert float((outputs - exact).abs().max()) <= proved_error(graph, contractions(graph))


@hypothesis.given(st.sampled_from(PROVABLE), st.sampled_from([1.0, 30.0]), st.sampled_from([1e-1, 1e-2, 1e-4]))
def test_the_bound_of_a_loop_holds(options, weight, tol):
    model = network(L, (6,), weight, **options)
    graph, pixels = loop_graph(model, tol, 1000), torch.rand(8, *SHAPE)
    assert error_of(graph, model, pixels) <= proved_error(graph, contractions(graph))


def test_the_bound_is_nearly_reached():
    # s = relu6 with a floor of 1/2: one unit, W = 1 and x = 1/2 grow by 1/2 a step up to 6, as slowly as T4 allows.
    model = network(L, (1,), activation="relu6", floor=0.5)
    with torch.no_grad():
        model.deq.operator.weight_g.fill_(1.0)
        model.lift_norm.weight.zero_()
        model.lift_norm.bias.fill_(-100.0)
    graph = fixed_graph(model, (2,))
    assert 0.5 < error_of(graph, model, torch.rand(1, *SHAPE)) / proved_error(graph, contractions(graph)) <= 1


@pytest.mark.parametrize("error", [1e-1, 1e-4])
@pytest.mark.parametrize(("kind", "channels"), [(L, (6,)), (MC, (2, 3, 4))])
def test_no_more_steps_than_needed(kind, channels, error):
    model = network(kind, channels, activation="sigmoid")
    plan = plan_export(model, error=error)
    assert plan.proved and plan.error <= error
    fewer = tuple(steps - 1 for steps in plan.steps)
    rates = contractions(plan.graph)
    assert proved_error(fixed_graph(model, fewer), rates) > error
    assert error_of(plan.graph, model, torch.rand(8, *SHAPE)) <= plan.error


class TestMeasured:
    def test_nothing_is_proved_without_a_floor(self):
        model = network(L, (6,), activation="tanh")
        assert contractions(fixed_graph(model, (3,))) is None
        with pytest.raises(UsageError, match="calibration"):
            plan_export(model)

    @pytest.mark.parametrize("activation", ["tanh", "log1p"])
    def test_the_number_of_images_is_told(self, activation):
        model, pixels = network(L, (6,), activation=activation), torch.rand(20, *SHAPE)
        plan = plan_export(model, error=1e-3, calibration=pixels)
        assert (plan.proved, plan.basis, plan.error) == (False, "measured on 20 images", 1e-3)
        exact = exact_logits(model, pixels)
        assert plan.measured == measured_error(plan.graph, pixels, exact) <= 5e-4
        loop = plan_export(model, "loop", tol=1e-3, calibration=pixels)
        assert loop.basis == "measured on 20 images" and 0 < 2 * loop.measured == loop.error

    def test_an_injection_of_ones_own_is_not_proved_behind_another_layer(self):
        model = network(MC, (2, 3, 4), activation="sigmoid", injection=lambda x: 100 * x.relu())
        assert contractions(fixed_graph(model, (3, 3, 3))) is None

    def test_depth_without_end_is_refused(self):
        model = network(L, (6,), activation="tanh")
        with pytest.raises(PcdeqError, match="loop"):
            plan_export(model, error=1e-9, calibration=torch.rand(4, *SHAPE))

    def test_nan_is_no_small_error(self):
        model = network(L, (6,), activation="tanh")
        model.lift.weight.data[0, 0] = torch.nan
        with pytest.raises(PcdeqError, match="NaN"), pytest.warns(UserWarning):
            plan_export(model, steps=3, calibration=torch.rand(4, *SHAPE))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"error": 0.0}, "error must be above 0"),
        ({"error": math.nan}, "error must be above 0"),
        ({"steps": 0}, "steps must be from 1"),
        ({"form": "loop", "tol": -1.0}, "tol must be between"),
        ({"form": "loop", "max_steps": 0}, "max_steps must be at least 1"),
        ({"form": "spiral"}, "fixed"),
        ({"calibration": torch.rand(3, 1, 28, 28)}, r"\(n, 1, 20, 20\)"),
        ({"calibration": torch.rand(0, 1, 20, 20)}, "calibration images"),
    ],
)
def test_bad_numbers_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        plan_export(network(L, (6,), activation="sigmoid"), **options)
