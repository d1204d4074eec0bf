"""Whatever tensor the kernels are given, they decline or compute what their twin does, and touch nothing else.

Under AddressSanitizer (`make test-kernels SANITIZE=1`) a number read or written outside of a tensor ends the process.
"""

from __future__ import annotations

import inspect
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import twins
from test_binding import LAST, LIMITS, make_form, make_images, norm_by_kernel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import batch_norm as torch_batch_norm
from torch.utils.dlpack import from_dlpack, to_dlpack

from pcdeq.kernels import binding

pytestmark = pytest.mark.skipif(binding._KERNELS is None, reason=binding.engine())

GUARD = 12345.0


class Subclass(Tensor):
    """A tensor of somebody's own."""


def guarded(x: Tensor) -> Tensor:
    """The same numbers in the middle of a larger piece of memory."""
    buffer = torch.full((x.numel() + 64,), GUARD, dtype=x.dtype)
    inside = buffer[32:-32].as_strided(x.shape, x.stride() if is_dense(x) else x.contiguous().stride(), 32)
    inside.copy_(x)
    inside.buffer = buffer
    return inside


def is_unreal(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


def is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=LAST))


def guards_survive(x: Tensor) -> bool:
    buffer = getattr(x, "buffer", None)
    if buffer is None:
        return True
    guards = torch.cat([buffer[:32], buffer[-32:]])
    return torch.equal(guards, torch.full_like(guards, GUARD))


def resized(factor: float):
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x.untyped_storage().resize_(int(x.untyped_storage().nbytes() * factor) // 4 * 4)
        return x

    return change


def misaligned(x: Tensor) -> Tensor:
    buffer = bytearray(4 * x.numel() + 4)
    return torch.frombuffer(buffer, dtype=torch.float32, offset=1, count=x.numel()).view(x.shape).copy_(x)


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def shifted_past_the_end(x: Tensor) -> Tensor:
    longer = torch.cat([x.flatten(), x.flatten()])
    view = longer[x.numel() :].view(x.shape)
    longer.untyped_storage().resize_(4 * x.numel())
    return view


# What is done to a good tensor; some of it the kernels must take, with the numbers that it has.
TAKEN = {
    "as it is": lambda x: x,
    "in other memory": lambda x: x.clone(),
    "between guards": guarded,
    "first and last dimension turned": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every other number": lambda x: torch.stack([x, torch.full_like(x, GUARD)], -1)[..., 0],
    "a storage that grew": resized(3.0),
    "a parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "of inference mode": inference,
}
STRANGE = {
    "strides of 0": lambda x: x[..., :1].expand(x.shape),
    "all strides of 0": lambda x: x.flatten()[0].expand(x.shape),
    "windows that overlap": lambda x: (0.02 * torch.rand(x.numel() + 8)).as_strided(x.shape, [1] * x.ndim),
    "one more": lambda x: torch.cat([x, x[:1]]),
    "one less": lambda x: x[:-1],
    "last one more": lambda x: torch.cat([x, x[..., :1]], -1),
    "last one less": lambda x: x[..., :-1],
    "one dimension more": lambda x: x[None],
    "one dimension less": lambda x: x.flatten(0, 1) if x.ndim > 1 else x[0],
    "flat": lambda x: x.flatten(),
    "a number": lambda x: torch.tensor(1.0),
    "empty": lambda x: x[:0],
    "empty in the middle": lambda x: torch.empty(*x.shape[:-1], 0),
    "empty and huge": lambda x: torch.empty([0] + [2**20] * (x.ndim - 1)),
    "a storage that shrank": resized(0.5),
    "a storage that is gone": resized(0.0),
    "a view past the end": shifted_past_the_end,
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "int32": lambda x: (100 * x).int(),
    "int64": lambda x: (100 * x).long(),
    "bool": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "real part": lambda x: torch.complex(x, x).real,
    "imaginary part of a conjugate": lambda x: torch.complex(x, -x).conj().imag,
    "a subclass": lambda x: x.as_subclass(Subclass),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "a negative view": lambda x: torch._neg_view(-x),
    "lazy zeros": lambda x: torch._efficientzerotensor(x.shape),
    "misaligned": misaligned,
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "quantised": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "wants a gradient": lambda x: x.clone().requires_grad_(),
    "channels last": lambda x: x.contiguous(memory_format=LAST) if x.ndim == 4 else x.clone(),
}
SPECIMENS = TAKEN | STRANGE
# torch itself reads beyond the memory of these.
UNREADABLE = {"a storage that shrank", "a storage that is gone", "a view past the end"}


def numbers(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().resolve_neg().double()


quiet = pytest.mark.filterwarnings("ignore:.*(Sparse|nested|quant|not writable|FakeTensor|complex).*:UserWarning")


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
    _, x, weight, _, grad = images_for_backward()
    statistics = torch.stack([x.mean((0, 2, 3)), 1 / (x.var((0, 2, 3), correction=0) + 1e-5).sqrt(), weight])
    kernel = binding._BatchNorm(weight, weight, 0.3, 1e-5)
    expected = kernel.backward(grad, x, weight, statistics)
    changed = SPECIMENS[specimen](grad)
    if specimen in TAKEN:
        found = kernel._backward_by_kernel(changed, x, weight, statistics)
        assert all(map(torch.equal, found, expected))
    elif binding._takes(changed) and changed.shape == x.shape:
        found, exact = kernel.backward(changed, x, weight, statistics), by_torch(changed, x, weight, statistics)
        for ours, true in zip(found, exact, strict=True):
            assert torch.allclose(ours, true, rtol=1e-4, atol=1e-3)
    elif binding._takes(changed):
        assert kernel._backward_by_kernel(changed, x, weight, statistics) is None


def images_for_backward():
    x, weight, bias, *_ = make_images()
    return 0, x, weight, bias, make_images(seed=1)[0]


def by_torch(grad, x, weight, statistics):
    saved = (None, None, statistics[0], statistics[1], True, 1e-5, (True, True, True))
    return torch.ops.aten.native_batch_norm_backward(grad.detach(), x, weight, *saved)


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


# The functions of the extension themselves, whatever they are given: name, arguments in order, and which are written.


def solve_arguments(conv: bool, last: bool = False) -> dict[str, object]:
    form = make_form((5, 6, 7) if conv else (9,), 4, "linear", transposed=True, gain=0.5)
    lay = (lambda t: t.contiguous(memory_format=LAST)) if last else (lambda t: t)
    return {
        "conv": conv,
        "transposed": True,
        "activation": binding._CODES["linear"],
        "offset": lay(form.offset),
        "weight": form.weight,
        "slope": lay(form.slope),
        "start": lay(form.slope + 1),
        "base": lay(form.slope[:1] - 1),
        "out": lay(torch.zeros(form.offset.shape)),
        "steps": torch.zeros(4, dtype=torch.int64),
        "residual": torch.zeros(4),
        "converged": torch.zeros(4, dtype=torch.bool),
        "tol": 1e-5,
        "decay": 0.9,
        "low": -torch.inf,
        "high": torch.inf,
        "steps_before": 0,
        "max_steps": 100,
        "threads": 2,
    }


def norm_arguments(kind: str) -> dict[str, object]:
    x, weight, bias, mean, variance = make_images()
    statistics = torch.stack([mean, variance, bias])
    if kind == "batch_norm_forward":
        return {
            "x": x, "weight": weight, "bias": bias, "y": torch.zeros_like(x), "statistics": torch.zeros(3, 5),
            "eps": 1e-5, "threads": 2,
        }  # fmt: skip
    if kind == "batch_norm_inference":
        return {
            "x": x, "weight": weight, "bias": bias, "mean": mean, "variance": variance, "y": torch.zeros_like(x),
            "eps": 1e-5, "threads": 2,
        }  # fmt: skip
    return {
        "x": x, "grad": make_images(seed=1)[0], "weight": weight, "statistics": statistics,
        "grad_x": torch.zeros_like(x), "grad_weight": torch.zeros(5), "grad_bias": torch.zeros(5), "threads": 2,
    }  # fmt: skip


CALLS = {
    "solve (dense)": lambda: solve_arguments(conv=False),
    "solve (conv)": lambda: solve_arguments(conv=True),
    "solve (conv, channels last)": lambda: solve_arguments(conv=True, last=True),
    "batch_norm_forward": lambda: norm_arguments("batch_norm_forward"),
    "batch_norm_inference": lambda: norm_arguments("batch_norm_inference"),
    "batch_norm_backward": lambda: norm_arguments("batch_norm_backward"),
}
WRITTEN = {"out", "steps", "residual", "converged", "y", "grad_x", "grad_weight", "grad_bias"}
OPTIONAL = {"start", "base"}


def written_by(call: str) -> set[str]:
    return WRITTEN | ({"statistics"} if call == "batch_norm_forward" else set())


def run(call: str, arguments: dict[str, object]) -> object:
    function = getattr(binding._KERNELS, call.split(" ")[0])
    return function(*(to_dlpack(a) if isinstance(a, Tensor) else a for a in arguments.values()))


def results(call: str) -> dict[str, Tensor]:
    arguments = CALLS[call]()
    run(call, arguments)
    return {name: arguments[name] for name in written_by(call) & arguments.keys()}


def tensor_parameters():
    return [(call, name) for call in CALLS for name, value in CALLS[call]().items() if isinstance(value, Tensor)]


def refuses(call: str, arguments: dict[str, object], name: str) -> None:
    """It says which argument is wrong, and has written nothing."""
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor) and not is_unreal(value)}
    before = {key: value.clone() for key, value in tensors.items() if value.untyped_storage().nbytes()}
    # the first tensor says what sizes the others must have
    with pytest.raises(ValueError, match=r"^\w+ " if name in ("offset", "x") else f"^{name} "):
        run(call, arguments)
    for key, value in before.items():
        assert torch.equal(arguments[key], value)


def test_every_function_of_the_extension_is_here():
    functions = {name for name, value in vars(binding._KERNELS).items() if inspect.isbuiltin(value)}
    assert functions == {call.split(" ")[0] for call in CALLS}


def test_the_raw_functions_compute_what_their_twins_do():
    for conv in (False, True):
        arguments = solve_arguments(conv)
        run("solve", arguments)
        form = make_form((5, 6, 7) if conv else (9,), 4, "linear", transposed=True, gain=0.5)
        assert torch.allclose(arguments["out"].double(), twins.solution(form), rtol=1e-3, atol=1e-4)
    x, weight, bias, mean, variance = make_images()
    y = results("batch_norm_forward")["y"]
    assert torch.allclose(y, torch_batch_norm(x, None, None, weight, bias, True), rtol=1e-4, atol=1e-4)
    y = results("batch_norm_inference")["y"]
    assert torch.allclose(y, torch_batch_norm(x, mean, variance, weight, bias), rtol=1e-4, atol=1e-4)
    statistics = torch.stack([mean, variance, bias])
    exact = by_torch(make_images(seed=1)[0], x, weight, statistics)
    found = results("batch_norm_backward")
    for name, true in zip(("grad_x", "grad_weight", "grad_bias"), exact, strict=True):
        assert torch.allclose(found[name], true, rtol=1e-4, atol=1e-2)


WITHOUT_MEMORY = ("lazy zeros", "misaligned", "a storage that is gone", "fake")
# That a storage is too small, C cannot see.
RAW = [name for name in SPECIMENS if name not in ("a storage that shrank", "a view past the end")]


def lies_like(x: Tensor, other: Tensor) -> bool:
    """Whether they are of one kind, dimensions of size 1 aside."""
    if x.device != other.device or x.dtype != other.dtype or x.shape != other.shape:
        return False
    return all(s == t or size == 1 for size, s, t in zip(x.shape, x.stride(), other.stride(), strict=True))


@quiet
@pytest.mark.parametrize("specimen", RAW)
@pytest.mark.parametrize(("call", "name"), tensor_parameters())
def test_raw_tensors(call, name, specimen):
    arguments, expected = CALLS[call](), results(call)
    original = arguments[name]
    try:
        changed = SPECIMENS[specimen](original)
        to_dlpack(changed)
    except (RuntimeError, BufferError, TypeError, NotImplementedError):
        return  # there is no such tensor, or no capsule of it
    arguments[name] = changed
    if lies_like(changed, original) and specimen not in WITHOUT_MEMORY:
        run(call, arguments)
        if specimen in ("a negative view", "windows that overlap"):  # C cannot see the sign; a vector of other numbers
            return
        for key, value in expected.items():
            assert torch.equal(arguments[key], value)
        assert guards_survive(changed)
    else:
        refuses(call, arguments, name)


@pytest.mark.parametrize(("call", "name"), tensor_parameters())
def test_what_is_no_fresh_capsule(call, name):
    used = to_dlpack(CALLS[call]()[name])
    kept = from_dlpack(used)
    versioned = torch.zeros(3).__dlpack__(max_version=(1, 0))
    for wrong in (None, used, versioned, 0, 140737488355328, "x", [1.0], object(), b"dltensor"):
        if wrong is None and name in OPTIONAL:
            continue
        arguments = CALLS[call]()
        arguments[name] = wrong
        refuses(call, arguments, name)
    assert kept is not None


@pytest.mark.parametrize(("call", "name"), [(c, n) for c, n in tensor_parameters() if n in written_by(c)])
def test_what_is_written_lies_apart(call, name):
    expected = results(call)
    for other, value in CALLS[call]().items():
        arguments = CALLS[call]()
        target = arguments[name]
        if not isinstance(value, Tensor) or other == name or value.dtype != target.dtype:
            continue
        size = target.numel()
        for shift in (0, 1, value.numel() - 1, value.numel()):  # from one place in memory to side by side
            memory = torch.zeros(shift + size + value.numel(), dtype=target.dtype)
            first = memory.as_strided(value.shape, value.stride(), 0).copy_(value)
            arguments = CALLS[call]()
            arguments[other] = first
            arguments[name] = memory.as_strided(target.shape, target.stride(), shift)
            if shift < value.numel():
                with pytest.raises(ValueError, match="overlaps another argument"):
                    run(call, arguments)
                continue
            run(call, arguments)
            assert all(torch.equal(arguments[key], true) for key, true in expected.items())


NUMBERS = [None, "1", [], torch.ones(1), 2**31, 2**63, 2**64, -1, -(2**70), 10**400, torch.nan]


@pytest.mark.parametrize("call", CALLS)
def test_raw_scalars(call):
    for name, value in CALLS[call]().items():
        if isinstance(value, Tensor):
            continue
        for wrong in (*NUMBERS, *([1.0] if isinstance(value, int) else [])):
            if isinstance(wrong, int) and wrong < 10**400 and name in ("low", "high", "tol", "eps"):
                continue  # a number like others
            arguments = CALLS[call]()
            arguments[name] = wrong
            with pytest.raises(ValueError, match=f"^({name}|max_steps) "):
                run(call, arguments)


def test_scalars_in_terms_of_each_other():
    for changes, name in (
        ({"steps_before": 100}, "max_steps"),
        ({"max_steps": 0}, "max_steps"),
        ({"low": 0.1}, "low"),
        ({"high": -0.1}, "high"),
        ({"decay": 1.1}, "decay"),
        ({"threads": 0}, "threads"),
        ({"threads": 100_000}, "threads"),
        ({"activation": 8}, "activation"),
        ({"conv": True}, "offset"),
        ({"conv": 2}, "conv"),
        ({"slope": None}, "slope"),
    ):
        refuses("solve", solve_arguments(conv=False) | changes, name)


@pytest.mark.parametrize("call", CALLS)
def test_too_few_and_too_many(call):
    arguments = CALLS[call]()
    for count in range(len(arguments)):
        with pytest.raises(ValueError, match="is missing"):
            run(call, dict(list(arguments.items())[:count]))
    with pytest.raises(ValueError, match="arguments are too many"):
        run(call, arguments | {"more": 1})


def strange_view(generator: random.Random, dtype: torch.dtype) -> Tensor:
    """A view of any shape and strides of memory that just holds it."""
    shape = [generator.choice((1, 2, 3, 3, 5, 8, 9)) for _ in range(generator.choice((1, 2, 2, 4, 4, 4)))]
    order = generator.choice((sorted(range(len(shape))), [0, 2, 3, 1] if len(shape) == 4 else list(range(len(shape)))))
    strides, numbers = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension], numbers = numbers, numbers * shape[dimension]
    if generator.random() < 0.1:
        strides[generator.randrange(len(shape))] = generator.randrange(4)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.ones(last + 1).to(dtype).as_strided(shape, strides)


@pytest.mark.parametrize("call", CALLS)
def test_any_tensors_at_all(call):
    """Any number of arguments at once have other shapes: most calls are refused, none reads beyond."""
    generator, refused = random.Random(0), 0
    for _ in range(400):
        arguments = CALLS[call]()
        names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        for name in generator.sample(names, generator.randrange(1, len(names))):
            arguments[name] = strange_view(generator, arguments[name].dtype)
        if generator.random() < 0.5:  # all that have the shape of the images get another one
            images = strange_view(generator, torch.float32)
            for name in names:
                if arguments[name].shape == CALLS[call]()["x" if "x" in arguments else "offset"].shape:
                    arguments[name] = images.clone()
        try:
            run(call, arguments)
        except ValueError:
            refused += 1
    assert refused > 0
