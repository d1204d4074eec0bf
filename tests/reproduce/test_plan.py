"""Which runs a table needs, and how far each is."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from pcdeq.errors import UsageError
from pcdeq.recipes import rows
from pcdeq.reproduce import plan
from pcdeq.reproduce.plan import Job
from pcdeq.reproduce.worker import work
from pcdeq.training import Run, read_summary, resume, train


def tiny_plan(tiny_data, folder: Path, **settings) -> list[Job]:
    settings = {"channels": (12,), "device": "cpu", **settings}
    pattern = settings.pop("pattern", "pcdeq-1-l-tanh")
    return plan((str(tiny_data),), pattern=pattern, runs_dir=folder, image_channels=1, **settings)


def test_every_row_with_hyperparameters(tmp_path):
    jobs = plan(runs=5, runs_dir=tmp_path)
    trainable = [row for row in rows() if row.epochs is not None]
    assert len(jobs) == 5 * len(trainable)
    assert len({job.folder for job in jobs}) == len(jobs)
    for job, row in zip(jobs, trainable, strict=False):  # first seeds first, in the paper's order
        assert (job.config.seed, job.config.row, job.config.data, job.epochs) == (0, row.name, row.dataset, row.epochs)


def test_settings_reach_the_runs(tmp_path):
    (job,) = plan(("mnist",), pattern="pcdeq-2-l-*", runs=1, runs_dir=tmp_path, epochs=3, solver="paper")
    assert (job.config.epochs, job.config.solver) == (3, "paper")
    assert job.name == "pcdeq-2-l-sigmoid-mnist-paper-seed0"
    assert pickle.loads(pickle.dumps(job)) == job  # as Ray sends it


def test_our_recipe_is_another_run_of_the_same_row(tmp_path):
    (job,) = plan(("cifar10",), pattern="pcdeq-1-mc-relu6", runs=1, runs_dir=tmp_path, recipe="fast")
    assert (job.name, job.epochs) == ("pcdeq-1-mc-relu6-cifar10-fast-seed0", 10)
    assert job.config.resolve().schedule == "one-cycle"
    assert {job.config.row for job in plan(("mnist",), runs=1, runs_dir=tmp_path, recipe="fast")} == {
        row.name for row in rows("mnist") if row.topology in ("l", "sc", "mc")
    }
    with pytest.raises(UsageError, match="no row of mnist with a recipe fast matches 'node'"):
        plan(("mnist",), pattern="node", runs_dir=tmp_path, recipe="fast")


def test_grey_pictures_follow_mnist(tiny_data, tmp_path):
    (job,) = tiny_plan(tiny_data, tmp_path, runs=1)
    assert job.epochs == 40
    assert job.config.resolve((1, 28, 28)).lr == 1e-3


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"pattern": "mondeq-xl"}, {"epochs": -1}])
def test_wrong_requests(wrong, tmp_path):
    with pytest.raises(UsageError):
        plan(("mnist",), runs_dir=tmp_path, **wrong)


def test_stages(tiny_data, tmp_path):
    (job,) = tiny_plan(tiny_data, tmp_path, runs=1, epochs=2)
    assert job.stage == "missing"
    train(replace(job.config, epochs=1), progress="none")
    assert job.stage == "begun"
    resume(job.folder, epochs=2, progress="none")
    assert job.stage == "trained"
    work(job)
    assert job.stage == "done"
    summary = read_summary(Run.open(job.folder))
    assert (summary.epoch, summary.certified, summary.certified_of) == (2, 50, 50)
    assert not list(job.folder.glob("*.tmp"))
    (longer,) = tiny_plan(tiny_data, tmp_path, runs=1, epochs=3)
    assert longer.stage == "begun"


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("method", ["save", "append_metrics"])
def test_a_kill_before_the_last_checkpoint_or_its_line(method, epochs, tiny_data, tmp_path, monkeypatch):
    (job,) = tiny_plan(tiny_data, tmp_path, runs=1, epochs=epochs)
    original = getattr(Run, method)

    def die(self, *arguments):
        if arguments[-1].epoch == epochs:
            raise KeyboardInterrupt
        original(self, *arguments)

    monkeypatch.setattr(Run, method, die)
    with pytest.raises(KeyboardInterrupt):
        work(job)
    monkeypatch.undo()
    assert job.stage == "begun"  # as far as its metrics tell
    work(job)
    assert job.stage == "done"
    assert job.run.load("last").epoch == epochs == len(job.run.metrics)


def test_a_summary_of_fewer_epochs_does_not_count(tiny_data, tmp_path):
    (job,) = tiny_plan(tiny_data, tmp_path, runs=1, epochs=1)
    work(job)
    (longer,) = tiny_plan(tiny_data, tmp_path, runs=1, epochs=2)
    resume(job.folder, epochs=2, progress="none")
    assert longer.stage == "trained"


def test_a_run_with_other_settings_is_refused(tiny_data, tmp_path):
    (job,) = tiny_plan(tiny_data, tmp_path, runs=1, epochs=1)
    work(job)
    before = (job.folder / "config.json").read_bytes()
    with pytest.raises(UsageError, match=r"trained with lr = 0.001, not 0.1: choose another --runs-dir"):
        tiny_plan(tiny_data, tmp_path, runs=1, epochs=1, lr=0.1)
    assert (job.folder / "config.json").read_bytes() == before


@pytest.mark.parametrize("left", [[], ["metrics.jsonl"], ["metrics.jsonl", "config.json.tmp"], ["progress.tmp"]])
def test_what_a_kill_at_the_beginning_leaves_is_no_obstacle(left, tiny_data, tmp_path):
    (job,) = tiny_plan(tiny_data, tmp_path, runs=1, epochs=1)
    job.folder.mkdir(parents=True)
    for name in left:
        (job.folder / name).write_bytes(b"" if name == "metrics.jsonl" else b"{")
    work(job)
    assert job.stage == "done"


def test_a_folder_with_anything_else_is_not_touched(tiny_data, tmp_path):
    (job,) = tiny_plan(tiny_data, tmp_path, runs=1, epochs=1)
    job.folder.mkdir(parents=True)
    (job.folder / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        work(job)
    assert [path.name for path in job.folder.iterdir()] == ["thesis.tex"]
