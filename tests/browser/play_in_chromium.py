"""The page to play with, in a real browser: `make test-browser`. Not part of `make test`, which needs no browser.

With ``PCDEQ_PICTURES=docs/img`` in front, what is seen goes into the documentation.
"""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path

import chromium
import numpy as np
import pytest
import torch
from PIL import Image
from strokes import strokes

from pcdeq import load
from pcdeq.cli import main
from pcdeq.data import load_dataset
from pcdeq.play import SHIPPED
from pcdeq.training.prediction import prepare_picture

SETTLED = "document.getElementById('step').value === document.getElementById('step').max"


@pytest.fixture(scope="module")
def browser():
    with chromium.start() as started:
        yield started


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "play.html"
    assert main(["play", "-o", str(path)]) == 0
    return path


@pytest.fixture
def page(browser, file):
    """The page without motion, at desktop width; nothing may have been asked for or complained about in the end."""
    browser.resize(1280, 800, still=True)
    browser.open(file)
    yield browser
    assert browser.requests == [file.resolve().as_uri()]
    assert browser.complaints == []


def text(page, name: str) -> str:
    return page.run(f"document.getElementById({name!r}).textContent")


def settle(page) -> None:
    """Until the frame after the last event was drawn, and the steps were played."""
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.wait(SETTLED)


def focus(page, name: str) -> None:
    page.run(f"document.getElementById({name!r}).focus()")


def set_slider(page, name: str, value: float) -> None:
    """As a hand would, but to the point."""
    page.run(f"""(() => {{ const slider = document.getElementById({name!r}); slider.value = {value};
        for (const event of ["input", "change"]) slider.dispatchEvent(new Event(event)); }})()""")
    settle(page)


def board(page) -> tuple[float, float, float]:
    return page.run("(({x, y, width}) => [x, y, width])(document.getElementById('paper').getBoundingClientRect())")


def draw(page, digit: np.ndarray, touch: bool = False) -> None:
    """Clear the board and draw a digit of 28 x 28 pixels on it, stroke by stroke."""
    page.run("document.getElementById('clear').click()")
    left, top, width = board(page)
    for line in strokes(digit):
        points = [(left + x * width / 28, top + y * width / 28) for x, y in (*line[:-1:2], line[-1])]
        for kind, points_now in (("start", points[:1]), ("move", points[1:])):
            for x, y in points_now:
                if touch:
                    page.call("Input.dispatchTouchEvent", type=f"touch{kind.title()}", touchPoints=[{"x": x, "y": y}])
                else:
                    page.mouse({"start": "mousePressed", "move": "mouseMoved"}[kind], x, y)
        if touch:
            page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        else:
            page.mouse("mouseReleased", *points[-1])
    settle(page)


def drawn(page) -> Image.Image:
    """The board, light on black."""
    address = page.run("document.getElementById('paper').toDataURL()")
    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).getchannel("A")


@pytest.fixture(scope="module")
def digits():
    """A test digit of each class, the first that is still read when only the lines in its middle are drawn."""
    test, chosen = load_dataset("mnist-mini").test, [0, 1, 6, 3, 2, 8, 19, 10, 14, 20]
    assert test.labels[chosen].tolist() == list(range(10))
    return test.images[chosen, 0].numpy()


def seen_by_python(page) -> int:
    """The class that the network gives to the drawing, prepared as `pcdeq predict` does."""
    model = load(SHIPPED[0])
    pixels, _ = prepare_picture(drawn(page), (1, 28, 28), ink=True)
    with torch.no_grad():
        return int(model(model.preprocessing(pixels[None])).argmax())


def test_real_digits_are_recognised_and_proved(page, digits):
    for label, digit in enumerate(digits):
        draw(page, digit)
        assert (text(page, "digit"), text(page, "word")) == (str(label), "✓ proved")
        assert seen_by_python(page) == label


def test_noise(page, digits):
    """Below the radius at which the proof ends it is proved for all pictures; above it is not."""
    draw(page, digits[7])
    page.wait("document.getElementById('end-out').textContent !== ''")
    radius = float(text(page, "end-out").split("±")[1].rstrip("."))
    assert 1e-4 < radius < 0.2
    for share, word in ((0.9, "✓ proved"), (1.1, "not proved"), (0.9, "✓ proved")):
        set_slider(page, "noise", 1000 * (share * radius / 0.2) ** (1 / 3))
        assert text(page, "word") == word
    assert "whatever the noise" in text(page, "why")
    focus(page, "noise")
    page.press("End")
    settle(page)
    assert "± 0.20" in text(page, "noise-out")
    assert text(page, "word") == "not proved"


def test_larger_weights(page):
    """W settles at any size; without the constraint it does so for small weights only."""
    assert text(page, "plain-state") == "settles, too"
    focus(page, "factor")
    page.press("End")
    settle(page)
    assert text(page, "factor-out") == "× 100"
    assert (text(page, "state"), text(page, "plain-state")) == ("closed", "does not settle")
    assert "nobody trained" in text(page, "why")


def test_activations(page):
    """Another network for each; the arrows choose, as for every group of radio buttons."""
    focus(page, "activation-0")
    for name in ("softsign", "relu6", "sigmoid"):
        page.press("ArrowRight")
        settle(page)
        assert page.run("document.querySelector('#activations :checked + label').textContent") == name
        assert (text(page, "digit"), text(page, "word")) == ("3", "✓ proved")


def test_keys_are_enough(page):
    """All that can be done by hand can be done by keys, in the order of the page."""
    reached = []
    for _ in range(9):
        page.press("Tab")
        reached.append(page.run("document.activeElement.id"))
    assert reached[:8] == ["paper", "clear", "sample", "activation-0", "noise", "factor", "play", "step"]
    focus(page, "paper")
    for digit in "0123456789":
        page.press(digit)
        settle(page)
        assert (text(page, "digit"), text(page, "word")) == (digit, "✓ proved")
    page.press("Delete")
    settle(page)
    assert (text(page, "digit"), text(page, "word"), text(page, "why")) == ("", "", "draw a digit")
    page.press("ArrowUp", shift=True)  # without ink
    settle(page)
    assert text(page, "digit") == ""
    for _ in range(14):
        page.press("ArrowDown")
    settle(page)
    assert text(page, "digit") == "1"
    focus(page, "step")
    page.press("Home")
    assert text(page, "word") == "settling …"
    assert page.run("document.getElementById('step-out').value").startswith("step 0 of")


def test_nothing_drawn_and_a_dot(page, digits):
    page.run("document.getElementById('clear').click()")
    settle(page)
    assert (text(page, "digit"), text(page, "mark")) == ("", "")
    left, top, width = board(page)
    for x, y in ((0.5, 0.5), (0.002, 0.002), (0.998, 0.998)):  # a dot, and another in each corner
        page.mouse("mousePressed", left + x * width, top + y * width)
        page.mouse("mouseReleased", left + x * width, top + y * width)
        settle(page)
        assert text(page, "digit") in list("0123456789")
    page.mouse("mousePressed", left + width / 2, top + width / 2)
    page.mouse("mouseMoved", left + 2 * width, top - 50)  # off the board, and let go there
    page.mouse("mouseReleased", left + 2 * width, top - 50)
    draw(page, digits[4])
    assert text(page, "digit") == "4"


def test_motion(browser, file):
    """The steps are played, one after the other; who wants no motion sees the end at once."""
    browser.resize(1280, 800)
    browser.open(file)
    browser.wait("document.getElementById('word').textContent === 'settling …'")
    assert not browser.run(SETTLED)
    browser.wait(SETTLED)
    assert browser.run("document.getElementById('word').textContent") == "✓ proved"
    browser.resize(1280, 800, still=True)
    browser.run("document.getElementById('sample').click()")
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.run(SETTLED)
    assert browser.complaints == []


def test_phone(page, digits):
    page.resize(390, 844, still=True)
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        draw(page, digits[2], touch=True)
    finally:
        page.call("Emulation.setTouchEmulationEnabled", enabled=False)
    assert (text(page, "digit"), text(page, "word")) == ("2", "✓ proved")
    assert page.run("document.documentElement.scrollWidth") == 390
    bottom = page.run("document.querySelector('.verdict').getBoundingClientRect().bottom + scrollY")
    assert bottom < 844  # board and verdict are seen at once


CONTRASTS = """(() => {
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const ground = (one) => { const c = numbers(getComputedStyle(one).backgroundColor);
    return c.length < 4 || c[3] ? c : ground(one.parentElement); };
  return [...document.querySelectorAll("body *")]
    .filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
    .filter((one) => one.checkVisibility() && !["SCRIPT", "STYLE"].includes(one.tagName))
    .map((one) => { const [a, b] = [numbers(getComputedStyle(one).color), ground(one)].map(light).sort((a, b) => b - a);
      return [one.id || one.tagName + "." + one.className, (a + 0.05) / (b + 0.05)]; });
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(page, dark):
    """Every text stands out by 4.5 to 1 (WCAG, AA)."""
    page.resize(1280, 800, dark=dark, still=True)
    ratios = page.run(CONTRASTS)
    assert len(ratios) > 30
    assert [one for one in ratios if one[1] < 4.5] == []


def test_pictures(page, digits, tmp_path):
    """Light and dark, at both widths, as they are in the documentation."""
    folder = Path(os.environ.get("PCDEQ_PICTURES") or tmp_path)
    views = (("desktop", 1280, 800, False, 0), ("larger", 1280, 800, True, 500), ("phone", 390, 844, True, 0))
    for name, width, height, dark, factor in views:
        page.resize(width, height, dark=dark, still=True)
        draw(page, digits[5])
        set_slider(page, "factor", factor)
        page.wait("document.getElementById('end-out').textContent !== ''")
        picture = folder / f"play-{name}.png"
        seen = Image.open(io.BytesIO(page.picture())).convert("RGB")
        seen.quantize(256, Image.Quantize.MAXCOVERAGE).save(picture, optimize=True)
        assert picture.stat().st_size < 120_000
