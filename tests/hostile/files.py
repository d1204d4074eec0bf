"""Odd files: good ones with a byte turned, a piece cut off, or a value that nobody expects."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from hostile.claims import Score
from hostile.generators import Rng

import pcdeq
from pcdeq.data import load_dataset
from pcdeq.models import L, Network, Preprocessing
from pcdeq.recipes import TrainConfig
from pcdeq.training import Run

NASTY = (None, True, -1, 0, 1, 2**31, 2**53, 2**63, 10**30, 0.5, -1e308, 1e-320, "", "x", "\x00", "../..", [], {}, [[]])
NASTY += ([1] * 50, {"a": {}}, [25_000], ["tanh"], "relu", 1e17, [1, 10**9, 10**9])


@cache
def _good() -> dict[str, bytes]:
    """The files of a small network, of a run and of a data set, each whole."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = L((2,), (1, 2, 2), 2)
        model.preprocessing = Preprocessing((0.5,), (0.25,), ("a", "b"))
        model.save_pretrained(folder)
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (6, 2, 2), dtype=np.uint8)
        np.savez_compressed(folder / "own.npz", images=images, labels=np.arange(6) % 2)
        config = TrainConfig("pcdeq-1-l-tanh", channels=(2,), out=folder / "run", data="mnist-mini").resolve((1, 2, 2))
        run = Run.create(config, model.preprocessing, (1, 2, 2))
        good = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors", "own.npz")}
        return good | {"run.json": (run.path / "config.json").read_bytes()}


def odd_files(score: Score, rng: Rng) -> str:
    """What a changed file brings is an error in one line, or what it says."""
    good = _good()
    name = str(rng.choice(list(good)))
    changed = _change(good[name], rng, name)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for other in ("config.json", "model.safetensors"):
            (folder / other).write_bytes(good[other])
        target = folder / ("config.json" if name == "run.json" else name)
        target.write_bytes(changed)
        if name == "run.json":
            (folder / "last").mkdir()
            (folder / "last" / "model.safetensors").write_bytes(good["model.safetensors"])
        try:
            _ = load_dataset(target, quiet=True) if name == "own.npz" else Network.from_pretrained(folder)
        except pcdeq.PcdeqError as error:
            score.add("one line", 1, "\n" in str(error), str(error)[:200])
    score.add("odd file", 1, False)
    return f"{name}: {changed[:80]!r}..."


def _change(content: bytes, rng: Rng, name: str) -> bytes:
    way = int(rng.integers(5))
    if way == 0:
        return content[: int(rng.integers(len(content) + 1))]
    if name.endswith(".json") and way > 1:
        return json.dumps(_put(json.loads(content), rng)).encode()
    turned = bytearray(content)
    for _ in range(int(rng.integers(1, 5))):
        turned[int(rng.integers(len(turned)))] = int(rng.integers(256))
    return bytes(turned)


def _put(value: object, rng: Rng) -> object:
    """A tree of JSON with one of its values replaced."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = keys[int(rng.integers(len(keys)))]
        inner = value[key]
        value = dict(value) if isinstance(value, dict) else list(value)
        value[key] = _put(inner, rng)
        return value
    return NASTY[int(rng.integers(len(NASTY)))]
