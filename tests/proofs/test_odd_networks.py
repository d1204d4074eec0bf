"""Modules that are not what they are called: every analysis of a network refuses them by name, or is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from visitors import EXACT, VISITORS, conv, dense, exported, frozen, loss, norm

import pcdeq
from pcdeq.errors import UsageError
from pcdeq.proofs.network import recognise
from pcdeq.proofs.trusted import require_known_layer


class Plus(nn.Sequential):
    def forward(self, input):
        return input + super().forward(input)


class Backwards(nn.Sequential):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Called(nn.Linear):
    def __call__(self, input):
        return 2 * super().__call__(input)


class _AfterAll(nn.Module):
    def _call_impl(self, *args, **kwargs):
        return 2 * super()._call_impl(*args, **kwargs)

    __call__ = _call_impl


class Mixed(nn.Linear, _AfterAll):
    """Overrides a method without standing before the known class."""


class Shifted(pcdeq.PcDEQLinear):
    def forward(self, x):
        return super().forward(x) - 1


class OtherInput(pcdeq.PcDEQLinear):
    def inject(self, x):
        return (-x).relu() + 0.1


class OtherWeight(pcdeq.operators.Dense):
    def effective_weight(self):
        return -super().effective_weight()


class Halved(pcdeq.operators.Dense):
    def effective_weight(self):
        return super().effective_weight() / 2


class Renamed(pcdeq.PcDEQLinear):
    """A subclass that changes nothing."""

    def __init__(self, features):
        super().__init__(features, solver=EXACT)
        self.note = "mine"

    def told(self):
        return self.note


class Tied(nn.Linear):
    """Its weight is made from another tensor, whenever it is asked for."""

    weight = property(lambda self: 2 * self.root)

    @classmethod
    def of(cls, module):
        module.root = nn.Parameter(module.weight.detach() / 2)
        del module.weight
        module.__class__ = cls
        return module


class Absolute(nn.Module):
    def forward(self, x):
        return x.abs()


def lines(*middle, features=5):
    return nn.Sequential(nn.Linear(5, features), *middle, nn.Linear(features, 3))


def hooked(register, hook):
    model = lines(nn.ReLU(), dense())
    getattr(model[1], register)(hook)
    return model


def on_instance(module, name, value):
    setattr(module, name, value)
    return module


def parametrised(module, name, change):
    class Changed(nn.Module):
        def forward(self, tensor):
            return change(tensor)

    parametrize.register_parametrization(module, name, Changed())
    return module


def old_weight_norm(module):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return torch.nn.utils.weight_norm(module)


# What is false if it is taken for what it is called: how proofs name it, and what they say.
FALSE = {
    "0 (Plus): its forward is overridden": lambda: nn.Sequential(Plus(nn.Linear(5, 5)), dense(), nn.Linear(5, 3)),
    "model (Plus): its forward is overridden": lambda: Plus(nn.Linear(5, 5), dense(), nn.Linear(5, 5)),
    "model (Sequential): its forward is set on the instance": lambda: on_instance(
        lines(dense()), "forward", lambda x: x[:, :3]
    ),
    "1 (Backwards): its __iter__ is overridden": lambda: lines(Backwards(nn.ReLU(), nn.Linear(5, 5)), dense()),
    "1 (Doubled): its forward is overridden": lambda: lines(Doubled(5, 5), dense()),
    "1 (Called): its __call__ is overridden": lambda: lines(Called(5, 5), dense()),
    "1 (Mixed): its _call_impl is overridden": lambda: lines(Mixed(5, 5), dense()),
    "1.1 (Doubled): its forward is overridden": lambda: lines(nn.Sequential(nn.ReLU(), Doubled(5, 5)), dense()),
    "1.0 (Absolute): nothing is known about": lambda: lines(pcdeq.Residual(Absolute()), dense()),
    "1 (ReLU): its forward is set on the instance": lambda: lines(
        on_instance(nn.ReLU(), "forward", torch.abs), dense()
    ),
    "1 (ReLU): its _compiled_call_impl is not its own": lambda: lines(
        on_instance(nn.ReLU(), "_compiled_call_impl", torch.abs), dense()
    ),
    "1 (Shifted): its forward is overridden": lambda: lines(Shifted(5, solver=EXACT)),
    "1 (OtherInput): its inject is overridden": lambda: lines(OtherInput(5, solver=EXACT)),
    "1 (PcDEQLinear): its inject is set on the instance": lambda: lines(
        on_instance(dense(), "inject", lambda x: (-x).relu() + 1)
    ),
    "1 (PcDEQLinear): it has an injection of your own": lambda: lines(dense(injection=lambda x: (-x).relu())),
    "1 (PcDEQ): of its operator OtherWeight effective_weight is overridden": lambda: lines(
        pcdeq.PcDEQ(OtherWeight(5, weight_norm=False), "sigmoid", solver=EXACT)
    ),
    "1 (PcDEQLinear): of its operator Dense effective_weight is set on the instance": lambda: lines(
        with_weight(dense(activation="sigmoid"))
    ),
    "1 (PcDEQLinear): its floor is 0.0": lambda: lines(on_instance(dense(), "floor", 0.0)),
    "1 (ReLU): it has a forward hook": lambda: hooked("register_forward_hook", lambda *given: -given[-1]),
    "1 (ReLU): it has a forward pre hook": lambda: hooked("register_forward_pre_hook", lambda _, given: (-given[0],)),
    "1 (ReLU): it has a backward hook": lambda: hooked("register_full_backward_hook", lambda *_: None),
    "1 (ReLU): it has a backward pre hook": lambda: hooked("register_full_backward_pre_hook", lambda *_: None),
    "1 (Linear): torch.nn.utils.weight_norm works by a forward pre hook": lambda: lines(
        old_weight_norm(nn.Linear(5, 5)), dense()
    ),
    "1.0 (ReLU): it works in place": lambda: lines(pcdeq.Residual(nn.ReLU(inplace=True), nn.Linear(5, 5)), dense()),
    "1.1.0 (ReLU): it works in place": lambda: lines(
        pcdeq.Residual(nn.Identity(), nn.Sequential(nn.ReLU(inplace=True))), dense()
    ),
}
# The same of images, (3, 6, 6).
FALSE_OF_IMAGES = {
    "0 (AvgPool2d): its divisor_override is -4": lambda: pictures(nn.AvgPool2d(2, divisor_override=-4)),
    "0 (Conv2d): it is padded by 'reflect'": lambda: pictures(nn.Conv2d(3, 3, 3, 2, 1, padding_mode="reflect")),
    "0 (MaxPool2d): its forward is set on the instance": lambda: pictures(
        on_instance(nn.MaxPool2d(2), "forward", lambda x: nn.functional.max_pool2d(-x, 2))
    ),
}


def pictures(*layers):
    """Layers that halve images of 6 x 6, and what follows."""
    return nn.Sequential(*layers, conv(), nn.Flatten(), nn.Linear(27, 3))


def rows(*layers):
    """Layers that leave 8 numbers of a sample, and what follows."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 5), dense(), nn.Linear(5, 3))


def with_weight(layer):
    layer.operator.effective_weight = lambda: torch.eye(5, dtype=torch.float64)
    return layer


def visit(visitor, make, shape=(5,)):
    torch.manual_seed(0)
    model, x = make().double().eval(), torch.randn(20, *shape, dtype=torch.float64)
    given = x.clone()
    with torch.no_grad():
        visitor(model, x, model(x.clone()))
    assert torch.equal(x, given)


@pytest.mark.parametrize(
    ("name", "shape"), [(name, (5,)) for name in FALSE] + [(n, (3, 6, 6)) for n in FALSE_OF_IMAGES]
)
@pytest.mark.parametrize("visitor", VISITORS)
def test_what_is_not_what_it_is_called_is_refused_by_name(name, shape, visitor):
    make = (FALSE | FALSE_OF_IMAGES)[name]
    if visitor in (frozen, exported):
        # What is not known stays as it is, so that these may be right; if they are not, they refuse.
        try:
            visit(visitor, make, shape)
        except UsageError as error:
            assert name.split(" ", 1)[1] in str(error)
    else:
        with pytest.raises(UsageError) as caught:
            visit(visitor, make, shape)
        assert str(caught.value).startswith(name)
        assert "\n" not in str(caught.value)


# What looks odd and is honest, with the shape of a sample.
HONEST = {
    "a subclass that changes nothing": (lambda: lines(Renamed(5)), (5,)),
    "a weight that is a property": (lambda: lines(Tied.of(nn.Linear(5, 5)), dense()), (5,)),
    "weight norm": (lambda: lines(parametrizations.weight_norm(nn.Linear(5, 5)), dense()), (5,)),
    "spectral norm": (lambda: lines(parametrizations.spectral_norm(nn.Linear(5, 5)), dense()), (5,)),
    "a parametrised bias": (lambda: lines(parametrised(nn.Linear(5, 5), "bias", torch.exp), dense()), (5,)),
    "a parametrised classifier": (
        lambda: nn.Sequential(dense(), parametrised(nn.Linear(5, 3), "weight", torch.sin)), (5,)
    ),
    "a parametrised batch norm": (
        lambda: nn.Sequential(nn.Flatten(), parametrised(norm(nn.BatchNorm1d(5)), "weight", torch.sin), lines(dense())),
        (5,),
    ),
    "a parametrised operator": (lambda: lines(parametrised_operator(dense())), (5,)),
    "in place": (lambda: lines(nn.ReLU(inplace=True), dense()), (5,)),
    "first of all in place": (lambda: nn.Sequential(nn.ReLU(inplace=True), lines(dense())), (5,)),
    "a linear layer used twice": (lambda: twice(nn.Linear(5, 5)), (5,)),
    "a batch norm used twice": (lambda: batch_norm_twice(), (5,)),
    "an equilibrium layer used twice": (lambda: twice(dense()), (5,)),
    "weights that are tied": (lambda: tied(), (5,)),
    "batch norm behind a linear layer on sequences": (
        lambda: nn.Sequential(nn.Linear(5, 5), norm(nn.BatchNorm1d(5)), dense(), nn.Flatten(), nn.Linear(25, 3)), (5, 5)
    ),
    "batch norm before a linear layer on sequences": (
        lambda: nn.Sequential(norm(nn.BatchNorm1d(5)), nn.Linear(5, 5), dense(), nn.Flatten(), nn.Linear(25, 3)), (5, 5)
    ),
    "batch norm, Flatten(2) and a linear layer": (
        lambda: nn.Sequential(
            norm(nn.BatchNorm2d(3)), nn.Flatten(2), nn.Linear(36, 6), dense(6), nn.Flatten(), nn.Linear(18, 3)
        ), (3, 6, 6),
    ),
    "batch norm, Flatten(1, 2) and a linear layer": (
        lambda: nn.Sequential(
            norm(nn.BatchNorm2d(3)), nn.Flatten(1, 2), nn.Linear(6, 6), dense(6), nn.Flatten(), nn.Linear(108, 3)
        ), (3, 6, 6),
    ),
    "batch norm before a linear layer on the last dimension of images": (
        lambda: nn.Sequential(norm(nn.BatchNorm2d(3)), nn.Linear(6, 6), conv(), nn.Flatten(), nn.Linear(108, 3)),
        (3, 6, 6),
    ),
    "batch norm before a padded convolution": (
        lambda: pictures(norm(nn.BatchNorm2d(3)), nn.Conv2d(3, 3, 3, 2, 1)), (3, 6, 6)
    ),
    "batch norm before a grouped convolution": (
        lambda: pictures(norm(nn.BatchNorm2d(3)), nn.Conv2d(3, 3, 2, 2, groups=3)), (3, 6, 6)
    ),
    "batch norms in a row": (
        lambda: pictures(nn.Conv2d(3, 3, 2, 2), norm(nn.BatchNorm2d(3)), norm(nn.BatchNorm2d(3))), (3, 6, 6)
    ),
    "batch norms in a row, before": (
        lambda: pictures(norm(nn.BatchNorm2d(3)), norm(nn.BatchNorm2d(3)), nn.Conv2d(3, 3, 2, 2)), (3, 6, 6)
    ),
    "batch norm, averages that do not sum up to 1 and a convolution": (
        lambda: pictures(norm(nn.BatchNorm2d(3)), nn.AvgPool2d(2, divisor_override=3), nn.Conv2d(3, 3, 1)), (3, 6, 6)
    ),
    "batch norm, averages, dropout, flatten": (
        lambda: nn.Sequential(
            conv(), norm(nn.BatchNorm2d(3)), nn.AvgPool2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(27, 3)
        ), (3, 6, 6),
    ),
    "batch norm, adaptive averages, flatten": (
        lambda: nn.Sequential(
            conv(), norm(nn.BatchNorm2d(3)), nn.AdaptiveAvgPool2d((4, 2)), nn.Flatten(), nn.Linear(24, 3)
        ),
        (3, 6, 6),
    ),
    "averages across what a batch norm calls channels": (
        lambda: rows(norm(nn.BatchNorm1d(4)), nn.AvgPool2d(2)), (4, 8)
    ),
    "adaptive averages across what a batch norm calls channels": (
        lambda: rows(norm(nn.BatchNorm1d(4)), nn.AdaptiveAvgPool2d((2, 4))), (4, 8)
    ),
    "names with dots between them": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 5)), nn.Sequential(nn.ReLU(), dense()), nn.Linear(5, 3)), (5,)
    ),
}  # fmt: skip


def parametrised_operator(layer):
    parametrised(layer.operator, "weight_g", torch.sigmoid)
    return layer


def twice(module):
    return nn.Sequential(nn.Flatten(), module, norm(nn.BatchNorm1d(5)), module, dense(), nn.Linear(5, 3))


def batch_norm_twice():
    shared = norm(nn.BatchNorm1d(5))
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 5), shared, dense(), shared, nn.Linear(5, 3))


def tied():
    model = nn.Sequential(nn.Flatten(), norm(nn.BatchNorm1d(5)), nn.Linear(5, 5), dense(), nn.Linear(5, 5), lines())
    model[4].weight = model[2].weight
    return model


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("visitor", VISITORS)
def test_what_only_looks_odd_is_right(name, visitor):
    visit(visitor, *HONEST[name])


def test_every_batch_norm_that_can_be_folded_is():
    for name in (
        "batch norms in a row",
        "batch norms in a row, before",
        "batch norm, averages, dropout, flatten",
        "batch norm, adaptive averages, flatten",
    ):
        frozen_network = pcdeq.freeze(HONEST[name][0]().eval())
        assert not any(isinstance(part, nn.BatchNorm2d) for part in frozen_network.modules())
    for make in (batch_norm_twice, lambda: twice(nn.Linear(5, 5)), tied):
        assert not any(isinstance(part, nn.BatchNorm1d) for part in pcdeq.freeze(make().eval()).modules())


def test_a_batch_norm_of_volumes_is_folded():
    def make():
        return rows(norm(nn.BatchNorm3d(2)), nn.Conv3d(2, 1, 1))

    visit(frozen, make, (2, 2, 2, 2))
    assert not any(isinstance(part, nn.BatchNorm3d) for part in pcdeq.freeze(make().eval()).modules())


class TestTrainingMode:
    @pytest.mark.parametrize("module", [nn.Dropout(0.5), norm(nn.BatchNorm1d(5))])
    @pytest.mark.parametrize("visitor", [visitor for visitor in VISITORS if visitor is not loss])
    def test_a_child_in_training_mode_is_refused(self, module, visitor):
        model, x = lines(nn.Sequential(module), dense()).eval(), torch.randn(20, 5)
        module.train()
        with pytest.raises(UsageError, match=rf"1\.0 \({type(module).__name__}\): it is in training mode") as caught:
            visitor(model, x, None)
        assert "eval()" in str(caught.value)

    def test_a_weight_that_changes_with_the_mode_is_refused(self):
        model = lines(parametrizations.spectral_norm(nn.Linear(5, 5))).eval()
        model[1].train()
        for act in (lambda: pcdeq.certify(model, torch.randn(2, 5)), lambda: pcdeq.freeze(model)):
            with pytest.raises(UsageError, match=r"1 \(ParametrizedLinear\): it is in training mode"):
                act()

    def test_a_network_in_training_mode_is_frozen_as_in_evaluation(self):
        model = lines(nn.Dropout(0.5), norm(nn.BatchNorm1d(5)), parametrizations.spectral_norm(nn.Linear(5, 5)))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        x = torch.randn(4, 5)
        found = pcdeq.freeze(model.train())(x)
        assert all(module.training for module in model.modules())
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        torch.testing.assert_close(found, model.eval()(x))

    def test_a_network_that_cannot_be_copied_is_named(self):
        with pytest.raises(UsageError, match=r"1 \(Linear\): .* use torch.nn.utils.parametrizations.weight_norm"):
            pcdeq.freeze(lines(old_weight_norm(nn.Linear(5, 5))).train())

    def test_batch_norm_without_running_statistics(self):
        model = lines(nn.BatchNorm1d(5, track_running_stats=False), dense()).double().eval()
        x = torch.randn(6, 5).double()
        with torch.no_grad():
            frozen(model, x, model(x))
            scores, _ = pcdeq.proofs.worst_case.worst_case_scores(model, x, torch.zeros(6).long(), 0.1)
            torch.testing.assert_close(scores, model(x))
        with pytest.raises(UsageError, match=r"1 \(BatchNorm1d\): what it computes depends on the batch"):
            pcdeq.certify(model, x)


@pytest.fixture(params=["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def global_hook(request):
    handle = getattr(nn.modules.module, f"register_module_{request.param}")(lambda *_: None)
    yield
    handle.remove()


@pytest.mark.usefixtures("global_hook")
@pytest.mark.parametrize("visitor", VISITORS)
def test_global_hooks_are_refused(visitor):
    with pytest.raises(UsageError, match=r"a global (for|back)ward .*hook is set"):
        visit(visitor, lambda: lines(dense()))


def test_a_class_of_torch_s_that_was_changed_is_refused(monkeypatch):
    model = lines(dense()).eval()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: -nn.functional.linear(x, self.weight))
    with pytest.raises(UsageError, match=r"0 \(Linear\): its forward is overridden"):
        pcdeq.certify(model, torch.randn(2, 5))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of dynamo itself
def test_what_torch_compiles_is_what_it_was():
    model = lines(dense()).eval()
    model.compile(backend="eager")
    model[0].compile(backend="eager")
    assert pcdeq.certify(model, torch.randn(4, 5)).share == 1.0


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (nn.Sequential(nn.Flatten(0), nn.Linear(5, 2)), (5,), r"0 \(Flatten\): it puts the samples"),
        (nn.Sequential(nn.Linear(5, 5), nn.Flatten(-2), nn.Linear(5, 2)), (5,), r"1 \(Flatten\): it puts the samples"),
        (nn.Sequential(nn.Linear(5, 2)), (4, 5), r"0 \(Linear\): the classifier's input must be \(n, features\)"),
        (nn.Sequential(pcdeq.Residual(nn.Linear(5, 1)), nn.Linear(5, 2)), (5,), r"map shape \(1, 5\) to \(1, 1\)"),
        (nn.Sequential(nn.MaxPool2d(2, return_indices=True), nn.Linear(5, 2)), (5,), r"return_indices"),
        (
            nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(25, 2)),
            (5, 5),
            r"0 \(Conv2d\): .* batch of images",
        ),
        (nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(5, 2)), (5,), r"0 \(Conv1d\): .* batch of rows"),
        (nn.Sequential(nn.Unflatten(0, (1, 1)), nn.Linear(5, 2)), (5,), r"0 \(Unflatten\): .* of the samples"),
        (nn.Sequential(nn.Unflatten(-2, (1, 1)), nn.Linear(5, 2)), (5,), r"0 \(Unflatten\): .* of the samples"),
        (nn.Sequential(nn.ZeroPad2d(1), nn.Linear(7, 2)), (5,), r"0 \(ZeroPad2d\): it would pad the samples"),
    ],
)
def test_samples_stay_apart(model, shape, message):
    with pytest.raises(UsageError, match=message):
        pcdeq.certify(model.eval(), torch.randn(1, *shape))


class TestLayers:
    """`check` and `enclose_gradient` know a layer by the same rules."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Shifted(5),
            lambda: OtherInput(5),
            lambda: on_instance(pcdeq.PcDEQLinear(5), "equation", lambda x: None),
            lambda: pcdeq.PcDEQ(Halved(5)),
        ],
    )
    def test_overridden_parts(self, make):
        layer = make()
        report = pcdeq.check(layer)
        assert not report.holds
        assert "nothing is known about what it computes" in report.layers[0].reason
        with pytest.raises(UsageError, match="nothing is known about what it computes"):
            require_known_layer(layer, pcdeq.PcDEQ)

    def test_hooks_and_injections(self):
        require_known_layer(Renamed(5), pcdeq.PcDEQ)
        require_known_layer(pcdeq.PcDEQConv2d(2), pcdeq.PcDEQ)
        layer = pcdeq.PcDEQLinear(5, injection=torch.exp)
        assert pcdeq.check(layer).holds
        with pytest.raises(UsageError, match="injection of your own"):
            require_known_layer(layer, pcdeq.PcDEQ)
        layer = pcdeq.PcDEQLinear(5)
        layer.register_forward_hook(lambda *given: -given[-1])
        with pytest.raises(UsageError, match="PcDEQLinear: it has a forward hook"):
            require_known_layer(layer, pcdeq.PcDEQ)


@pytest.mark.parametrize(
    "pool", [(3, 1, 1), (5, 1, 2), ((1, 3), 1, (0, 1)), (3, 2, 1), (3, 1, 0), (2, 1, 1), (7, 1, 3)]
)
@pytest.mark.parametrize("shape", [(2, 3, 6, 7), (2, 3, 2, 1), (3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_a_largest_number_of_a_window_is_that_of_torch(pool, shape, dtype):
    module = nn.MaxPool2d(pool[0], stride=pool[1], padding=pool[2])
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(shape, dtype=dtype)
        x = x.contiguous(memory_format=layout) if x.ndim == 4 else x
        x[0, 0, 0] = torch.nan
        x[-1, -1, -1] = -torch.inf
        try:
            expected = module(x)
        except RuntimeError:
            continue
        (layer,) = recognise(nn.Sequential(module))
        assert torch.equal(layer.value(x).nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
