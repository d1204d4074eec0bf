"""torch.compile, torch.export, ONNX, torch.func, forward-mode AD, fake and distributed tensors: one list."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from problems import ACTIVATIONS, Circulant, make_input, make_layer
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import pcdeq
from pcdeq.errors import ConvergenceError, ConvergenceWarning
from pcdeq.models import MC, SC, L
from pcdeq.operations import SOLVERS, equilibrium_operator, from_words, in_words, linear_operator

KINDS = ("dense", "conv2d")
TIGHT = pcdeq.Anderson(tol=1e-12)
each_kind = pytest.mark.parametrize("kind", KINDS)
# What torch says about itself while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def own_activation() -> pcdeq.Activation:
    return pcdeq.Activation("own", lambda y: y / (2 + y), supremum=1.0)


def taught(kind: str, activation: str = "tanh", samples: int = 3, **options) -> pcdeq.PcDEQ:
    """A layer whose warm start has learned something."""
    layer = make_layer(kind, activation, solver=options.pop("solver", TIGHT), floor=0.05, **options)
    layer(make_input(kind, samples=samples)).sum().backward()
    layer.zero_grad()
    return layer


def value_and_gradients(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    value = function(x)
    return [value.detach(), *torch.autograd.grad(value.square().sum(), [x, *model.parameters()])]


def assert_close(actual, expected, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


class Every(nn.Module):
    """A layer of each activation, side by side, so that one graph has them all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(taught(kind, activation) for activation in ACTIVATIONS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers])


class TestCompile:
    @each_kind
    def test_every_activation_trains_and_infers_in_one_graph_for_any_batch(self, kind):
        model = Every(kind)
        reference, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        graphs = []
        for samples in (5, 7):  # not a size of something else, which torch would take for the same
            x = make_input(kind, samples=samples)
            expected = value_and_gradients(reference, reference, x)
            assert_close(value_and_gradients(compiled, model, x), expected)
            with torch.no_grad():
                assert_close(compiled(x), expected[0])
            graphs.append(counter.frame_count)
        assert graphs[0] == graphs[1] > 0

    def test_inductor(self):
        """A dense layer; the page "On a GPU, with compilers", which is run too, has a convolutional one."""
        layer = taught("dense", "sigmoid", dtype=torch.float32, solver=pcdeq.Anderson(tol=1e-6))
        reference, x = copy.deepcopy(layer), make_input("dense", samples=3, dtype=torch.float32)
        compiled = torch.compile(layer, fullgraph=True)
        assert_close(value_and_gradients(compiled, layer, x), value_and_gradients(reference, reference, x), 1e-4)

    @pytest.mark.parametrize("options", [{"gradient": "phantom"}, {"gradient": "jacobian-free"}, {"weight_norm": False},
                                         {"solver": pcdeq.Picard(tol=1e-12, stop="batch")},
                                         {"solver": pcdeq.Newton(tol=1e-12)}], ids=str)  # fmt: skip
    def test_the_options_of_a_layer(self, options):
        layer, x = taught("dense", **options), make_input("dense", samples=3)
        reference = copy.deepcopy(layer)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_close(value_and_gradients(compiled, layer, x), value_and_gradients(reference, reference, x))

    def test_channels_last(self):
        layer, x = taught("conv2d"), make_input("conv2d", samples=3).to(memory_format=torch.channels_last)
        reference = copy.deepcopy(layer)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_close(value_and_gradients(compiled, layer, x), value_and_gradients(reference, reference, x))
        assert compiled(x).is_contiguous(memory_format=torch.channels_last)

    @pytest.mark.parametrize("part", ["operator", "activation", "injection", "solver", "gradient"])
    def test_a_part_of_ones_own_may_break_the_graph_but_is_right(self, part):
        options = {
            "operator": {},
            "activation": {"activation": own_activation()},
            "injection": {"injection": lambda x: x.square()},
            "solver": {"solver": pcdeq.Certified(pcdeq.Anderson(tol=1e-6))},
            "gradient": {"gradient": "unrolled"},
        }[part]
        operator = Circulant(taps=2) if part == "operator" else pcdeq.PcDEQLinear(4).operator
        layer = pcdeq.PcDEQ(operator, **{"solver": TIGHT, "warm_start": False, **options}).double()
        x = torch.randn(3, 4, dtype=torch.float64)
        compiled = torch.compile(layer, backend="aot_eager")
        assert_close(value_and_gradients(compiled, layer, x), value_and_gradients(layer, layer, x))

    @pytest.mark.parametrize("whole", [True, False])
    def test_a_gradient_checkpoint_inside(self, whole):
        layer, x = taught("dense"), make_input("dense", samples=5)
        reference = copy.deepcopy(layer)
        compiled = torch.compile(
            lambda x: checkpoint(layer, x, use_reentrant=False), fullgraph=whole, backend="aot_eager"
        )
        with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=whole):
            assert_close(value_and_gradients(compiled, layer, x), value_and_gradients(reference, reference, x))

    @pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
    def test_around_a_transform_the_graph_breaks_and_is_right(self):
        layer, x = taught("dense"), make_input("dense", samples=5)
        assert_close(torch.compile(torch.func.vmap(layer), backend="aot_eager")(x), layer(x))

    def test_what_a_layer_records_in_a_compiled_graph(self):
        """Its forward solve, and nothing of backward, where nobody but the operators is there to hear of it."""
        layer, x = taught("dense"), make_input("dense", samples=7)
        learned, observed = layer.warm.product.clone(), int(layer.warm.observed)
        assert layer.last_backward is not None
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x).sum().backward()
        recorded, backward = layer.last_forward, layer.last_backward
        layer.eval()(x)
        assert recorded == layer.last_forward  # the same steps: it starts where the layer has learned to
        assert recorded.samples == 7 and backward is None
        assert torch.equal(layer.warm.product, learned) and int(layer.warm.observed) == observed

    def test_a_failure_is_told_in_both_directions(self):
        layer = make_layer("dense", solver=pcdeq.Anderson(tol=1e-12, max_steps=2))
        compiled, x = torch.compile(layer, fullgraph=True, backend="aot_eager"), make_input("dense")
        with pytest.warns(ConvergenceWarning, match="forward solve: 2 of 2"):
            value = compiled(x)
        with pytest.warns(ConvergenceWarning, match="backward solve"):
            value.sum().backward()
        layer.solver = layer.solver.with_options(throw=True)
        with pytest.raises(ConvergenceError, match="forward solve"):
            compiled(x)


class Own(nn.Module):
    """Somebody's network: no class of ours, no line of layers."""

    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.images = pcdeq.PcDEQConv2d(2, "tanh", **options)
        self.vectors = pcdeq.PcDEQLinear(8, "sigmoid", **{key: options[key] for key in options if key != "rate"})
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        features = self.last((x + self.images(self.first(x)) * 0.5).flatten(1))
        return self.vectors(features) - self.vectors(2 * features)


PICTURES = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(1))
OTHERS = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(2))


class TestExport:
    @pytest.mark.parametrize("training", [False, True])
    def test_a_model_is_exported_saved_loaded_and_run(self, training):
        model = Own().train(training)
        with warnings.catch_warnings(action="ignore"):
            program = torch.export.export(model, (PICTURES,), dynamic_shapes=({0: torch.export.Dim("n")},))
            file = io.BytesIO()
            torch.export.save(program, file)
            file.seek(0)
            loaded = torch.export.load(file).module()
        assert_close(loaded(OTHERS), model(OTHERS), 1e-5)
        assert model.images.last_forward.samples == 5

    def test_strict(self):
        model = Own().eval()
        program = torch.export.export(model, (PICTURES,), strict=True)
        assert_close(program.module()(PICTURES), model(PICTURES), 1e-5)

    def test_a_part_of_ones_own_is_refused(self):
        layer = pcdeq.PcDEQLinear(4, own_activation())
        with pytest.raises(pcdeq.PcdeqError, match=r"pcdeq\.unroll"):
            torch.export.export(layer, (torch.randn(2, 4),))

    def test_jit_trace_is_refused(self):
        with pytest.raises(pcdeq.PcdeqError, match=r"torch\.jit\.trace .* use torch\.export or pcdeq\.unroll$"):
            torch.jit.trace(Own(), (PICTURES,))

    @pytest.mark.parametrize("make", [Own, lambda: pcdeq.PcDEQLinear(4)])
    def test_symbolic_trace_is_refused(self, make):
        with pytest.raises(pcdeq.PcdeqError, match="symbolic_trace cannot see a solve: use"):
            torch.fx.symbolic_trace(make())

    def test_make_fx_sees_one_operator(self):
        layer, x = taught("dense").eval(), make_input("dense")
        graph = make_fx(layer)(x)
        assert "pcdeq.equilibrium" in graph.code
        assert_close(graph(2 * x), layer(2 * x))


class TestUnroll:
    def test_steps_from_the_proved_rate(self):
        model = Own(rate=0.5, solver=TIGHT).double().eval()
        with torch.no_grad():
            model.images.operator.weight_g.fill_(3.0)
            model.vectors.operator.weight_g.fill_(5.0)
            expected = model.images(model.first(PICTURES.double()))
            unrolled = pcdeq.unroll(model, tol=1e-3)
            found = unrolled.images(unrolled.first(PICTURES.double()))
        assert unrolled.images.steps == model.images.rate(1e-3).steps
        assert (found / expected).log().abs().max() <= 1e-3
        assert not any(isinstance(module, pcdeq.PcDEQ) for module in unrolled.modules())
        assert_close(unrolled(OTHERS.double()), model(OTHERS.double()), 2e-3)

    def test_steps_given(self):
        layer, x = taught("conv2d").eval(), make_input("conv2d")
        short, long = pcdeq.unroll(layer, 2)(x), pcdeq.unroll(layer, 200)(x)
        assert_close(long, layer(x))
        assert (short - long).abs().max() > 1e-6

    def test_shapes_and_dtypes_are_the_layers(self):
        layer = pcdeq.PcDEQLinear(4, "sigmoid")
        unrolled = pcdeq.unroll(layer)
        for x in (torch.randn(4), torch.randn(2, 3, 4), torch.randn(2, 4).bfloat16(), torch.randn(2, 4).double()):
            assert unrolled(x).dtype == layer(x).dtype
            assert_close(unrolled(x), layer(x), 1e-2 if x.dtype == torch.bfloat16 else 1e-3)

    def test_the_model_is_left_alone_and_a_shared_layer_stays_shared(self):
        layer = pcdeq.PcDEQLinear(4, "sigmoid")
        model = nn.Sequential(layer, nn.ReLU(), layer)
        unrolled = pcdeq.unroll(model)
        assert model[0] is layer and model[2] is layer
        assert unrolled[0] is unrolled[2] and not list(unrolled.parameters())

    def test_what_an_operator_of_ones_own_needs_moves_along(self):
        unrolled = pcdeq.unroll(make_layer("graph", "sigmoid"))
        assert {name for name, _ in unrolled.named_buffers()} == {"weight", "guess", "operator.adjacency"}
        x = make_input("graph")
        assert_close(unrolled(x), make_layer("graph", "sigmoid", solver=TIGHT)(x), 1e-3)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: pcdeq.unroll(nn.Sequential(pcdeq.PcDEQLinear(4))),
                r"layer '0' \(tanh, floor 1e-16\): give steps=",
            ),
            (lambda: pcdeq.unroll(pcdeq.PcDEQLinear(4, "log1p", floor=1.0)), "no number of steps for the layer"),
            (lambda: pcdeq.unroll(pcdeq.PcDEQLinear(4), 0), "at least 1, got 0"),
            (lambda: pcdeq.unroll(torch.zeros(2)), "takes a module, got Tensor"),  # pyright: ignore[reportArgumentType]
        ],
    )
    def test_refusals(self, make, message):
        with pytest.raises(pcdeq.PcdeqError, match=message):
            make()

    def test_a_layer_with_a_hook_is_refused(self):
        layer = pcdeq.PcDEQLinear(4)
        layer.register_forward_hook(lambda *_: None)
        with pytest.raises(pcdeq.PcdeqError, match="cannot be unrolled: it has a forward hook"):
            pcdeq.unroll(layer, 5)

    def test_onnx_of_somebodys_network(self):
        onnxruntime = pytest.importorskip("onnxruntime")
        model = pcdeq.unroll(Own(), 12).eval()
        with warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                model, (PICTURES,), dynamo=True, verbose=False, dynamic_shapes=({0: "n"},), input_names=["x"]
            )
        session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
        (found,) = session.run(None, {"x": OTHERS.numpy()})
        assert_close(torch.from_numpy(found), model(OTHERS), 1e-5)
        assert_close(torch.from_numpy(found), Own()(OTHERS), 1e-3)

    @pytest.mark.filterwarnings("ignore:Converting a tensor to a Python")  # it compares shapes
    def test_jit_trace(self):
        model = pcdeq.unroll(Own(), 12).eval()
        assert_close(torch.jit.trace(model, (PICTURES,))(OTHERS), model(OTHERS), 1e-6)


def loss(layer: pcdeq.PcDEQ) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda parameters, x: torch.func.functional_call(layer, parameters, (x,)).square().sum()


class TestTransforms:
    """Each against plain reverse-mode autograd, one call at a time."""

    @each_kind
    def test_jacobians(self, kind):
        layer, x = taught(kind), make_input(kind)
        jacobian = torch.autograd.functional.jacobian
        expected = jacobian(layer, x)
        assert_close(jacobian(layer, x, vectorize=True), expected)
        assert_close(jacobian(layer, x, vectorize=True, strategy="forward-mode"), expected)
        assert_close(torch.func.jacrev(layer)(x), expected)
        assert_close(torch.func.jacfwd(layer)(x), expected)

    @each_kind
    @pytest.mark.parametrize("recorded", [True, False])
    def test_forward_mode_also_under_no_grad(self, kind, recorded):
        layer, x, tangent = taught(kind), make_input(kind), make_input(kind, seed=5)
        (expected,) = torch.autograd.functional.jvp(layer, x, tangent, create_graph=False)[1:]
        with torch.set_grad_enabled(recorded), forward_ad.dual_level():
            found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
        assert_close(found, expected)
        assert_close(torch.func.jvp(layer, (x,), (tangent,))[1], expected)

    @pytest.mark.parametrize("weight_norm", [True, False])
    @each_kind
    def test_tangents_of_the_parameters(self, kind, weight_norm):
        layer, x = taught(kind, weight_norm=weight_norm).eval(), make_input(kind)
        given = {name: parameter.detach() for name, parameter in layer.named_parameters()}
        along = {name: torch.rand_like(parameter) for name, parameter in given.items()}
        _, found = torch.func.jvp(lambda given: loss(layer)(given, x), (given,), (along,))
        slopes = torch.func.grad(loss(layer))(given, x)
        assert_close(found, sum((slopes[name] * along[name]).sum() for name in given))

    @each_kind
    def test_vmap(self, kind):
        layer, x = taught(kind), make_input(kind, samples=6)
        expected = layer(x)
        assert_close(torch.func.vmap(layer)(x), expected)  # single samples
        batches = torch.stack(x.split(2), dim=1)
        assert_close(torch.func.vmap(layer, in_dims=1)(batches), torch.stack(expected.split(2)))
        assert layer.last_forward.samples == 2

    def test_the_paper_s_rule_stops_each_member_by_itself(self):
        layer = taught("dense", solver=pcdeq.Picard(tol=1e-3, stop="batch"))
        x = torch.stack([make_input("dense"), 50 * make_input("dense", seed=1)])
        assert torch.equal(torch.func.vmap(layer)(x), torch.stack([layer(member) for member in x]))

    @each_kind
    def test_gradients_of_each_sample(self, kind):
        layer, x = taught(kind), make_input(kind, samples=3)
        given = {name: parameter.detach() for name, parameter in layer.named_parameters()}
        found = torch.func.vmap(torch.func.grad(loss(layer)), in_dims=(None, 0))(given, x)
        for number, sample in enumerate(x):
            expected = torch.autograd.grad(layer(sample).square().sum(), list(layer.parameters()))
            assert_close([found[name][number] for name in given], list(expected))

    @each_kind
    def test_an_ensemble(self, kind):
        members, x = [taught(kind, seed=seed, gain=0.3 + 0.2 * seed) for seed in range(3)], make_input(kind)
        parameters, buffers = torch.func.stack_module_state(members)
        skeleton = copy.deepcopy(members[0]).to("meta")

        def call(parameters, buffers, x):
            return torch.func.functional_call(skeleton, (parameters, buffers), (x,))

        def cost(*given):
            return call(*given).square().sum()

        assert_close(torch.func.vmap(call, (0, 0, None))(parameters, buffers, x), torch.stack([m(x) for m in members]))
        found = torch.func.vmap(torch.func.grad(cost), (0, 0, None))(parameters, buffers, x)
        for number, member in enumerate(members):
            expected = torch.autograd.grad(member(x).square().sum(), list(member.parameters()))
            assert_close([found[name][number] for name, _ in member.named_parameters()], list(expected))

    @each_kind
    def test_gradcheck_in_training_mode(self, kind):
        layer, x = make_layer(kind, solver=TIGHT, floor=0.05), make_input(kind, samples=1).requires_grad_()
        for _ in range(2):
            assert torch.autograd.gradcheck(
                layer, (x,), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
            )
        assert int(layer.warm.observed) > 2

    def test_backward_of_one_graph_is_reproducible_while_the_start_is_learned(self):
        layer, x = make_layer("dense"), make_input("dense").requires_grad_()
        z = layer(x)
        first, second = (torch.autograd.grad(z.sum(), x, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second) and int(layer.warm.observed) == 2

    def test_the_hessian(self):
        layer, x = taught("dense"), make_input("dense", samples=1)

        def cost(x):
            return layer(x).square().sum()

        expected = torch.autograd.functional.hessian(cost, x)
        assert_close(torch.func.hessian(cost)(x), expected)
        assert_close(torch.func.jacrev(torch.func.jacrev(cost))(x), expected)

    @pytest.mark.parametrize("gradient", ["phantom", "jacobian-free", "unrolled"])
    def test_other_gradients(self, gradient):
        layer, x = taught("dense", gradient=gradient), make_input("dense")
        tangent = make_input("dense", seed=5)
        expected = torch.autograd.functional.jacobian(layer, x)
        assert_close(torch.func.jvp(layer, (x,), (tangent,))[1], torch.einsum("abcd,cd->ab", expected, tangent))
        with torch.no_grad(), forward_ad.dual_level():
            found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
        assert_close(found, torch.einsum("abcd,cd->ab", expected, tangent))

    @pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize(("network", "channels"), [(L, (6,)), (SC, (4,)), (MC, (3, 4, 5))])
    def test_jacobians_of_networks(self, network, channels, memory_format):
        """In float32, where kernels do what they can, and with parameters that learn."""
        torch.manual_seed(0)
        model = network(channels, image_shape=(2, 24, 24)).eval()
        x = torch.randn(2, 2, 24, 24).contiguous(memory_format=memory_format)
        expected = torch.autograd.functional.jacobian(model, x)
        assert_close(torch.func.jacrev(model)(x), expected, 1e-5)
        assert_close(torch.autograd.functional.jacobian(model, x, vectorize=True), expected, 1e-5)

    @pytest.mark.parametrize(("network", "channels"), [(L, (6,)), (SC, (4,)), (MC, (3, 4, 5))])
    def test_many_gradients_at_once_of_networks(self, network, channels):
        torch.manual_seed(0)
        model, x = network(channels, image_shape=(2, 24, 24)).eval(), torch.randn(1, 2, 24, 24)
        parameters = list(model.parameters())
        found = torch.autograd.grad(model(x), parameters, torch.eye(10)[:, None], is_grads_batched=True)
        for number, score in enumerate(model(x)[0]):
            expected = torch.autograd.grad(score, parameters, retain_graph=True)
            assert_close([each[number] for each in found], list(expected), 1e-4)

    def test_a_loop_is_no_matter_of_vmap(self):
        layer = taught("dense", gradient="unrolled")
        with pytest.raises(pcdeq.PcdeqError, match="vmap cannot differentiate a loop"):
            torch.func.vmap(torch.func.grad(lambda x: layer(x).sum()))(make_input("dense"))

    @pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacrev, torch.func.jacfwd])
    def test_a_part_of_ones_own_is_refused(self, transform):
        layer = pcdeq.PcDEQLinear(4, own_activation())
        with pytest.raises(pcdeq.PcdeqError, match=r'your own .* only with gradient="unrolled"'):
            transform(layer)(torch.randn(2, 4))


class TestOperators:
    @each_kind
    def test_opcheck(self, kind):
        layer, x = taught(kind), make_input(kind).abs().requires_grad_()
        weight = layer.operator.effective_weight().detach().requires_grad_()
        name, words, guess = layer.operator.bind(weight).kind, in_words(TIGHT), layer.warm.product.clone()
        torch.library.opcheck(equilibrium_operator, (x, weight, guess, name, "tanh", *words, *words))
        slope = (0.1 * x).detach().requires_grad_()
        torch.library.opcheck(linear_operator, (weight, slope, x, name, *words))

    @pytest.mark.parametrize("kind", SOLVERS.values())
    def test_solvers_survive_being_put_in_words(self, kind):
        for given in (kind(), kind(tol=1e-7, max_steps=17, throw=True), kind(stop="batch")):
            assert from_words(*in_words(given)) == given


class TestShapesOnly:
    @each_kind
    def test_meta(self, kind):
        layer, x = taught(kind).to("meta"), make_input(kind).to("meta").requires_grad_()
        z = layer(x)
        assert z.is_meta and z.shape == x.shape
        z.sum().backward()
        assert x.grad.shape == x.shape
        assert layer.operator.weight_v.grad.shape == layer.operator.weight_v.shape

    @each_kind
    def test_fake(self, kind):
        with FakeTensorMode():
            layer = pcdeq.PcDEQLinear(3) if kind == "dense" else pcdeq.PcDEQConv2d(3)
            x = torch.empty(2, 3) if kind == "dense" else torch.empty(2, 3, 4, 4)
            z = layer(x.requires_grad_())
            z.sum().backward()
        assert z.shape == x.shape == x.grad.shape


class TestPlaces:
    @pytest.mark.parametrize("make", [pcdeq.PcDEQLinear, pcdeq.PcDEQConv1d, pcdeq.PcDEQConv2d, pcdeq.PcDEQConv3d])
    def test_device_and_dtype(self, make):
        layer = make(2, device="meta", dtype=torch.float64)
        tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
        assert all(tensor.is_meta for tensor in tensors.values())
        assert all(tensor.dtype == torch.float64 for name, tensor in tensors.items() if not name.endswith("observed"))
        skipped = torch.nn.utils.skip_init(make, 2, "relu6", dtype=torch.float64)
        skipped.load_state_dict(make(2, dtype=torch.float64).state_dict())
        assert skipped(torch.zeros(1, 2, *[3] * (skipped.operator.state_ndim - 1)).double()).isfinite().all()

    def test_an_integer_dtype_is_refused(self):
        with pytest.raises(pcdeq.PcdeqError, match=r"floating point dtype, got torch\.int32"):
            pcdeq.PcDEQLinear(4, dtype=torch.int32)

    def test_distributed_tensors_are_refused(self):
        from torch.distributed import destroy_process_group, init_process_group
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
        from torch.testing._internal.distributed.fake_pg import FakeStore

        init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            mesh, x = init_device_mesh("cpu", (2,)), torch.randn(4, 4)
            layer = pcdeq.PcDEQLinear(4)
            with pytest.raises(pcdeq.PcdeqError, match="the input is a DTensor"):
                layer(distribute_tensor(x, mesh, [Shard(0)]))
            with pytest.raises(pcdeq.PcdeqError, match="the weight is a DTensor"):
                distribute_module(layer, mesh)(x)
        finally:
            destroy_process_group()
