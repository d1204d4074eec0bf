"""The audit tells a sound layer from an unsound one, with numbers that are right."""

import pytest
import torch
from torch import nn

import pcdeq
from pcdeq.errors import UsageError


def test_a_sound_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), pcdeq.PcDEQLinear(5, "sigmoid"), pcdeq.PcDEQLinear(5, "tanh", floor=0.1))
    report = pcdeq.check(model, torch.randn(16, 6))
    assert report.holds
    assert [layer.name for layer in report.layers] == ["1", "2"]
    assert report.layers[0].rate == pytest.approx(0.2785, abs=1e-4)
    assert report.layers[1].rate == pytest.approx(0.6823, abs=1e-4)
    for layer in report.layers:
        assert layer.measured_rate < layer.rate
    assert report.to_dict()["layers"][1]["kind"] == 1


def test_norm_and_radius_are_those_of_the_matrix():
    layer = pcdeq.PcDEQLinear(6, weight_norm=False).double()
    with torch.no_grad():
        layer.operator.weight.uniform_(0, 2)
    (report,) = pcdeq.check(layer).layers
    weight = layer.operator.weight.detach()
    assert report.norm == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=1e-6)
    assert report.radius == pytest.approx(float(torch.linalg.eigvals(weight).abs().max()), rel=1e-6)
    assert not report.contraction


def test_dead_rows_and_negative_parameters_are_counted():
    layer = pcdeq.PcDEQLinear(4, weight_norm=False)
    with torch.no_grad():
        layer.operator.weight[2] = -1.0
    (report,) = pcdeq.check(layer).layers
    assert (report.dead_rows, report.negative) == (1, 4)
    assert report.holds  # they count as 0


@pytest.mark.parametrize(
    ("forced", "reason"), [(torch.nan, "NaN"), (torch.inf, "infinite"), (-1.0, "9 negative entries")]
)
def test_weights_forced_in_are_found(forced, reason, monkeypatch):
    layer = pcdeq.PcDEQLinear(3)
    monkeypatch.setattr(layer.operator, "effective_weight", lambda: torch.full((3, 3), forced))
    report = pcdeq.check(layer)
    assert not report.holds
    assert reason in report.layers[0].reason


def test_an_unsuited_activation_is_found(monkeypatch):
    layer = pcdeq.PcDEQLinear(3, pcdeq.Activation("mine", torch.tanh, supremum=1.0))
    object.__setattr__(layer.activation, "value", lambda y: y * y)
    report = pcdeq.check(layer)
    assert not report.holds
    assert "not concave" in report.layers[0].reason


def test_an_operator_that_is_not_nonnegative_is_found():
    class Minus(pcdeq.LinearMap):
        def apply(self, z):
            return -z @ self.weight.T

    class Wrong(pcdeq.Operator):
        def __init__(self):
            super().__init__((3, 3), state_ndim=1)

        def bind(self, weight):
            return Minus(weight)

    report = pcdeq.check(pcdeq.PcDEQ(Wrong(), "sigmoid"), torch.randn(4, 3))
    assert not report.holds
    assert "negative" in report.layers[0].reason


def test_a_model_without_layers():
    with pytest.raises(UsageError, match="no pcDEQ layer"):
        pcdeq.check(nn.Linear(2, 2))


def test_an_operator_of_the_users_without_inputs():
    class Scaled(pcdeq.LinearMap):
        def apply(self, z):
            return z * self.weight

        adjoint = apply

        def terms(self, state):
            return 1

    class Scale(pcdeq.Operator):
        def __init__(self):
            super().__init__((3, 5), state_ndim=2, weight_norm=False)

        def bind(self, weight):
            return Scaled(weight)

    layer = pcdeq.PcDEQ(Scale())
    with torch.no_grad():
        layer.operator.weight.fill_(2.0)
    report = pcdeq.check(layer)
    assert not report.holds
    assert "nothing is known about the operator Scale before it is tried" in report.layers[0].reason
    assert report.layers[0].norm != report.layers[0].norm  # NaN: nothing is known of its inputs
    assert str(report) == "model: FAILS: " + report.layers[0].reason
    tried = pcdeq.check(layer, torch.randn(4, 3, 5))
    assert tried.holds and tried.layers[0].norm == pytest.approx(2.0)
    assert tried.layers[0].reason.endswith("W >= 0, as the images of all 15 unit vectors show")


def test_what_is_no_network_is_refused():
    with pytest.raises(UsageError, match="not NoneType"):
        pcdeq.check(None)  # pyright: ignore[reportArgumentType]


class SubtractingMap(pcdeq.LinearMap):
    """A matrix of positive numbers, but for one entry."""

    def apply(self, z):
        return z @ self.weight.T - 0.5 * torch.nn.functional.pad(z[..., 3:4], (0, z.shape[-1] - 1))


class Subtracting(pcdeq.Operator):
    def __init__(self, features):
        super().__init__((features, features), state_ndim=1)

    def bind(self, weight):
        return SubtractingMap(weight)


@pytest.mark.filterwarnings("ignore::pcdeq.errors.ConvergenceWarning")
def test_one_negative_entry_of_an_operator_is_found_and_nothing_is_proved_with_it():
    layer, x = pcdeq.PcDEQ(Subtracting(40)), torch.randn(2, 40)
    assert not pcdeq.check(layer).holds
    report = pcdeq.check(layer, x)
    assert not report.holds and "to negative ones, down to -0." in report.layers[0].reason
    model = nn.Sequential(layer, nn.Linear(40, 2)).eval()
    for prove in (
        lambda: layer.enclose(x),
        lambda: layer.enclose(x, width=1e-6),
        lambda: layer.enclose_gradient(x, torch.ones_like(x)),
        lambda: layer.solve(x, solver=pcdeq.Certified()),
        lambda: pcdeq.certify(model, x),
    ):
        with pytest.raises(UsageError, match=r"negative ones, .* nothing can be proved with it"):
            prove()


def test_what_was_only_sampled_is_said():
    class Copies(pcdeq.LinearMap):
        def apply(self, z):
            return 0.5 * z

    class Copy(pcdeq.Operator):
        def __init__(self):
            super().__init__((1, 1), state_ndim=1)

        def bind(self, weight):
            return Copies(weight)

    (report,) = pcdeq.check(pcdeq.PcDEQ(Copy()), torch.randn(2, 4096)).layers
    assert report.holds
    assert report.reason.endswith("that W >= 0 was only sampled, on 256 of 4096 unit vectors and 4 random ones")
