"""Proofs, bounds and frozen networks are about what a network computes, not about what its classes are called.

Who does not understand a network refuses it: each check wants a `UsageError`, or the network's own numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations, parametrize

import pcdeq
from pcdeq.errors import UsageError
from pcdeq.operators import Dense
from pcdeq.proofs.worst_case import worst_case_scores

# Ways to compute something else than the class says

# What these multiply with: neither the sign nor the size of what comes out is that of the class.
OTHER = -2.0


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Reversed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return OTHER * super().forward(x)


class ReversedLayer(pcdeq.PcDEQLinear):
    def forward(self, x: Tensor) -> Tensor:
        return OTHER * super().forward(x)


class ReversedNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return OTHER * super().forward(x)


class ReversedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return OTHER * super().forward(x)


class Folded(pcdeq.PcDEQLinear):
    """Its injection is not monotone: the equilibria of a box are not between those of its ends."""

    def inject(self, x: Tensor) -> Tensor:
        return super().inject(4 * x.abs() - 2)


class Flipped(Dense):
    def effective_weight(self) -> Tensor:
        return super().effective_weight().flip(0)


class Magnitude(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.abs()


def hooked(module: Any) -> Any:
    module.register_forward_hook(lambda module, inputs, output: OTHER * output)
    return module


def hooked_before(module: Any) -> Any:
    module.register_forward_pre_hook(lambda module, inputs: (OTHER * inputs[0],))
    return module


def with_own_forward(module: Any) -> Any:
    """`forward` set on the instance."""
    usual = module.forward
    module.forward = lambda x: OTHER * usual(x)
    return module


def parametrised(module: nn.Linear) -> nn.Linear:
    parametrize.register_parametrization(module, "weight", Magnitude())
    return module


def with_old_weight_norm(module: nn.Linear) -> nn.Linear:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


@contextmanager
def hook_of_all(register: Callable[..., Any], kind: type[nn.Module]) -> Iterator[None]:
    """A hook of every module there is, which changes what goes into one kind or comes out of it."""
    handle = register(lambda module, *values: OTHER * values[-1] if type(module) is kind else None)
    try:
        yield
    finally:
        handle.remove()


def before_all(hook: Callable[..., Any]) -> Any:
    """torch gives a pre-hook its inputs as a tuple."""
    return register_module_forward_pre_hook(lambda module, inputs: hook(module, inputs[0]))


def network(*first: nn.Module, layer: nn.Module | None = None, last: nn.Module | None = None) -> nn.Sequential:
    """An equilibrium of 6 units and a classifier, and what comes before."""
    return nn.Sequential(*first, layer or pcdeq.PcDEQLinear(6), last or nn.Linear(6, 3))


NETWORKS: dict[str, Callable[[], Any]] = {
    "forward-of-a-sequential": lambda: network(Residual(nn.Linear(6, 6), nn.ReLU())),
    "forward-of-a-linear": lambda: network(Reversed(6, 6)),
    "forward-of-the-classifier": lambda: network(last=Reversed(6, 3)),
    "forward-of-a-pcdeq": lambda: network(layer=ReversedLayer(6)),
    "forward-of-the-whole": lambda: Residual(pcdeq.PcDEQLinear(6), nn.Linear(6, 6)),
    "forward-of-an-instance": lambda: network(with_own_forward(nn.Linear(6, 6))),
    "forward-of-the-instance-on-top": lambda: with_own_forward(network()),
    "hook": lambda: network(hooked(nn.Linear(6, 6))),
    "hook-of-a-pcdeq": lambda: network(layer=hooked(pcdeq.PcDEQLinear(6))),
    "hook-of-the-whole": lambda: hooked(network()),
    "pre-hook": lambda: network(hooked_before(nn.Linear(6, 6))),
    "pre-hook-of-the-whole": lambda: hooked_before(network()),
    "effective-weight": lambda: network(layer=pcdeq.PcDEQ(Flipped(6, weight_norm=False))),
}


def evaluated(model: Any) -> Any:
    """In evaluation mode, with equilibria that couple their units, so that every part matters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, pcdeq.Operator):
                for parameter in module.parameters():
                    parameter.copy_(torch.rand(parameter.shape) ** 4)
    return model.eval()


def in_box(x: Tensor, radius: float) -> list[Tensor]:
    """The images, and some corners and other points of the boxes around them."""
    directions = [torch.randn(x.shape) for _ in range(20 if radius else 0)]
    return [x, *(x + radius * d.sign() for d in directions), *(x + radius * d.tanh() for d in directions)]


@torch.no_grad()
def assert_no_false_proof(model: Any, x: Tensor, radius: float = 0.0) -> None:
    """Where a class is proved, no other is ahead of it by more than a solver's tolerance."""
    try:
        certificate = pcdeq.certify(model, x, radius=radius)
    except UsageError:
        return
    for point in in_box(x, radius):
        scores = model(point)
        behind = scores.amax(1) - scores.gather(1, certificate.classes[:, None])[:, 0]
        assert int((certificate.proved & (behind > 1e-2)).sum()) == 0


# Proofs


@pytest.mark.parametrize("kind", NETWORKS)
def test_no_false_proof(kind):
    assert_no_false_proof(evaluated(NETWORKS[kind]()), 2 * torch.randn(200, 6))


def test_a_proof_of_a_usual_network():
    """The check itself: it lets pass what is right, and there is something to prove."""
    model, x = evaluated(network(nn.Linear(6, 6), nn.ReLU())), 2 * torch.randn(200, 6)
    assert_no_false_proof(model, x, radius=0.01)
    assert pcdeq.certify(model, x).share == 1


@pytest.mark.parametrize("child", [nn.Dropout(0.9), nn.BatchNorm2d(2)], ids=["dropout", "batch-norm"])
def test_no_false_proof_where_a_child_trains(child):
    model = evaluated(network(child, nn.Flatten(), nn.Linear(8, 6)))
    child.train()
    assert_no_false_proof(model, 3 + 2 * torch.randn(200, 2, 2, 2))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        pytest.param(lambda: network(layer=Folded(6)), (6,), id="inject"),
        pytest.param(
            lambda: nn.Sequential(nn.AvgPool2d(2, divisor_override=-4), nn.Flatten(), nn.Linear(8, 3)),
            (2, 4, 4),
            id="negative-divisor",
        ),
    ],
)
def test_no_false_proof_of_boxes(make, shape):
    assert_no_false_proof(evaluated(make()), 0.5 * torch.randn(200, *shape), radius=0.5)


@pytest.mark.parametrize("register", [register_module_forward_hook, before_all], ids=["hook", "pre-hook"])
@pytest.mark.parametrize("kind", [nn.Linear, pcdeq.PcDEQLinear], ids=["linear", "pcdeq"])
def test_no_false_proof_under_hooks_of_all_modules(kind, register):
    model, x = evaluated(network(nn.Linear(6, 6), nn.ReLU())), 2 * torch.randn(200, 6)
    with hook_of_all(register, kind):
        assert_no_false_proof(model, x)


# Bounds that can be trained


@torch.no_grad()
def assert_no_false_bound(model: Any, x: Tensor, radius: float = 0.1) -> None:
    labels = torch.arange(len(x)) % 3
    try:
        scores, worst = worst_case_scores(model, x, labels, radius)
    except UsageError:
        return
    torch.testing.assert_close(scores, model(x), rtol=0, atol=1e-3)
    for point in in_box(x, radius):
        found = model(point)
        assert bool((found - found.gather(1, labels[:, None]) <= worst + 1e-3).all())


@pytest.mark.parametrize("kind", NETWORKS)
def test_no_false_bound(kind):
    assert_no_false_bound(evaluated(NETWORKS[kind]()), 2 * torch.randn(100, 6))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        pytest.param(lambda: network(layer=Folded(6)), (6,), id="inject"),
        pytest.param(
            lambda: nn.Sequential(nn.AvgPool2d(2, divisor_override=-4), nn.Flatten(), nn.Linear(8, 3)),
            (2, 4, 4),
            id="negative-divisor",
        ),
    ],
)
def test_no_false_bound_of_other_maps(make, shape):
    assert_no_false_bound(evaluated(make()), 0.5 * torch.randn(100, *shape), radius=0.5)


@pytest.mark.parametrize("register", [register_module_forward_hook, before_all], ids=["hook", "pre-hook"])
def test_no_false_bound_under_hooks_of_all_modules(register):
    model, x = evaluated(network(nn.Linear(6, 6), nn.ReLU())), 2 * torch.randn(100, 6)
    with hook_of_all(register, pcdeq.PcDEQLinear):
        assert_no_false_bound(model, x)


def test_the_certified_loss_knows_what_certify_knows():
    model, x = evaluated(network(nn.Linear(6, 6), nn.Dropout())), torch.randn(10, 6)
    labels = pcdeq.certify(model, x).classes
    scores, worst = worst_case_scores(model, x, labels, 0.1)
    without = nn.Sequential(model[0], *model[2:])
    torch.testing.assert_close((scores, worst), worst_case_scores(without, x, labels, 0.1))


# Frozen networks


def used_twice(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), module, nn.Linear(6, 6), nn.BatchNorm1d(6), module)


def linear_norm_linear(**changed: Any) -> nn.Sequential:
    parts = {"first": nn.Linear(6, 6), "norm": nn.BatchNorm1d(6), "deq": pcdeq.PcDEQLinear(6)}
    parts |= {"other": nn.BatchNorm1d(6), "last": nn.Linear(6, 3)}
    return nn.Sequential(*(parts | changed).values())


VECTORS, SEQUENCES, IMAGES = (5, 6), (5, 6, 6), (5, 4, 4, 4)
WRONG_FROZEN: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "flatten-2": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(2), nn.Linear(16, 3)), IMAGES),
    "flatten-2-of-another-size": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(2), nn.Linear(25, 3)),
        (5, 4, 5, 5),
    ),
    "flatten-1-2": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(1, 2), nn.Linear(4, 3)), IMAGES),
    "flatten-0-1": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Flatten(0, 1), nn.Linear(6, 3)), SEQUENCES),
    "norm-of-sequences": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), SEQUENCES),
    "norm-of-sequences-of-another-size": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(4)),
        (5, 4, 6),
    ),
    "linear-on-the-last-dimension": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), SEQUENCES),
    "linear-on-rows-of-images": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Linear(4, 3)), IMAGES),
    "linear-twice": (lambda: used_twice(nn.Linear(6, 6)), VECTORS),
    "relu-twice": (lambda: used_twice(nn.ReLU()), VECTORS),
    "weight-norm-after": (
        lambda: nn.Sequential(nn.BatchNorm1d(6), parametrizations.weight_norm(nn.Linear(6, 6))),
        VECTORS,
    ),
    "weight-norm-before": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6)),
        VECTORS,
    ),
    "parametrised-after": (lambda: nn.Sequential(nn.BatchNorm1d(6), parametrised(nn.Linear(6, 6))), VECTORS),
    "parametrised-before": (lambda: nn.Sequential(parametrised(nn.Linear(6, 6)), nn.BatchNorm1d(6)), VECTORS),
    "old-weight-norm": (lambda: nn.Sequential(nn.BatchNorm1d(6), with_old_weight_norm(nn.Linear(6, 6))), VECTORS),
    "norm-without-weight": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False)), VECTORS),
    "norm-by-the-batch": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)),
        VECTORS,
    ),
    "hook-of-a-linear": (lambda: linear_norm_linear(first=hooked(nn.Linear(6, 6))), VECTORS),
    "hook-of-a-norm": (lambda: linear_norm_linear(norm=hooked(nn.BatchNorm1d(6))), VECTORS),
    "hook-of-a-pcdeq": (lambda: linear_norm_linear(deq=hooked(pcdeq.PcDEQLinear(6))), VECTORS),
    "hook-of-the-whole": (lambda: hooked(linear_norm_linear()), VECTORS),
    "pre-hook-of-a-linear": (lambda: linear_norm_linear(last=hooked_before(nn.Linear(6, 3))), VECTORS),
    "pre-hook-of-a-pcdeq": (lambda: linear_norm_linear(deq=hooked_before(pcdeq.PcDEQLinear(6))), VECTORS),
    "pre-hook-of-the-whole": (lambda: hooked_before(linear_norm_linear()), VECTORS),
    "forward-of-a-linear": (lambda: linear_norm_linear(first=Reversed(6, 6)), VECTORS),
    "forward-of-a-norm": (lambda: linear_norm_linear(norm=ReversedNorm(6)), VECTORS),
    "forward-of-a-pcdeq": (lambda: linear_norm_linear(deq=ReversedLayer(6)), VECTORS),
    "forward-of-a-conv": (lambda: nn.Sequential(ReversedConv(4, 4, 3), nn.BatchNorm2d(4)), IMAGES),
    "forward-of-the-whole": (lambda: Residual(nn.Linear(6, 6), nn.ReLU()), VECTORS),
    "forward-of-an-instance": (lambda: linear_norm_linear(first=with_own_forward(nn.Linear(6, 6))), VECTORS),
    "forward-of-the-instance-on-top": (lambda: with_own_forward(linear_norm_linear()), VECTORS),
}
RIGHT_FROZEN: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "usual": (linear_norm_linear, VECTORS),
    "forward-of-a-child": (lambda: nn.Sequential(Residual(nn.Linear(6, 6), nn.BatchNorm1d(6))), VECTORS),
    "inject": (lambda: nn.Sequential(nn.Linear(6, 6), Folded(6)), VECTORS),
    "effective-weight": (lambda: nn.Sequential(pcdeq.PcDEQ(Flipped(6, weight_norm=False))), VECTORS),
    "parametrised-alone": (lambda: nn.Sequential(parametrised(nn.Linear(6, 6)), nn.ReLU()), VECTORS),
    "dropout-between": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)), VECTORS),
    "circular-padding": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
        IMAGES,
    ),
    "divisor": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.AvgPool2d(2, divisor_override=-4), nn.Flatten(), nn.Linear(16, 3)),
        IMAGES,
    ),
}


@torch.no_grad()
def assert_not_frozen_wrong(model: Any, x: Tensor) -> None:
    for module in evaluated(model).modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
            if module.affine:
                module.weight.normal_()
                module.bias.normal_()
    expected = model(x)
    try:
        found = pcdeq.freeze(model)(x)
    except UsageError:
        return
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "shape"),
    [pytest.param(*case, id=kind) for kind, case in (WRONG_FROZEN | RIGHT_FROZEN).items()],
)
def test_a_frozen_network_is_the_same_or_refused(make, shape):
    assert_not_frozen_wrong(make(), torch.randn(shape))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, pcdeq.PcDEQLinear], ids=["batch-norm", "pcdeq"])
def test_freezing_under_hooks_of_all_modules(kind):
    with hook_of_all(register_module_forward_hook, kind):
        assert_not_frozen_wrong(linear_norm_linear(), torch.randn(VECTORS))
