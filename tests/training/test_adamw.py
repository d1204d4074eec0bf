"""Our AdamW is torch's, in numbers, state, hooks and options."""

import copy
import inspect

import pytest
import torch

from pcdeq.kernels import KERNELS
from pcdeq.training import adamw
from pcdeq.training.adamw import AdamW

needs_kernels = pytest.mark.skipif(KERNELS is None, reason="installed without a C compiler")
SHAPES = ((80, 300), (80,), (3, 2, 3, 3), (5, 1), ())


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def descend(optimizer, mine, steps, seed=0):
    """Some steps with gradients of very different sizes, one parameter without a gradient now and then."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(steps):
        for index, parameter in enumerate(mine):
            grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** -(number % 7)
            parameter.grad = None if (number + index) % 5 == 4 else grad.to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in mine)


@pytest.fixture
def calls(monkeypatch):
    """How many steps the kernel has made."""

    class Kernels:
        count = 0

        def adamw(self, *args):
            Kernels.count += 1
            return KERNELS.adamw(*args)

    if KERNELS is None:
        pytest.skip("installed without a C compiler")
    monkeypatch.setattr(adamw, "KERNELS", Kernels())
    return Kernels


OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-7}


@pytest.mark.parametrize("fused", [True, None])
def test_same_numbers_as_torch(fused, calls):
    ours, exact = parameters(), parameters(torch.float64)
    descend(AdamW(ours, fused=fused, **OPTIONS), ours, 60)
    descend(torch.optim.AdamW(exact, **OPTIONS), exact, 60)
    assert calls.count > 50
    for mine, true in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.detach().double(), true.detach(), rtol=1e-5, atol=1e-5)


def test_groups_have_their_own_options_and_rates_may_change(calls):
    found = []
    for kind in (AdamW, torch.optim.AdamW):
        mine = parameters()
        optimizer = kind([{"params": mine[:2], "lr": 0.1}, {"params": mine[2:], "weight_decay": 0.0}], lr=1e-3)
        descend(optimizer, mine, 5)
        optimizer.param_groups[1]["lr"] = 0.05
        descend(optimizer, mine, 5, seed=1)
        found.append(mine)
    assert calls.count
    torch.testing.assert_close([p.detach() for p in found[0]], [p.detach() for p in found[1]], rtol=1e-5, atol=1e-5)


def test_state_goes_from_one_to_the_other(calls):
    ours, theirs = parameters(), parameters()
    first, second = AdamW(ours, fused=True), torch.optim.AdamW(theirs, fused=True)
    descend(first, ours, 6)
    with torch.no_grad():
        for mine, other in zip(theirs, ours, strict=True):
            mine.copy_(other)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    descend(second, theirs, 6, seed=1)
    descend(first, ours, 6, seed=1)
    back = AdamW(theirs, fused=True)
    back.load_state_dict(copy.deepcopy(second.state_dict()))
    descend(back, theirs, 6, seed=2)
    descend(first, ours, 6, seed=2)
    assert calls.count
    torch.testing.assert_close([p.detach() for p in ours], [p.detach() for p in theirs], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"amsgrad": True}, {"maximize": True}, {"foreach": True}, {"lr": torch.tensor(1e-3)}]
)
def test_what_only_torch_can_do_is_left_to_it(options, calls):
    ours, theirs = parameters(), parameters()
    descend(AdamW(ours, **options), ours, 8)
    descend(torch.optim.AdamW(theirs, **options), theirs, 8)
    assert calls.count == 0
    torch.testing.assert_close([p.detach() for p in ours], [p.detach() for p in theirs])


def test_other_dtypes_are_left_to_torch(calls):
    found = []
    for kind in (AdamW, torch.optim.AdamW):
        mine = [torch.nn.Parameter(torch.ones(2, 3, 4, 5).double())]
        descend(kind(mine), mine, 4)
        found.append(mine[0].detach())
    assert calls.count == 0
    assert torch.equal(*found)


LAYOUTS = {
    "contiguous": torch.Tensor.contiguous,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "mixed": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
}


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_parameter", LAYOUTS)
def test_numbers_in_any_order(of_parameter, of_gradient, fused, calls):
    torch.manual_seed(0)
    start, grads = torch.randn(4, 3, 5, 6), torch.randn(6, 4, 3, 5, 6)
    ours = torch.nn.Parameter(LAYOUTS[of_parameter](start))
    exact = torch.nn.Parameter(start.double())
    optimizer, reference = AdamW([ours], fused=fused, **OPTIONS), torch.optim.AdamW([exact], **OPTIONS)
    for grad in grads:
        ours.grad, exact.grad = LAYOUTS[of_gradient](grad), grad.double()
        optimizer.step()
        reference.step()
    assert calls.count == 5
    torch.testing.assert_close(ours.detach().double(), exact.detach(), rtol=1e-5, atol=1e-6)


def test_a_state_in_another_order(calls):
    """As of a checkpoint that was written when the parameter had another layout."""
    torch.manual_seed(0)
    start, grads = torch.randn(6, 7), torch.randn(6, 6, 7)
    exact = torch.nn.Parameter(start.double())
    reference = torch.optim.AdamW([exact], **OPTIONS)
    for grad in grads:
        exact.grad = grad.double()
        reference.step()
    ours = torch.nn.Parameter(start.clone())
    first = AdamW([ours], fused=True, **OPTIONS)
    for grad in grads[:3]:
        ours.grad = grad.clone()
        first.step()
    ours = torch.nn.Parameter(ours.detach().t().contiguous().t())
    second = AdamW([ours], fused=True, **OPTIONS)
    second.load_state_dict(first.state_dict())
    for grad in grads[3:]:
        ours.grad = grad.clone()
        second.step()
    assert calls.count == 5
    torch.testing.assert_close(ours.detach().double(), exact.detach(), rtol=1e-5, atol=1e-6)


def test_a_parameter_with_gaps_is_left_to_torch(calls):
    found = []
    for kind in (AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(8, 3)[::2])
        optimizer = kind([parameter], **OPTIONS)
        for grad in torch.randn(4, 4, 3):
            parameter.grad = grad
            optimizer.step()
        found.append(parameter.detach())
    assert calls.count == 0
    assert torch.equal(*found)


def test_sparse_gradients_are_refused_by_torch():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter])
    parameter.grad = torch.ones(4)
    optimizer.step()
    parameter.grad = torch.ones(4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_hooks_run_once_a_step():
    (*_, parameter) = mine = parameters()
    optimizer, seen = AdamW(mine), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for _ in range(3):
        parameter.grad = torch.ones(())
        optimizer.step()
    assert seen == ["before", "after"] * 3


def test_a_closure_is_called():
    (parameter,) = mine = [torch.nn.Parameter(torch.ones(2))]
    optimizer = AdamW(mine, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


@needs_kernels
def test_a_scaler_of_gradients_is_heeded():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = AdamW([parameter], lr=0.1, fused=True), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    before = parameter.detach().clone()
    torch.testing.assert_close(before, torch.full((2,), 0.7), rtol=0, atol=5e-3)
    scaler.scale(parameter.sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter.detach(), before)


def test_gradients_can_be_zeroed_in_place():
    (parameter,) = mine = [torch.nn.Parameter(torch.ones(2))]
    parameter.grad = torch.ones(2)
    AdamW(mine).zero_grad(set_to_none=False)
    assert torch.equal(parameter.grad, torch.zeros(2))


@pytest.mark.parametrize("betas", [(0.9, 0.99999), (0.0, 0.999), (0.3, 1 - 1e-8), (0.99999, 0.9)])
def test_means_over_very_many_steps_or_only_one(betas, calls):
    ours, exact = parameters(), parameters(torch.float64)
    optimizer, reference = AdamW(ours, betas=betas), torch.optim.AdamW(exact, betas=betas)
    descend(optimizer, ours, 30)
    descend(reference, exact, 30)
    assert calls.count
    for mine, true in zip(ours, exact, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            found, expected = optimizer.state[mine][name].double(), reference.state[true][name]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
        torch.testing.assert_close(mine.detach().double(), true.detach(), rtol=1e-5, atol=1e-5)


def test_plain_adam_s_weight_decay_is_left_to_torch(calls):
    found = []
    for kind in (AdamW, torch.optim.AdamW):
        mine = parameters()
        optimizer = kind(mine, weight_decay=0.1)
        optimizer.param_groups[0]["decoupled_weight_decay"] = False
        descend(optimizer, mine, 4)
        found.append([parameter.detach() for parameter in mine])
    assert calls.count == 0
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("sizes", [(4, 300_000), (300_000, 4)])
def test_a_state_of_another_size_is_refused_by_torch(sizes):
    saved, wanted = (torch.nn.Parameter(torch.ones(size)) for size in sizes)
    first, second = AdamW([saved]), AdamW([wanted])
    saved.grad, wanted.grad = torch.ones_like(saved), torch.ones_like(wanted)
    first.step()
    second.load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError, match="size"):
        second.step()


def test_a_parameter_that_has_grown_is_refused_by_torch():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter])
    for size in (4, 300_000):
        parameter.data = torch.ones(size)
        parameter.grad = torch.ones(size)
        if size == 4:
            optimizer.step()
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()


def test_gradients_that_are_not_in_memory(calls):
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter], lr=0.1, weight_decay=0.0)
    for grad in (torch.ones(4), torch._efficientzerotensor((4,)), torch._neg_view(torch.ones(4))):
        parameter.grad = grad
        optimizer.step()
    assert calls.count == 0
    assert bool((parameter < 1).all())


class Wrapped(torch.Tensor):
    """A tensor whose numbers are in another one."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrap(x):
            return x.inner if isinstance(x, Wrapped) else x

        def wrap(x):
            return cls(x) if isinstance(x, torch.Tensor) and not isinstance(x, Wrapped) else x

        result = function(
            *torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {})
        )
        in_place = function.overloadpacket.__name__.endswith("_")
        return args[0] if in_place else torch.utils._pytree.tree_map(wrap, result)


def test_tensors_that_only_look_like_it(calls):
    parameter = torch.nn.Parameter(Wrapped(torch.ones(4)))
    optimizer = AdamW([parameter], lr=0.1, foreach=False)
    for _ in range(3):
        parameter.grad = Wrapped(torch.ones(4))
        optimizer.step()
    assert calls.count == 0
    assert bool((parameter.inner < 1).all())


def test_a_second_backward_pass_through_changed_parameters_is_noticed(calls):
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter])
    parameter.grad = torch.ones(4)
    optimizer.step()
    loss = (parameter**2).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert calls.count == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_it_shows_the_options_of_torch_s():
    """By which the trainer finds out what an optimiser takes."""
    assert inspect.signature(AdamW) == inspect.signature(torch.optim.AdamW)


def test_a_copy_goes_on_alone(calls):
    mine = parameters()
    optimizer = AdamW(mine)
    descend(optimizer, mine, 3)
    before = [parameter.detach().clone() for parameter in mine]
    twins, twin = copy.deepcopy((mine, optimizer))
    descend(twin, twins, 3)
    assert calls.count
    assert all(torch.equal(parameter, old) for parameter, old in zip(mine, before, strict=True))
    descend(optimizer, mine, 3)
    assert all(torch.equal(a, b) for a, b in zip(mine, twins, strict=True))
