"""Nobody, whatever he passes, can make the C code read or write outside of a tensor.

Each check wants an error in words, ours or torch's, or the numbers that torch gives. Reading next to a tensor does not
always crash, so it is the error or the numbers that are asserted.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from alone import alone, main, refused
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import pcdeq
from pcdeq.training.optim import make_optimizer

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch about addresses, and of solves that do not converge


def images(*shape: int) -> Tensor:
    """As the networks have them: the channels of a pixel side by side."""
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def layer_of(kind: str) -> nn.Module:
    """A module of the package, the same at each call; `input_of` has what it takes."""
    torch.manual_seed(0)
    network = pcdeq.build("pcdeq-1-mc-tanh")
    kinds: dict[str, Callable[[], nn.Module]] = {
        "dense": lambda: pcdeq.PcDEQLinear(256),
        "dense-plain": lambda: pcdeq.PcDEQLinear(256, weight_norm=False),
        "conv": lambda: pcdeq.PcDEQConv2d(4),
        "batch-norm": lambda: type(network.lift1_norm)(8),
        "max-pool": lambda: copy.deepcopy(network.pool1),
        "L": lambda: pcdeq.build("pcdeq-1-l-tanh"),
        "MC": lambda: network,
    }
    return kinds[kind]()


def input_of(kind: str) -> Tensor:
    shapes = {"conv": (4, 4, 6, 6), "batch-norm": (4, 8, 6, 6), "max-pool": (4, 8, 6, 6)}
    torch.manual_seed(1)
    if kind.startswith("dense"):
        return torch.randn(4, 256)
    return images(*shapes.get(kind, (4, 1, 28, 28)))


# The networks' batch norm


def check_batch_norm(change: str, mode: str) -> None:
    """torch refuses all of these."""
    norm = layer_of("batch-norm").train(mode == "training")
    x = images(2, 16 if change == "channels" else 8, 4, 4)
    if change != "channels":
        how, name = change.split("-")
        value = getattr(norm, name).data
        getattr(norm, name).data = value.half() if how == "half" else value[:4].clone()
    twin = nn.BatchNorm2d(8).train(mode == "training")
    twin.__dict__.update(copy.deepcopy(norm.__dict__))
    with torch.set_grad_enabled(mode == "training"):
        assert refused(lambda: twin(x))
        assert refused(lambda: norm(x))


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param("channels"),
        pytest.param("half-bias"),
        pytest.param("half-running_mean"),
        pytest.param("half-running_var"),
        pytest.param("short-weight"),
        pytest.param("short-running_var"),
        pytest.param("half-weight"),
    ],
)
def test_batch_norm_refuses_what_torch_refuses(change, mode):
    check_batch_norm(change, mode)


# The gradient of a convolution's weight


def check_weight_gradient(kind: str) -> None:
    shapes = {
        "more channels": ((2, 8, 6, 6), (2, 8, 6, 6)),
        "fewer channels": ((2, 2, 6, 6), (2, 2, 6, 6)),
        "fewer channels of y": ((2, 4, 6, 6), (2, 2, 6, 6)),
        "smaller y": ((2, 4, 6, 6), (2, 4, 3, 3)),
        "larger y": ((2, 4, 6, 6), (2, 4, 8, 8)),
        "fewer samples of y": ((2, 4, 6, 6), (1, 4, 6, 6)),
    }
    operator = pcdeq.PcDEQConv2d(4).operator
    linear = operator.bind(operator.effective_weight().detach())
    z, y = (torch.randn(shape) for shape in shapes[kind])
    assert refused(lambda: linear.weight_gradient(z, y))


@pytest.mark.parametrize(
    "kind",
    [
        "more channels",
        "fewer channels",
        "fewer channels of y",
        "smaller y",
        "larger y",
        "fewer samples of y",
    ],
)
def test_weight_gradient_refuses_shapes_that_do_not_fit(kind):
    check_weight_gradient(kind)


# Parameters replaced between forward and backward


def check_replaced(kind: str, name: str, rows: str, columns: str) -> None:
    """Of another size, and large enough that a kernel that goes by it leaves its memory for sure."""
    layer = pcdeq.PcDEQLinear(256) if kind == "dense" else pcdeq.PcDEQConv2d(8)
    x = torch.randn(4, 256) if kind == "dense" else images(2, 8, 6, 6)
    loss = layer(x.requires_grad_()).sum()
    parameter = getattr(layer.operator, name)
    shape = (int(rows), int(columns) if parameter.shape[1] > 1 else 1, *parameter.shape[2:])
    parameter.data = torch.rand(1).expand(shape).contiguous()
    assert refused(loss.backward)


@pytest.mark.parametrize(
    ("kind", "name", "rows", "columns"),
    [
        pytest.param("dense", "weight_v", 256, 1 << 18, id="dense-v-wider"),
        pytest.param("dense", "weight_g", 2, 1, id="dense-g-shorter"),
        pytest.param("conv", "weight_v", 8, 1 << 19, id="conv-v-wider"),
        pytest.param("dense", "weight_v", 128, 256, id="dense-v-shorter"),
        pytest.param("conv", "weight_v", 4, 8, id="conv-v-shorter"),
        pytest.param("conv", "weight_g", 4, 1, id="conv-g-shorter"),
    ],
)
def test_a_parameter_replaced_between_forward_and_backward(kind, name, rows, columns):
    check_replaced(kind, name, str(rows), str(columns))


# The trainer's optimiser


def check_optimiser(which: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    twin = copy.deepcopy(model)
    ours = make_optimizer(pcdeq.TrainConfig().resolve(), model, torch.device("cpu"))
    options = {name: ours.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    torchs = torch.optim.AdamW(twin.parameters(), **options, foreach=False)
    x = torch.randn(4, 5)
    for step in range(6):
        for network, optimizer in ((model, ours), (twin, torchs)):
            optimizer.zero_grad()
            network(x).square().sum().backward()
            for state in optimizer.state.values():
                if step == 3:
                    state[which].data = torch.full_like(state[which], 5.0 if which == "step" else 0.25)
            optimizer.step()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.state[model.weight][which], torchs.state[twin.weight][which], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("which", ["exp_avg", "exp_avg_sq", "step"])
def test_the_optimisers_state_is_where_its_tensors_are(which):
    alone(check_optimiser, which)


# Hooks for saved tensors


def gradients(module: nn.Module, x: Tensor, back: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Of a fixed loss, with respect to input and parameters, where what was saved comes back through a function."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with saved_tensors_hooks(lambda tensor: tensor, back):
        y = module(x)
    torch.manual_seed(2)
    y.backward(torch.randn(y.shape))
    found = [x.grad, *(parameter.grad for parameter in module.parameters())]
    return [grad.double() for grad in found if grad is not None]


def assert_refused_or_right(kind: str, back: Callable[[Tensor], Tensor]) -> None:
    plain = gradients(layer_of(kind), input_of(kind), lambda tensor: tensor)
    try:
        found = gradients(layer_of(kind), input_of(kind), back)
    except (pcdeq.PcdeqError, RuntimeError):
        return
    for grad, right in zip(found, plain, strict=True):
        assert (grad - right).norm() <= 2e-2 * right.norm() + 1e-5  # a hook may round to half precision


def two_rows(tensor: Tensor) -> Tensor:
    """Of all that it has; one would broadcast."""
    return tensor[:2].clone() if tensor.ndim else tensor


def twice(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor]) if tensor.ndim and len(tensor) > 1 else tensor


def wider(tensor: Tensor) -> Tensor:
    """So many columns that a kernel that goes by them leaves its memory for sure."""
    if tensor.ndim < 2 or tensor.shape[1] == 1:
        return tensor
    return tensor[:1, :1].expand(len(tensor), 1 << 18, *tensor.shape[2:]).contiguous()


BACK = {
    "contiguous": lambda tensor: tensor.contiguous(),
    "double": lambda tensor: tensor.double(),
    "half-precision": lambda tensor: tensor.half(),
    "two-rows": two_rows,
    "twice": twice,
}


def check_hook(kind: str, name: str) -> None:
    assert_refused_or_right(kind, BACK[name])


def check_hook_of_one(kind: str, name: str) -> None:
    """Only one of the saved tensors comes back changed, each in its turn."""
    saved: list[Tensor] = []
    gradients(layer_of(kind), input_of(kind), lambda tensor: saved.append(tensor) or tensor)
    change = {**BACK, "wider": wider}[name]
    for changed in range(len(saved)):
        count = iter(range(len(saved)))
        assert_refused_or_right(kind, lambda t, count=count, one=changed: change(t) if next(count, -1) == one else t)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("batch-norm", "double"),
        pytest.param("batch-norm", "half-precision"),
        pytest.param("batch-norm", "two-rows"),
        pytest.param("batch-norm", "twice"),
        pytest.param("max-pool", "double"),
        pytest.param("max-pool", "half-precision"),
        pytest.param("max-pool", "two-rows"),
        pytest.param("max-pool", "twice"),
        pytest.param("dense", "double"),
        pytest.param("dense", "half-precision"),
        pytest.param("dense", "two-rows"),
        pytest.param("dense", "twice"),
        pytest.param("conv", "double"),
        pytest.param("conv", "half-precision"),
        pytest.param("conv", "two-rows"),
        pytest.param("conv", "twice"),
    ],
)
def test_a_hook_that_gives_back_other_sizes_or_dtypes(kind, name):
    check_hook(kind, name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("dense", "two-rows"),
        pytest.param("dense", "twice"),
        pytest.param("dense", "wider"),
        pytest.param("conv", "two-rows"),
        pytest.param("conv", "twice"),
        pytest.param("conv", "wider"),
    ],
)
def test_a_hook_that_gives_back_one_tensor_of_another_size(kind, name):
    check_hook_of_one(kind, name)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("batch-norm"),
        pytest.param("max-pool"),
        pytest.param("MC"),
        pytest.param("dense"),
        pytest.param("conv"),
        pytest.param("L"),
    ],
)
def test_a_hook_that_gives_back_what_it_got_in_another_memory_format(kind):
    plain = gradients(layer_of(kind), input_of(kind), lambda tensor: tensor)
    found = gradients(layer_of(kind), input_of(kind), lambda tensor: tensor.contiguous())
    for grad, right in zip(found, plain, strict=True):
        assert (grad - right).norm() <= 1e-3 * right.norm() + 1e-4  # before a batch norm a bias has only rounding


# Tensors without numbers


def check_fake(kind: str, mode: str) -> None:
    """Under such a mode even tensors with numbers have no address."""
    module, x = layer_of(kind).train(mode == "training"), input_of(kind)
    expected = module(x).shape
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(mode == "training"):
        try:
            y = module(x)
        except (pcdeq.PcdeqError, RuntimeError):
            return
        assert y.shape == expected


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("kind", ["dense", "conv", "batch-norm", "max-pool", "L"])
def test_fake_tensors(kind, mode):
    check_fake(kind, mode)


# What a warm start has learned


def check_warm_start(kind: str, change: str, mode: str) -> None:
    """Buffers come from files and from users; whatever they hold, the equilibrium is the same or there is an error."""
    ways: dict[str, list[Callable[[Tensor], Tensor]]] = {
        "sizes-and-dtypes": [
            lambda b: b.flatten()[:3].clone(),
            lambda b: torch.cat([b, b]),
            lambda b: b.half(),
            lambda b: torch.ones(b.shape, dtype=torch.int64),
            lambda b: b * torch.nan,
        ],
        "meta": [lambda b: torch.empty(b.shape, device="meta")],
    }
    layer, x = layer_of(kind), input_of(kind)
    for _ in range(3):
        layer(x).sum().backward()
    exact = copy.deepcopy(layer).double()
    exact.warm, exact.solver = None, pcdeq.Anderson(tol=1e-10)
    expected = exact(x.double())
    names = [name for name, buffer in layer.warm.named_buffers() if buffer.is_floating_point() and buffer.numel()]
    assert names
    for name, way in itertools.product(names, ways[change]):
        changed = copy.deepcopy(layer).train(mode == "training")
        setattr(changed.warm, name, way(getattr(changed.warm, name)))
        try:
            with torch.set_grad_enabled(mode == "training"):
                z = changed(x)
                if mode == "training":
                    z.sum().backward()
        except (pcdeq.PcdeqError, RuntimeError):
            continue
        assert (z - expected).norm() < 1e-3 * expected.norm(), name


@pytest.mark.parametrize(
    ("kind", "change", "mode"),
    [
        pytest.param("dense", "meta", "inference"),
        pytest.param("dense-plain", "meta", "training"),
        pytest.param("dense", "sizes-and-dtypes", "inference"),
        pytest.param("dense", "sizes-and-dtypes", "training"),
        pytest.param("conv", "sizes-and-dtypes", "inference"),
    ],
)
def test_buffers_of_the_warm_start(kind, change, mode):
    check_warm_start(kind, change, mode)


if __name__ == "__main__":
    main(globals())
