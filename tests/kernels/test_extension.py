"""The functions of the extension themselves, whatever they are given: right, or refused before anything is touched."""

from __future__ import annotations

import ctypes
import inspect
import random

import pytest
import torch
import twins
from specimens import SPECIMENS, guards_survive, is_unreal, quiet
from torch import Tensor
from torch.nn.functional import batch_norm as torch_batch_norm
from torch.utils.dlpack import from_dlpack, to_dlpack
from twins import LAST, make_form, make_images, norm_gradients, weight_gradient

from pcdeq.kernels import binding

pytestmark = pytest.mark.skipif(binding._KERNELS is None, reason=binding.engine())


def solve_arguments(conv: bool, last: bool = False) -> dict[str, object]:
    form = make_form((5, 6, 7) if conv else (9,), 4, "linear", transposed=True, gain=0.5)
    lay = (lambda t: t.contiguous(memory_format=LAST)) if last else (lambda t: t)
    return {
        "conv": conv,
        "transposed": True,
        "activation": binding._CODES.get("linear", 0),
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


def convolve_arguments(last: bool = False) -> dict[str, object]:
    torch.manual_seed(0)
    layout = LAST if last else torch.contiguous_format
    x, plus = (
        torch.randn(4, c, *size).double().contiguous(memory_format=layout) for c, size in ((5, (6, 7)), (9, (2, 4)))
    )
    weight, y = torch.randn(9, 5, 3, 2).double(), torch.zeros_like(plus)
    return {
        "rows": 3, "columns": 2, "stride": 2, "top": 0, "left": 1, "x": x, "y": y, "weight": weight, "plus": plus,
        "threads": 2,
    }  # fmt: skip


def gradient_arguments(last: bool = False) -> dict[str, object]:
    torch.manual_seed(0)
    lay = (lambda t: t.contiguous(memory_format=LAST)) if last else (lambda t: t)
    z, u = lay(torch.rand(4, 5, 6, 7)), lay(torch.randn(4, 5, 6, 7))
    return {"z": z, "u": u, "gradient": torch.zeros(5, 5, 3, 3), "threads": 2}


CALLS = {
    "solve (dense)": lambda: solve_arguments(conv=False),
    "solve (conv)": lambda: solve_arguments(conv=True),
    "solve (conv, channels last)": lambda: solve_arguments(conv=True, last=True),
    "convolve": convolve_arguments,
    "convolve (channels last)": lambda: convolve_arguments(last=True),
    "weight_gradient": gradient_arguments,
    "weight_gradient (channels last)": lambda: gradient_arguments(last=True),
    "batch_norm_forward": lambda: norm_arguments("batch_norm_forward"),
    "batch_norm_inference": lambda: norm_arguments("batch_norm_inference"),
    "batch_norm_backward": lambda: norm_arguments("batch_norm_backward"),
}
WRITTEN = {"out", "steps", "residual", "converged", "y", "grad_x", "grad_weight", "grad_bias", "gradient"}
OPTIONAL = {"start", "base", "plus"}


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
    with pytest.raises(ValueError, match=r"^\w+ " if name in ("offset", "x", "z") else f"^{name} "):
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
    for last in (False, True):
        arguments = convolve_arguments(last)
        run("convolve", arguments)
        exact = torch.conv2d(arguments["x"], arguments["weight"], stride=2, padding=(0, 1)) + arguments["plus"]
        assert torch.allclose(arguments["y"], exact, rtol=0, atol=1e-13)
    for call in ("weight_gradient", "weight_gradient (channels last)"):
        given = gradient_arguments()
        exact = weight_gradient(given["z"].double(), given["u"].double())
        assert torch.allclose(results(call)["gradient"].double(), exact, rtol=0, atol=1e-4)
    x, weight, bias, mean, variance = make_images()
    y = results("batch_norm_forward")["y"]
    assert torch.allclose(y, torch_batch_norm(x, None, None, weight, bias, True), rtol=1e-4, atol=1e-4)
    y = results("batch_norm_inference")["y"]
    assert torch.allclose(y, torch_batch_norm(x, mean, variance, weight, bias), rtol=1e-4, atol=1e-4)
    statistics = torch.stack([mean, variance, bias])
    exact = norm_gradients(make_images(seed=1)[0], x, weight, statistics)
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


@pytest.mark.parametrize(("call", "name"), tensor_parameters())
def test_each_check_says_what_is_wrong(call, name):
    for change, message in (
        (lambda t: t[None], "has the wrong number of dimensions"),
        (lambda t: t.to(torch.int16), "must be (float32|float64|int64|bool)"),
        (lambda t: t.flip(0)[:0], "(is empty or too large|does not have the size)"),
        (lambda t: torch.stack([t, t], -1)[..., 0], "does not lie in memory as it must"),
        (lambda t: t.to("meta"), "must be on the CPU"),
    ):
        arguments = CALLS[call]()
        arguments[name] = change(arguments[name])
        try:
            to_dlpack(arguments[name])
        except BufferError:  # torch makes no capsule of it
            continue
        with pytest.raises(ValueError, match=f"^{name} {message}"):
            run(call, arguments)


class Forged(ctypes.Structure):
    """What is in a capsule, by the documentation of DLPack."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )

    @classmethod
    def inside(cls, capsule: object) -> Forged:
        find = ctypes.pythonapi.PyCapsule_GetPointer
        find.restype, find.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        return cls.from_address(find(capsule, b"dltensor"))


def test_capsules_that_torch_would_not_make_here():
    expected, most = results("batch_norm_inference")["y"], 2**31 - 1

    def call(**changes):
        arguments = norm_arguments("batch_norm_inference")
        capsules = {name: to_dlpack(a) if isinstance(a, Tensor) else a for name, a in arguments.items()}
        inside = Forged.inside(capsules["weight" if "strides" in changes else "x"])
        before = {name: getattr(inside, name) for name in changes}
        for name, value in changes.items():
            setattr(inside, name, value(inside) if callable(value) else value)
        try:
            binding._KERNELS.batch_norm_inference(*capsules.values())
        finally:  # torch frees what it made
            for name, value in before.items():
                setattr(inside, name, value)
        assert torch.equal(arguments["y"], expected)

    call(strides=None)  # as usual
    call(data=lambda inside: inside.data - 12, byte_offset=12)
    for changes, message in (
        ({"device": 2}, "x must be on the CPU"),
        ({"lanes": 4}, "x must be float32"),
        ({"code": 0}, "x must be float32"),
        ({"data": None}, "x has no memory"),
        ({"data": None, "byte_offset": 64}, "x has no memory"),
        ({"byte_offset": 2}, "x has no memory, or is not aligned"),
        ({"shape": (ctypes.c_int64 * 4)(most, most, most, most)}, "x is too large"),
        ({"shape": (ctypes.c_int64 * 4)(2**21, 2**20, 2**21 + 1, 1)}, "x is too large"),  # 2**43 bytes modulo 2**64
        ({"shape": (ctypes.c_int64 * 4)(1, 2**40, 1, 1)}, "x is empty or too large"),
        ({"shape": (ctypes.c_int64 * 4)(4, -5, 6, 7)}, "x is empty or too large"),
        ({"shape": (ctypes.c_int64 * 4)(1, 2**21, 1, 1)}, "x is too large"),
        ({"data": 2**64 - 64}, "x is too large"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call(**changes)


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
                if arguments[name].shape == next(v for v in CALLS[call]().values() if isinstance(v, Tensor)).shape:
                    arguments[name] = images.clone()
        try:
            run(call, arguments)
        except ValueError:
            refused += 1
    assert refused > 0
