"""The page computes what Python computes: its scripts, as they are, in V8 against float64 on 1,000 test digits."""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import pytest
import torch
from PIL import Image
from py_mini_racer import MiniRacer, mini_racer

from pcdeq import Anderson, certify, load
from pcdeq.activations import ACTIVATIONS
from pcdeq.data import load_dataset
from pcdeq.models import L, Network, Preprocessing
from pcdeq.play import SHIPPED
from pcdeq.play.page import describe
from pcdeq.proofs.worst_case import worst_case_scores
from pcdeq.training.prediction import prepare_picture

NOISE = 0.004
EXACT = Anderson(tol=1e-14, max_steps=2000)
# What browsers have, and V8 alone has not.
ATOB = """
function atob(text) {
  const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", result = [];
  let bits = 0, count = 0;
  for (const letter of text.replace(/=+$/, "")) {
    bits = ((bits << 6) | letters.indexOf(letter)) & 0xffff;
    if ((count += 6) >= 8) result.push(String.fromCharCode((bits >> (count -= 8)) & 255));
  }
  return result.join("");
}
"""
# All that is compared of some pictures; z at three steps, and where it settles.
LOOK = """
function look(digits, noise, factor) {
  return JSON.stringify(digits.map((digit) => {
    const pixels = digit.map((value) => value / 255), { lower, upper, verdict, provedAt } =
      think(network, pixels, noise, factor);
    const at = (points) => [0, 1, 5, points.length - 1].map((k) => Array.from(points[Math.min(k, points.length - 1)]));
    return { lower: at(lower), upper: at(upper), ...verdict, provedAt, steps: lower.length - 1 };
  }));
}
"""


@pytest.fixture(scope="module")
def engine():
    with mini_racer() as context:
        own = files("pcdeq.play")
        context.eval(ATOB)
        for name in ("numerics.js", "picture.js"):
            context.eval(own.joinpath(name).read_text())
        context.eval(f"let network = null; {LOOK}")
        yield context


@pytest.fixture(scope="module")
def digits():
    return load_dataset("mnist-mini").test.images  # 1,000


def look(engine: MiniRacer, network: Network, digits: torch.Tensor, noise: float = 0.0, factor: float = 1.0):
    """What the page finds, one array for each thing."""
    engine.eval(f"network = readNetwork({json.dumps(describe('it', network))})")
    found = json.loads(engine.eval(f"look({digits.flatten(1).tolist()}, {noise}, {factor})"))
    return {name: np.array([one[name] for one in found]) for name in found[0]}


def in_float64(network: Network, digits: torch.Tensor) -> tuple[Network, torch.Tensor]:
    network = network.double()
    network.deq.solver = EXACT
    return network, network.preprocessing.normalise(digits.double() / 255)


def close(found, wanted) -> bool:
    return float(np.abs(found - wanted.numpy()).max()) < 1e-9


# All 1,000 with one network, a part of them with the others.
COUNTS = [pytest.param(name, 1000 if name == SHIPPED[0] else 100, id=name) for name in SHIPPED]


@pytest.mark.parametrize(("name", "count"), COUNTS)
def test_digits(engine, digits, name, count):
    """Steps from both sides, equilibrium, scores and classes."""
    digits = digits[:count]
    page = look(engine, load(name), digits)
    network, images = in_float64(load(name), digits)
    assert len(images) == count
    with torch.no_grad():
        equation = network.deq.equation(network[:3](images))
        z = network.deq(network[:3](images))
        low, top = torch.zeros_like(z), torch.full_like(z, network.deq.activation.supremum)
        for step in range(6):
            if step in (0, 1, 5):
                assert close(page["lower"][:, (0, 1, 5).index(step)], low)
                assert close(page["upper"][:, (0, 1, 5).index(step)], top)
            low, top = equation(low), equation(top)
        scores = network[4:](z)
    assert close(page["lower"][:, 3], z)
    assert close(page["upper"][:, 3], z)
    assert close(page["scores"], scores)
    assert (page["best"] == scores.argmax(1).numpy()).all()
    certificate = certify(load(name), load(name).preprocessing(digits))
    assert (page["best"] == certificate.classes.numpy()).all()
    assert page["proved"].all() and certificate.proved.all()
    assert (page["provedAt"] <= page["steps"]).all() and (page["provedAt"] > 0).all()


def worst_case(network: Network, images: torch.Tensor, classes: torch.Tensor, noise: float) -> torch.Tensor:
    """How far each class can get ahead of the given one, by Python in float64."""
    scale = network.preprocessing
    # Not `scaled` and `limits`, which are float32: another box, in its eighth digit.
    radius = noise / torch.tensor(scale.std, dtype=torch.float32).double().view(-1, 1, 1)
    limits = tuple(scale.normalise(torch.full((1,), pixel, dtype=torch.float64)) for pixel in (0.0, 1.0))
    with torch.no_grad():
        return worst_case_scores(network, images, classes, radius, limits)[1]


@pytest.mark.parametrize(("name", "count"), COUNTS)
def test_digits_under_noise(engine, digits, name, count):
    """How far each class can get ahead of the best one (T8), as in the certified loss; and which are proved."""
    digits = digits[:count]
    page = look(engine, load(name), digits, NOISE)
    best = torch.from_numpy(page["best"])
    worst = worst_case(*in_float64(load(name), digits), best, NOISE)
    assert close(page["most"], worst)
    others = worst.scatter(1, best[:, None], -torch.inf)
    assert (page["proved"] == (others.amax(1) < 0).numpy()).all()
    assert 0 < page["proved"].sum() < count
    # What `certify` proves by the same bounds, with all rounding covered and in float32, is a little less.
    scale = load(name).preprocessing
    reach, limits = scale.scaled(NOISE), scale.limits()
    certificate = certify(load(name), scale(digits), radius=reach, limits=limits, bounds="intervals")
    proved = certificate.proved.numpy()
    assert (page["proved"] >= proved).all()
    assert proved.sum() > 0.9 * page["proved"].sum()
    assert (page["best"] == certificate.classes.numpy())[proved].all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(engine, digits, activation):
    """Any of ours, also the one without a top, with an untrained network and weights made larger."""
    network = L((12,), activation=activation).eval()
    network.preprocessing = Preprocessing((0.1,), (0.3,), tuple("0123456789"))
    page = look(engine, network, digits[:20], factor=30.0)
    twin, images = in_float64(network, digits[:20])
    with torch.no_grad():
        weight = 30 * twin.deq.operator.effective_weight()
        twin.deq = type(twin.deq)(12, activation, weight_norm=False, solver=EXACT, warm_start=False).double()
        twin.deq.operator.weight.copy_(weight)
        z = twin.deq(twin[:3](images))
    assert close(page["lower"][:, 3], z)
    assert close(page["upper"][:, 3], z)
    first, last = page["upper"][:, 0], page["upper"][:, 3]
    assert (last <= first).all()


@pytest.mark.parametrize("name", SHIPPED)
def test_larger_weights(engine, digits, name):
    """A hundred times the weights: it settles in every case; without the constraint it almost never does."""
    page = look(engine, load(name), digits[:100], factor=100.0)
    assert np.abs(page["upper"][:, 3] - page["lower"][:, 3]).max() < 1e-12
    script = f"""JSON.stringify({digits[:100].flatten(1).tolist()}.map((digit) => {{
        const x = injected(network, digit.map((value) => value / 255), 0).lower;
        return change(settlePlain(unconstrained(network), x, 100, 300));
    }}))"""
    moves = np.array(json.loads(engine.eval(script)))
    assert (moves > 0.1).mean() > 0.9


def test_the_radius_at_which_a_proof_ends(engine, digits):
    """Just below it the class is proved, just above it is not."""
    few = digits[:5]
    look(engine, load(SHIPPED[0]), few[:1])
    script = f"{few.flatten(1).tolist()}.map((digit) => provedUpTo(network, digit.map((value) => value / 255)))"
    ends = json.loads(engine.eval(f"JSON.stringify({script})"))
    network, images = in_float64(load(SHIPPED[0]), few)
    with torch.no_grad():
        classes = network(images).argmax(1)
    for image, label, end in zip(images, classes, ends, strict=True):
        assert 0 < end < 0.2
        for factor, holds in ((0.9999, True), (1.0001, False)):
            worst = worst_case(network, image[None], label[None], factor * end)[0]
            assert bool((worst[torch.arange(10) != label] < 0).all()) is holds


def test_drawings_are_prepared_as_predict_does(engine, digits):
    """Larger and smaller pictures of digits, anywhere on the board, also thin and flat ones."""
    generator = np.random.default_rng(0)
    for digit in digits[::25]:
        board = Image.new("L", (100, 100))
        size = tuple(int(edge) for edge in generator.integers(8, 90, 2))
        board.paste(Image.fromarray(digit[0].numpy()).resize(size), tuple(map(int, generator.integers(0, 10, 2))))
        wanted, _ = prepare_picture(board, (1, 28, 28), ink=True)
        ink = np.asarray(board).flatten().tolist()
        found = json.loads(
            engine.eval(f"JSON.stringify(Array.from(prepare(Uint8Array.from({ink}), 100, [28, 28]), (v) => 255 * v))")
        )
        difference = np.abs(np.array(found) - wanted.flatten().numpy().astype(float))
        # Lanczos overshoots, and each of two passes clips that. Pillow decides which comes first, we do not know how.
        assert difference.max() < 10
        assert difference.mean() < 0.2


def test_nothing_drawn(engine):
    assert engine.eval("prepare(new Uint8Array(400), 20, [28, 28])") is None
    assert engine.eval("prepare(new Uint8Array(400).fill(9), 20, [28, 28])") is None
