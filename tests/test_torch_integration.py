"""The layers inside PyTorch: saving, copying, casting, layouts, AMP, checkpointing, compile, DDP, functional_call."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from problems import OPERATORS, Circulant, make_input, make_layer
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import pcdeq

each_operator = pytest.mark.parametrize("operator", OPERATORS)
TIGHT = pcdeq.Anderson(tol=1e-12)


def trained(operator: str, **options) -> pcdeq.PcDEQ:
    """A layer with a past: some backward passes, gradients on its parameters, statistics."""
    layer = make_layer(operator, solver=TIGHT, **options)
    for seed in range(3):
        layer(make_input(operator, seed=seed)).square().sum().backward()
    return layer


def small_network(solver: pcdeq.Anderson = TIGHT) -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        pcdeq.PcDEQConv2d(3, "tanh", floor=0.05, solver=solver),
        nn.Flatten(),
        nn.Linear(48, 5),
        pcdeq.PcDEQLinear(5, "softsign", floor=0.05, solver=solver),
        nn.Linear(5, 2),
    )
    for module in network:
        if isinstance(module, pcdeq.PcDEQ):
            nn.init.uniform_(module.operator.weight_v)
            nn.init.constant_(module.operator.weight_g, 0.5)
    return network.double()


def images(samples: int = 4) -> torch.Tensor:
    return torch.randn(samples, 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def value_and_gradients(function, model, x):
    """The loss's gradients with respect to the input and to every parameter."""
    x = x.detach().clone().requires_grad_()
    out = function(x)
    return out.detach(), torch.autograd.grad(out.square().sum(), [x, *model.parameters()])


def assert_same(actual, expected, rtol=1e-9):
    torch.testing.assert_close(actual[0], expected[0], rtol=rtol, atol=1e-12)
    for a, e in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol)


class TestSavingAndCopying:
    @each_operator
    @pytest.mark.parametrize("weight_norm", [True, False])
    def test_state_dict_round_trip(self, operator, weight_norm):
        layer = trained(operator, weight_norm=weight_norm)
        other = make_layer(operator, solver=TIGHT, seed=7, weight_norm=weight_norm)
        assert other.load_state_dict(layer.state_dict(), strict=True) == ([], [])
        x = make_input(operator)
        assert torch.equal(other.eval()(x), layer.eval()(x))

    @each_operator
    def test_save_and_load_with_weights_only(self, operator):
        layer = trained(operator)
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        other = make_layer(operator, solver=TIGHT, seed=7)
        other.load_state_dict(torch.load(file, weights_only=True))
        x = make_input(operator)
        assert torch.equal(other.eval()(x), layer.eval()(x))

    @each_operator
    def test_deepcopy_is_independent(self, operator):
        layer = trained(operator)
        other = copy.deepcopy(layer)
        x = make_input(operator)
        assert torch.equal(other.eval()(x), layer.eval()(x))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        assert not torch.equal(other(x), layer(x))
        other.train()(x).sum().backward()
        assert other.last_backward.steps > 0

    @each_operator
    def test_pickle(self, operator):
        layer = trained(operator)
        other = pickle.loads(pickle.dumps(layer))
        x = make_input(operator)
        assert torch.equal(other.eval()(x), layer.eval()(x))
        assert other.activation is layer.activation
        assert other.solver == layer.solver

    def test_a_deepcopy_reports_to_itself(self):
        layer = trained("dense")
        before = layer.last_forward
        other = copy.deepcopy(layer)
        other(make_input("dense", samples=5).requires_grad_()).sum().backward()
        assert layer.last_forward is before
        assert (other.last_forward.samples, other.last_backward.samples) == (5, 5)

    def test_a_checkpoint_of_another_size_is_refused(self):
        with pytest.raises(RuntimeError, match="size mismatch"):
            pcdeq.PcDEQLinear(3).load_state_dict(pcdeq.PcDEQLinear(4).state_dict())

    @each_operator
    def test_moves_between_dtypes(self, operator):
        layer = trained(operator)
        x = make_input(operator)
        expected = layer.eval()(x)
        single = copy.deepcopy(layer).float()
        single.solver = pcdeq.Anderson(tol=1e-6)
        assert all(p.dtype == torch.float32 for p in single.parameters())
        torch.testing.assert_close(single(x.float()).double(), expected, rtol=1e-4, atol=0)
        for dtype in (torch.bfloat16, torch.float16):
            half = copy.deepcopy(layer).to(dtype)
            half.solver = pcdeq.Anderson()
            torch.testing.assert_close(half(x.to(dtype)).double(), expected, rtol=0.1, atol=0)

    def test_a_meta_copy_can_be_made(self):
        with torch.device("meta"):
            layer = pcdeq.PcDEQLinear(4)
        assert all(p.is_meta for p in layer.parameters())
        layer = layer.to_empty(device="cpu")
        layer.load_state_dict(pcdeq.PcDEQLinear(4).state_dict())
        assert layer(torch.randn(2, 4)).isfinite().all()


class TestMemoryFormat:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize(
        ("where", "operator"), [("input", "conv2d"), ("module", "conv2d"), ("both", "conv2d"), ("input", "conv3d")]
    )
    def test_channels_last_gives_the_same(self, where, operator, dtype):
        torch.manual_seed(0)
        layer = {"conv2d": pcdeq.PcDEQConv2d, "conv3d": pcdeq.PcDEQConv3d}[operator](
            4, solver=pcdeq.Anderson(tol=1e-6), warm_start=False
        )
        layer = layer.to(dtype)
        with torch.no_grad():
            layer.operator.weight_g.fill_(0.7)
        x = torch.randn(3, 4, 5, 6, dtype=dtype) if operator == "conv2d" else torch.randn(2, 4, 3, 2, 3, dtype=dtype)
        expected = value_and_gradients(layer, layer, x)
        memory_format = torch.channels_last if operator == "conv2d" else torch.channels_last_3d
        if where != "input":
            layer = layer.to(memory_format=memory_format)
        if where != "module":
            x = x.to(memory_format=memory_format)
        assert_same(value_and_gradients(layer, layer, x), expected, rtol=1e-4)
        upstream = torch.ones_like(x).contiguous(memory_format=memory_format)
        z = layer(x.requires_grad_())
        z.backward(upstream)
        assert x.grad.isfinite().all()


class TestTraining:
    def test_a_network_learns(self):
        model, x = small_network(pcdeq.Anderson()), images(8)
        y = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])  # to be learned by heart
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        optimizer.register_step_post_hook(lambda *_: pcdeq.project_(model))
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.3 * losses[0]
        assert all((p >= 0).all() for m in model if isinstance(m, pcdeq.PcDEQ) for p in m.parameters())

    def test_a_layer_used_twice_in_one_graph(self):
        layer = make_layer("dense", solver=TIGHT)
        x = make_input("dense")
        expected = [g.clone() for g in torch.autograd.grad((layer(x) + layer(2 * x)).sum(), list(layer.parameters()))]
        for parameter in layer.parameters():
            parameter.grad = None
        layer(x).sum().backward()
        layer(2 * x).sum().backward()
        for parameter, e in zip(layer.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, e, rtol=1e-9, atol=1e-12)

    def test_backward_twice_with_retain_graph(self):
        layer = make_layer("dense", solver=TIGHT)
        x = make_input("dense").requires_grad_()
        z = layer(x)
        (first,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(z.sum(), x)
        torch.testing.assert_close(first, second, rtol=1e-10, atol=0)

    def test_gradient_accumulation(self):
        layer = make_layer("dense", solver=TIGHT)
        x = make_input("dense", samples=6)
        layer(x).square().sum().backward()
        whole = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        for part in x.split(2):
            layer(part).square().sum().backward()
        for parameter, expected in zip(layer.parameters(), whole, strict=True):
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-8, atol=1e-11)

    def test_amp_with_a_gradient_scaler(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), pcdeq.PcDEQLinear(6), nn.Linear(6, 1))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = torch.randn(32, 4)
        y = x.sum(1, keepdim=True)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x).float() - y).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert losses[-1] < 0.6 * losses[0]

    def test_float16_autocast(self):
        layer = pcdeq.PcDEQLinear(6)
        with torch.autocast("cpu", dtype=torch.float16):
            z = layer(torch.full((2, 6), -1000.0, dtype=torch.float16, requires_grad=True))
        assert (z > 0).all()  # a softplus in float16 would have been 0
        z.sum().backward()


class TestCheckpointing:
    @pytest.mark.parametrize("use_reentrant", [True, False])
    @each_operator
    def test_a_layer(self, operator, use_reentrant):
        layer = trained(operator)
        x = make_input(operator)
        reference = copy.deepcopy(layer)
        expected = value_and_gradients(reference, reference, x)
        x = x.clone().requires_grad_()
        layer.zero_grad()
        out = checkpoint(layer, x, use_reentrant=use_reentrant)
        out.square().sum().backward()
        assert_same((out.detach(), [x.grad, *(p.grad for p in layer.parameters())]), expected)

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_a_network_that_trains(self, use_reentrant):
        plain, checked = small_network(), small_network()
        x = images()
        for model, call in ((plain, plain), (checked, lambda x: checkpoint(checked, x, use_reentrant=use_reentrant))):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                call(x.clone().requires_grad_()).square().sum().backward()
                optimizer.step()
        for a, e in zip(checked.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-10)

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_under_autocast(self, use_reentrant):
        layer = make_layer("dense", dtype=torch.float32).eval()
        x = make_input("dense", dtype=torch.float32)
        expected = value_and_gradients(layer, layer, x)
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = checkpoint(layer, x, use_reentrant=use_reentrant)
        out.square().sum().backward()
        torch.testing.assert_close(x.grad, expected[1][0])


# torch hides these warnings of its own from users, but not from "warnings are errors".
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
class TestCompile:
    """A network in one graph; `test_compilers.py` has all else."""

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_evaluation(self, mode):
        torch._dynamo.reset()
        model, x = small_network().eval(), images()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with mode():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-10, atol=1e-12)

    def test_it_trains(self):
        torch._dynamo.reset()
        plain, other = small_network(), small_network()
        compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
        x = images()
        for model, call in ((plain, plain), (other, compiled)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                call(x).square().sum().backward()
                optimizer.step()
        for a, e in zip(other.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-10)
        assert other[1].last_forward.unconverged == 0


class TestFunctionalCall:
    @each_operator
    def test_uses_the_parameters_given(self, operator):
        layer, other = make_layer(operator, solver=TIGHT), make_layer(operator, solver=TIGHT, seed=5)
        x = make_input(operator)
        parameters = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
        z = functional_call(layer, parameters, (x,))
        torch.testing.assert_close(z, other(x), rtol=1e-9, atol=0)
        z.sum().backward()
        other(x).sum().backward()
        for name, parameter in other.named_parameters():
            torch.testing.assert_close(parameters[name].grad, parameter.grad, rtol=1e-8, atol=1e-11)
        assert all(p.grad is None for p in layer.parameters())


# Two processes, each with half of the batch. A layer with a warm start keeps its own; the gradients agree all the same.
WORKER = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from test_torch_integration import images, small_network

rank, world, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
model = DistributedDataParallel(small_network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
part = images(8).chunk(world)[rank]
for step in range(3):
    optimizer.zero_grad()
    model(part).square().sum(1).mean().backward()
    optimizer.step()
if rank == 0:
    torch.save({name: (p.detach(), p.grad) for name, p in model.module.named_parameters()}, out)
dist.barrier()
os._exit(0)  # gloo's threads now and then end a process that leaves in an orderly way with "terminate called"
"""


def test_distributed_data_parallel_equals_one_process_on_the_whole_batch(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", WORKER]
    workers = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), str(tmp_path / "out.pt")],
            cwd=Path(__file__).parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            output, _ = worker.communicate(timeout=120)
            assert worker.returncode == 0, output[-3000:]
    finally:
        for worker in workers:
            worker.kill()
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(images(8)).square().sum(1).mean().backward()
        optimizer.step()
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, parameter in model.named_parameters():
        value, gradient = found[name]
        torch.testing.assert_close(value, parameter.detach(), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-7, atol=1e-10)


class TestThreads:
    def test_one_layer_used_by_several_threads(self):
        from concurrent.futures import ThreadPoolExecutor

        layer = make_layer("conv2d", dtype=torch.float32, solver=pcdeq.Anderson(tol=1e-6)).eval()
        inputs = [make_input("conv2d", samples=3, seed=seed, dtype=torch.float32) for seed in range(16)]
        expected = [layer(x).detach() for x in inputs]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda x: layer(x).detach(), inputs))
        for a, e in zip(found, expected, strict=True):
            torch.testing.assert_close(a, e)


def test_a_custom_operator_is_a_module_like_any_other():
    layer = pcdeq.PcDEQ(Circulant(taps=2), "arctan")
    assert [name for name, _ in layer.named_parameters()] == ["operator.weight_v", "operator.weight_g"]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert (layer.operator.effective_weight() >= 0).all()
