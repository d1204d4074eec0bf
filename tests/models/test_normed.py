"""Batch norm, dense equilibrium and batch norm as one node give what they give one after the other."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pcdeq
from pcdeq.errors import PcdeqError
from pcdeq.kernels import KERNELS
from pcdeq.models import L
from pcdeq.models.explicit import lay_out
from pcdeq.solvers import fused

pytestmark = pytest.mark.skipif(KERNELS is None, reason="installed without a C compiler")
NAMES = [name for name in fused.CODES if name != "linear"]


def make(activation="tanh", width=24, **options):
    torch.manual_seed(0)
    model = L((width,), image_shape=(1, 6, 6), activation=activation, **options)
    with torch.no_grad():
        for norm in (model.lift_norm, model.deq_norm):
            norm.weight.uniform_(0.5, 2)
            norm.bias.uniform_(-1, 1)
        model.deq.operator.weight_v.uniform_()
        model.deq.operator.weight_g.uniform_(0, 0.5)  # else ReLU6 is at 6, and batch norm divides by nothing
    return model


def is_one_node(model, images):
    """Whether the graph of the classifier's input ends in the block."""
    seen = []
    handle = model.classifier.register_forward_pre_hook(lambda _, args: seen.append(args[0].grad_fn))
    model(images)
    handle.remove()
    return "_Block" in type(seen[0]).__name__


def layer_by_layer(model, x):
    for layer in model:
        x = layer(x)
    return x


def steps(model, run, batches):
    """Outputs and gradients of some training steps, of which each teaches the warm start."""
    found = []
    for images in batches:
        images = images.clone().requires_grad_()
        out = run(model, images)
        out.square().sum().backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append({"out": out.detach(), "images": images.grad, **grads})
        model.zero_grad()
    return found


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize(("samples", "width"), [(64, 80), (9, 5), (17, 33)])
def test_same_numbers(activation, samples, width):
    """Both ways are compared with float64: batch norm's gradients are differences of nearly equal numbers."""
    model = make(activation, width, solver=pcdeq.Anderson(tol=1e-6))
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    exact.deq.solver = exact.deq.adjoint_solver = pcdeq.Anderson(tol=1e-12)
    batches = torch.randn(20, samples, 1, 6, 6)
    assert is_one_node(copy.deepcopy(model), batches[0])
    fast, slow = steps(model, nn.Module.__call__, batches), steps(twin, layer_by_layer, batches)
    truth = steps(exact, layer_by_layer, batches.double())
    for name in truth[0]:
        error, usual = (
            sum(float((mine[name] - true[name]).square().sum()) for mine, true in zip(found, truth, strict=True))
            for found in (fast, slow)
        )
        assert 0 < error <= 3**2 * usual, name
    assert model.deq.last_forward.samples == model.deq.last_backward.samples == samples
    assert not model.deq.last_forward.unconverged and not model.deq.last_backward.unconverged
    learned, expected = model.state_dict(), twin.state_dict()
    assert learned.keys() == expected.keys()
    for name, value in learned.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def _set(path, value):
    def change(model):
        *parents, name = path.split(".")
        owner = model
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)

    return change


def _replace(module, name):
    value = getattr(module, name).detach().clone()
    delattr(module, name)
    setattr(module, name, value)


class OtherNorm(nn.BatchNorm1d):
    def forward(self, input):
        return 2 * super().forward(input)


UNUSUAL = {
    "evaluation of one norm": lambda model: model.lift_norm.eval(),
    "no momentum": _set("deq_norm.momentum", None),
    "no parameters": _set("deq_norm", nn.BatchNorm1d(24, affine=False)),
    "no running statistics": _set("lift_norm", nn.BatchNorm1d(24, track_running_stats=False)),
    "running statistics no longer kept": _set("lift_norm.track_running_stats", False),
    "another norm": _set("lift_norm", OtherNorm(24)),
    "a norm in float64": lambda model: model.lift.double() and model.lift_norm.double() and model.deq.double(),
    "plain iteration": _set("deq.solver", pcdeq.Picard()),
    "plain iteration backward": _set("deq.adjoint_solver", pcdeq.Picard()),
    "the paper's rule": _set("deq.solver", pcdeq.Anderson(stop="batch")),
    "a cheap gradient": _set("deq.gradient", "phantom"),
    "an injection": _set("deq.injection", F.softplus),
    "statistics with gaps": lambda model: model.lift_norm.register_buffer("running_mean", torch.zeros(48)[::2]),
    "another forward": lambda model: setattr(model.deq, "forward", model.deq.inject),
    "a plain tensor for a parameter": lambda model: _replace(model.lift_norm, "weight"),
    "a plain tensor for a buffer": lambda model: _replace(model.lift_norm, "running_mean"),
    "a plain tensor for the count": lambda model: _replace(model.lift_norm, "num_batches_tracked"),
    "no norm before": _set("lift_norm", nn.ReLU()),
}


@pytest.mark.parametrize("unusual", UNUSUAL)
def test_what_is_unusual_goes_layer_by_layer(unusual):
    model = make()
    UNUSUAL[unusual](model)
    images = torch.randn(5, 1, 6, 6)
    if unusual == "a norm in float64":
        model.deq_norm.double(), model.classifier.double()
        images = images.double()
    assert not is_one_node(copy.deepcopy(model), images)
    assert torch.equal(model(images), layer_by_layer(copy.deepcopy(model), images))


def test_hooks_see_what_they_would():
    images = torch.randn(5, 1, 6, 6)
    for name in ("lift_norm", "deq", "deq_norm"):
        for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
            model, seen = make(), []
            handle = getattr(getattr(model, name), register)(lambda *_, seen=seen: seen.append(1))
            model(images).sum().backward()
            assert seen == [1]
            handle.remove()
            assert is_one_node(model, images)
    seen = []
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        model = make()
        model(images)
    assert model.deq in seen and model.lift_norm in seen


def test_autocast_and_evaluation_and_no_grad():
    model, images = make(), torch.randn(5, 1, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_one_node(model, images)
    with torch.no_grad():
        assert not is_one_node(model, images)
    assert not is_one_node(model.eval(), images)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own
def test_a_layer_compiled_alone():
    model, images = make(), torch.randn(5, 1, 6, 6)
    model.deq.compile(backend="eager")
    assert not is_one_node(model, images)


def test_backward_called_inside_autocast():
    model, images = make(), torch.randn(5, 1, 6, 6)
    twin = copy.deepcopy(model)
    twin(images).square().sum().backward()
    out = model(images).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        out.backward()
    for ours, theirs in zip(model.deq.parameters(), twin.deq.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.05 * float(theirs.grad.abs().max()))
    assert torch.equal(model.deq.warm.product, twin.deq.warm.product)


def test_one_sample_has_no_statistics():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        make()(torch.randn(1, 1, 6, 6))


def test_layers_that_users_add_are_run():
    model = make()
    model.append(nn.Tanh())
    assert float(model(100 * torch.randn(5, 1, 6, 6)).detach().abs().max()) <= 1


@pytest.mark.parametrize(
    "trained", [("lift", "deq", "classifier"), ("deq_norm.bias", "classifier"), ("lift_norm.bias",)]
)
def test_no_second_derivative(trained):
    """Whatever is trained: gradients that nobody can differentiate must say so, not be taken for constants."""
    model, images = make(solver=pcdeq.Anderson(tol=1e-6)), torch.randn(5, 1, 6, 6)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    mine = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(model(images).logsumexp(1).sum(), mine, create_graph=True)
    plain = torch.autograd.grad(model(images).logsumexp(1).sum(), mine)
    torch.testing.assert_close(grads, plain, rtol=1e-3, atol=1e-3)
    with pytest.raises(PcdeqError, match="no second derivative"):
        sum(grad.square().sum() for grad in grads).backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_saved_tensors_may_be_kept_elsewhere(dtype):
    """By hooks which give back what lies in memory differently."""
    model, images = make(), torch.randn(5, 1, 6, 6)
    twin = copy.deepcopy(model)
    pack = lambda x: x.to(dtype).t().contiguous() if x.ndim == 2 else x.to(dtype)  # noqa: E731
    unpack = lambda x: (x.t() if x.ndim == 2 else x).float()  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = model(images).square().sum()
    out.backward()
    twin(images).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_saved_tensors_of_another_shape_are_refused():
    """Only the block's: of the statistics of a norm, which have a shape of their own, a part is given back."""
    model = make()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x[:1] if x.shape == (2, 24) else x):
        out = model(torch.randn(5, 1, 6, 6)).square().sum()
    with pytest.raises(PcdeqError, match="another shape"):
        out.backward()


def test_gradient_checkpoints():
    model, images = make(), torch.randn(5, 1, 6, 6)
    twin = copy.deepcopy(model)
    checkpoint(model, images, use_reentrant=False).square().sum().backward()
    twin(images).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_parameters_that_are_not_trained():
    model, images = make(), torch.randn(5, 1, 6, 6)
    for parameter in (*model.lift.parameters(), *model.lift_norm.parameters(), *model.deq.parameters()):
        parameter.requires_grad_(False)
    assert is_one_node(model, images)
    model(images).square().sum().backward()
    assert model.deq_norm.weight.grad is not None and model.deq.operator.weight_v.grad is None


def test_a_solve_that_throws_leaves_the_second_norm_alone():
    model = make(solver=pcdeq.Anderson(tol=1e-12, max_steps=2, throw=True))
    with pytest.raises(PcdeqError):
        model(torch.randn(5, 1, 6, 6))
    assert int(model.deq_norm.num_batches_tracked) == 0


def test_layout():
    """Networks that are handed out are contiguous; the trainer's and frozen ones have wide weights by columns."""
    model = L((80,), activation="tanh")
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    frozen = pcdeq.freeze(model)
    plain = copy.deepcopy(model)
    lay_out(model)
    for network in (model, copy.deepcopy(model), frozen):
        assert network.lift.weight.t().is_contiguous() and network.classifier.weight.is_contiguous()
    images = torch.randn(5, 1, 28, 28)
    torch.testing.assert_close(model(images), plain(images), rtol=1e-3, atol=1e-3)
    model(images).square().sum().backward()
    assert model.lift.weight.grad.stride() == model.lift.weight.stride()
