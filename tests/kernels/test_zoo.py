"""Whatever tensor the kernels are given, they decline or compute what their twin does, and touch nothing else.

Under AddressSanitizer (`make test-kernels SANITIZE=1`) a number read or written outside of a tensor ends the process.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import twins
from specimens import SPECIMENS, TAKEN, UNREADABLE, guards_survive, is_dense, quiet
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import batch_norm as torch_batch_norm
from torch.utils.dlpack import to_dlpack
from twins import LIMITS, make_form, make_images, norm_by_kernel, norm_gradients

from pcdeq.kernels import binding

pytestmark = pytest.mark.skipif(binding._KERNELS is None, reason=binding.engine())


def numbers(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().resolve_neg().double()


@quiet
@pytest.mark.parametrize("specimen", SPECIMENS)
@pytest.mark.parametrize("which", ["weight", "offset", "slope", "start", "base"])
@pytest.mark.parametrize("shape", [(9,), (5, 6, 7)], ids=["dense", "conv"])
def test_solve(shape, which, specimen):
    form = make_form(shape, 4, "linear", transposed=True, gain=0.5)
    given = {"weight": form.weight, "offset": form.offset, "slope": form.slope}
    given |= {"start": torch.rand(form.offset.shape) if which == "start" else None}
    given |= {"base": torch.rand(shape) if which == "base" else None}
    given[which] = SPECIMENS[specimen](given[which])
    form = form._replace(**{name: given[name] for name in ("weight", "offset", "slope")})
    found = binding.solve(form, given["start"], given["base"], None, **LIMITS)
    assert found is not None or specimen not in TAKEN
    assert guards_survive(given[which])
    if found is not None:
        form = form._replace(weight=numbers(form.weight), offset=numbers(form.offset), slope=numbers(form.slope))
        exact = twins.solution(form)
        assert found.value.shape == exact.shape and found.converged.all()
        assert torch.allclose(found.value.double(), exact, rtol=1e-3, atol=1e-4 * float(exact.abs().max()))


@quiet
@pytest.mark.parametrize("specimen", SPECIMENS)
@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(which, specimen, training):
    given = list(make_images())
    given[which] = changed = SPECIMENS[specimen](given[which])
    unknown = {*UNREADABLE, "meta", "fake", "nested", "quantised"}
    known = [t for t in given if t is not changed or specimen not in unknown]
    before = [numbers(t) for t in known]
    y = norm_by_kernel(*given, training=training)
    # images in another order are torch's
    taken = specimen in TAKEN and (which > 0 or (is_dense(changed) and not changed.is_contiguous()))
    taken = taken and not (training and which > 2 and specimen == "of inference mode")  # which cannot be updated
    assert guards_survive(changed) and (y is not None or not taken)
    if y is not None:
        x, weight, bias, mean, variance = before
        exact = torch_batch_norm(x, mean, variance, weight, bias, training, 0.3, 1e-5)
        assert torch.allclose(y.detach().double(), exact, rtol=1e-5, atol=1e-5)
        for running, expected in zip(given[3:], (mean, variance), strict=True):
            assert torch.allclose(running.detach().double(), expected, rtol=1e-5, atol=1e-5)
    else:
        assert all(torch.equal(numbers(t).to_dense(), b.to_dense()) for t, b in zip(known, before, strict=True))


@quiet
@pytest.mark.parametrize("specimen", [name for name in SPECIMENS if name not in UNREADABLE])
def test_a_strange_gradient(specimen):
    """The kernel's backward declines as well, and torch's twin takes over."""
    (x, weight, *_), grad = make_images(), make_images(seed=1)[0]
    statistics = torch.stack([x.mean((0, 2, 3)), 1 / (x.var((0, 2, 3), correction=0) + 1e-5).sqrt(), weight])
    kernel = binding._BatchNorm(weight, weight, 0.3, 1e-5)
    expected = kernel.backward(grad, x, weight, statistics)
    changed = SPECIMENS[specimen](grad)
    if specimen in TAKEN:
        found = kernel._backward_by_kernel(changed, x, weight, statistics)
        assert all(map(torch.equal, found, expected))
    elif binding._takes(changed) and changed.shape == x.shape:
        found, exact = kernel.backward(changed, x, weight, statistics), norm_gradients(changed, x, weight, statistics)
        for ours, true in zip(found, exact, strict=True):
            assert torch.allclose(ours, true, rtol=1e-4, atol=1e-3)
    elif binding._takes(changed):
        assert kernel._backward_by_kernel(changed, x, weight, statistics) is None


class TestWhereTorchIsWatched:
    """Where somebody traces, transforms or fakes what torch does, a kernel would be missing."""

    def declines(self):
        form = make_form((5, 6, 7))
        assert binding.solve(form, None, None, None, **LIMITS) is None
        images = make_images()
        assert norm_by_kernel(*images) is None and norm_by_kernel(*images, training=False) is None

    @pytest.mark.parametrize("options", [{}, {"allow_non_fake_inputs": True}])
    def test_fake_mode(self, options):
        form, images = make_form((5, 6, 7)), make_images()
        with FakeTensorMode(**options):
            assert binding.solve(form, None, None, None, **LIMITS) is None
            assert norm_by_kernel(*images) is None and norm_by_kernel(*images, training=False) is None
            capsules = [to_dlpack(t) for t in images]
        y = torch.empty_like(images[0])
        try:
            binding._KERNELS.batch_norm_inference(*capsules, to_dlpack(y), 1e-5, 1)
        except ValueError:  # in some versions of torch such a capsule has the address 0
            return
        assert torch.equal(y, norm_by_kernel(*images, training=False))

    def test_another_mode(self):
        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                return function(*args, **(kwargs or {}))

        with Watch():
            self.declines()

    def test_forward_mode(self):
        with torch.autograd.forward_ad.dual_level():
            self.declines()

    def test_transforms(self):
        form, images, seen = make_form((5,)), make_images(), []

        def run(offset, x):
            seen.append(binding.solve(form._replace(offset=offset), None, None, None, **LIMITS))
            seen.append(norm_by_kernel(x, *images[1:], training=False))
            return offset.sum() + x.sum()

        torch.func.vmap(run)(form.offset[None], images[0][None])
        torch.func.grad(run)(form.offset, images[0])
        torch.func.functionalize(run)(form.offset, images[0])
        assert seen == [None] * 6


def test_many_threads_at_once():
    form = make_form((6, 9, 9), 8)
    images = make_images((8, 6, 9, 9))
    expected = binding.solve(form, None, None, None, **LIMITS).value
    normed = norm_by_kernel(*images, training=False)

    def work(_):
        value = binding.solve(form, None, None, None, **LIMITS).value
        return torch.equal(value, expected) and torch.equal(norm_by_kernel(*images, training=False), normed)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))
