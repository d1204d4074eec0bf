"""The page that compares the models says what the numbers say, for better and for worse."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from made_runs import make_run

from pcdeq.recipes import find_row

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_models.py"


def timed(row: str, training: float, inference: float) -> dict:
    return {"row": row, "training": {"median": training}, "inference": {"median": inference}}


@pytest.fixture
def page(tmp_path):
    """Write the page from made-up runs and times, and return its sections by heading."""
    runs = tmp_path / "runs"
    make_run(runs, "pcdeq-1-l-relu6", 40, seed=0, test_accuracy=98.0)
    make_run(runs, "pcdeq-1-l-relu6", 40, seed=1, test_accuracy=98.2)
    make_run(runs, "mondeq-l", 40, test_accuracy=97.0, unconverged=2)
    make_run(runs, "explicit-l-relu6", 40, test_accuracy=98.2, forward_steps=(), backward_steps=())
    make_run(runs, "pcdeq-1-mc-relu6", 40, test_accuracy=lambda epoch: 90 + epoch / 10)
    make_run(runs, "mondeq-mt", 2, test_accuracy=95.0)
    make_run(runs, "node", 1, steps_per_epoch=100, test_accuracy=50.0, seconds=1800.0)
    fast = {"settings": {"recipe": "fast"}}
    epochs = find_row("pcdeq-1-l-relu6", recipe="fast").epochs
    make_run(runs, "pcdeq-1-l-relu6", epochs, test_accuracy=98.3, **fast)
    make_run(runs, "explicit-l-relu6", epochs, test_accuracy=99.1, forward_steps=(), backward_steps=(), **fast)
    make_run(runs, "pcdeq-1-mc-relu6", 8, test_accuracy=99.0, **fast)  # alone in its class
    times = {
        "l": [timed("pcdeq-1-l-relu6", 2.0, 1.0), timed("mondeq-l", 6.0, 0.5), timed("explicit-l-relu6", 2.1, 1.0)],
        "mc": [timed("pcdeq-1-mc-relu6", 80.0, 10.0), timed("mondeq-mt", 1000.0, 100.0)],
        "ode": [timed("pcdeq-1-mc-relu6", 100.0, 10.0), timed("node", 5000.0, 900.0)],
    }
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "models.json").write_text(json.dumps({"threads": 2, "classes": times}))
    script = runpy.run_path(str(SCRIPT))
    script["main"].__globals__["RESULTS"] = tmp_path
    script["main"]()
    sections = (tmp_path / "comparison.md").read_text().split("\n## ")
    return {section.split("\n")[0]: section for section in sections}


def test_models_are_compared_after_the_same_number_of_epochs(page):
    dense, tiered = page["One dense layer (L), 40 epochs"], page["Three layers or tiers (MC, MT), 2 epochs"]
    assert "| pcDEQ-1-L-ReLU6 | 70,410 | 98.10 ± 0.14 (2 runs) |  | 1.9 |" in dense
    assert "| 90.20 | 94.00 after 40 | 75.0 |" in tiered
    assert "| monDEQ-MT | 81,458 | 95.00 |  | 937.5 |" in tiered


def test_what_each_reaches_in_the_epochs_of_our_recipe(page):
    (heading,) = (name for name in page if "our recipe" in name)
    assert heading.startswith("One dense layer (L), our recipe")
    assert "| pcDEQ-1-L-ReLU6 | 70,410 | 98.30 |" in page[heading]
    assert "pcDEQ-1-L-ReLU6 98.30, Explicit-L-ReLU6 99.10 (-0.80)" in page["Where it is not ahead"]


def test_a_slow_model_is_compared_over_the_same_time(page):
    # 100 steps of 5 s are 500 s, in which pcDEQ makes 5,000 steps of 0.1 s: 5 epochs.
    slow = page["Too slow for an epoch: about half an hour each"]
    assert "| NODE | 85,316 | 100 | 30 | 50.00 | 5000 |" in slow
    assert "90.50 after 5 epochs" in slow


def test_each_finding_is_on_the_side_of_its_numbers(page):
    ahead, behind, neither = (page[f"Where {end}"] for end in ("pcDEQ is ahead", "it is not ahead", "neither is"))
    assert "pcDEQ-1-L-ReLU6 98.10, monDEQ-L 97.00 (+1.10)" in ahead
    assert "time of training: monDEQ-L takes 3.00 times" in ahead
    assert "monDEQ-L 80, the worst pcDEQ 0" in ahead
    assert "time of inference: monDEQ-L takes 0.50 times" in behind
    assert "pcDEQ-1-MC-ReLU6 90.20, monDEQ-MT 95.00 (-4.80)" in behind
    assert "Explicit-L-ReLU6 98.20 (-0.10)" in neither
    assert "time of training: Explicit-L-ReLU6 takes 1.05 times" in neither
    assert "monDEQ-MT 0, the worst pcDEQ 0" in neither
    assert "time of training: monDEQ-MT takes 12.50 times" in ahead  # of ours in the same turns
