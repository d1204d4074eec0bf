"""NODE and ANODE: what they integrate, what they count, and that 0 extra channels make no difference."""

from __future__ import annotations

import pytest
import torch
from torchdiffeq import odeint

from pcdeq.errors import ConvergenceError, UsageError
from pcdeq.models import build
from pcdeq.models.baselines.node import ANODE, NODE, Dopri5, ODEBlock
from pcdeq.solvers import Picard


def same_weights(filters: int = 5) -> tuple[NODE, ANODE]:
    torch.manual_seed(0)
    plain, augmented = NODE((filters,), (1, 8, 8)), ANODE((filters, 0), (1, 8, 8))
    augmented.load_state_dict(plain.state_dict())
    return plain, augmented


def test_anode_without_extra_channels_is_node():
    plain, augmented = same_weights()
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(plain(images), augmented(images))
    for model in (plain, augmented):
        model(images).square().sum().backward()
    for ours, theirs in zip(plain.parameters(), augmented.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_extra_channels_begin_at_zero():
    block, image = ODEBlock(2, filters=4, extra=3), torch.rand(2, 2, 8, 8)
    with torch.no_grad():
        block.field.outwards.weight.zero_()
        block.field.outwards.bias.zero_()  # nothing moves
    state = block(image)
    torch.testing.assert_close(state[:, :2], image)
    assert (state[:, 2:] == 0).all()


def test_the_time_is_seen():
    """dz/dt = t has the solution z(1) = z(0) + 1/2."""
    block = ODEBlock(1, filters=1, solver=Dopri5(tol=1e-6)).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
        block.field.outwards.weight[0, 0] = 1.0  # the channel of the time
    image = torch.rand(2, 1, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(block(image), image + 0.5, rtol=0, atol=1e-9)


def test_gradients_against_backpropagation_through_the_solver():
    torch.manual_seed(0)
    block = ODEBlock(1, filters=4, extra=1, solver=Dopri5(tol=1e-9)).double()
    with torch.no_grad():  # units that are always on or always off: at a kink neither method has its order
        for layer in (block.field.inwards, block.field.across):
            layer.bias.copy_(torch.tensor([9.0, -9.0, 9.0, -9.0]))
    image = torch.randn(2, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    wanted = [image, *block.field.parameters()]
    state = block(image)
    cotangent = torch.randn_like(state)
    adjoint = torch.autograd.grad(state, wanted, cotangent)
    start = torch.cat([image, torch.zeros_like(image)], dim=1)
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    unrolled = odeint(block.field, start, times, method="rk4", options={"step_size": 1 / 64})[-1]
    torch.testing.assert_close(state, unrolled, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(adjoint, torch.autograd.grad(unrolled, wanted, cotangent), rtol=1e-6, atol=1e-6)


def test_evaluations_are_counted_both_ways():
    block = ODEBlock(1, filters=4)
    calls = []
    block.field.register_forward_hook(lambda *_: calls.append(1))
    state = block(torch.rand(3, 1, 8, 8))
    forward = len(calls)
    assert block.last_forward.steps == forward >= 8
    assert block.last_backward is None
    state.sum().backward()
    assert block.last_backward.steps == len(calls) - forward >= 8
    assert block.last_forward.steps == forward and block.last_forward.samples == 3
    block.eval()
    with torch.no_grad():
        block(torch.rand(2, 1, 8, 8))
    assert block.last_backward is None


def test_a_finer_tolerance_costs_more():
    torch.manual_seed(0)
    block = ODEBlock(1, filters=4)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(3.0)
    steps = []
    for tol in (1e-2, 1e-6):
        block.solver = block.solver.with_options(tol=tol)
        block(torch.rand(1, 1, 8, 8))
        steps.append(block.last_forward.steps)
    assert steps[0] < steps[1]


def test_what_cannot_be_integrated_is_one_clear_error():
    block = ODEBlock(1, filters=4, solver=Dopri5(max_steps=1))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(5.0)
    with pytest.raises(ConvergenceError, match="cannot be integrated forward"):
        block(torch.rand(1, 1, 8, 8))
    block.solver = Dopri5()
    state = block(torch.rand(1, 1, 8, 8))
    with pytest.raises(ConvergenceError, match="cannot be integrated backward"):
        (state.sum() * torch.nan).backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"solver": Picard()}, "dopri5"), ({"activation": "tanh"}, "an ODE takes no activation")],
)
def test_options_that_an_ode_does_not_take(options, message):
    with pytest.raises(UsageError, match=message):
        build("node", **options)


def test_channels_are_filters_and_extra_ones():
    with pytest.raises(UsageError, match="filters and its extra channels"):
        ANODE((4,))
    with pytest.raises(UsageError, match="channels of NODE"):
        NODE((4, 2))
