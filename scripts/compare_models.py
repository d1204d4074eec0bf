"""Write results/comparison.md: ``python scripts/compare_models.py``.

Accuracies, evaluations and failures come from the runs in results/runs, times from results/bench/models.json, in
which all models took turns: `python benchmarks/models.py --classes l,mc,ode --runs RUNS --out results/bench/models.md`.
Who is ahead follows from these numbers; nothing here is typed in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from pcdeq.files import write_file
from pcdeq.report.tables import Line, collect, markdown_table
from pcdeq.training import find_runs

RESULTS = Path(__file__).parents[1] / "results"
DATA, IMAGES, BATCH = "mnist", 60_000, 64
CLASSES = {"l": ("One dense layer (L)", ("l",)), "mc": ("Three layers or tiers (MC, MT)", ("mc", "mt"))}
NOISE = 0.4  # percent points: two standard errors of a difference, at 98 % of 10,000 images each
TIE = 1.1  # a ratio of times below it is none


@dataclass(frozen=True)
class Times:
    """Milliseconds of a training and an inference step of 64 images, by row, of models that took turns."""

    training: dict[str, float]
    inference: dict[str, float]
    threads: int

    @classmethod
    def read(cls, path: Path) -> dict[str, Times]:
        """By class: a row that is in two was measured twice."""
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: cls(
                *({e["row"]: e[kind]["median"] for e in entries} for kind in ("training", "inference")),
                threads=found["threads"],
            )
            for name, entries in found["classes"].items()
        }

    def epoch(self, row: str) -> float | None:
        """Seconds of training."""
        return self.training[row] * IMAGES / BATCH / 1e3 if row in self.training else None


def accuracies(line: Line, epoch: int) -> list[float]:
    return [run.metrics[epoch - 1].test_accuracy for run in line.runs]


def with_spread(values: list[float]) -> str:
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f} ({len(values)} runs)" if len(values) > 1 else "")


def steps(line: Line, epoch: int, direction: str) -> str:
    mean = line.steps(direction, epoch)
    return "1" if mean is None else f"{mean:.1f}"


def failures(line: Line, epoch: int) -> float:
    """Samples of a run that did not converge, in the mean over the runs."""
    return fmean(sum(one.unconverged for one in run.metrics[:epoch]) for run in line.runs)


def class_table(lines: list[Line], epochs: int, times: Times) -> str:
    entries = []
    for line in lines:
        seconds, proved = times.epoch(line.row.name), line.certified
        later = f"{with_spread(accuracies(line, line.epochs))} after {line.epochs}" if line.epochs > epochs else ""
        entries.append(
            {
                "row": line.row.title,
                "parameters": f"{line.parameters:,}",
                f"% after {epochs}": with_spread(accuracies(line, epochs)),
                "% later": later,
                "s/epoch": "" if seconds is None else f"{seconds:.1f}",
                "forward": steps(line, epochs, "forward"),
                "backward": steps(line, epochs, "backward"),
                "unconverged": f"{failures(line, epochs):g}",
                "certified": "" if proved is None else f"{100 * proved[0] / proved[1]:.1f} %",
            }
        )
    return markdown_table(entries)


def slow_table(slow: list[Line], peer: Line, classes: dict[str, Times]) -> str:
    """Each model that had no time for an epoch, and a pcDEQ trained for the same time."""
    entries = []
    for line in slow:
        times = next(times for times in classes.values() if {line.row.name, peer.row.name} <= times.training.keys())
        trained = (line.steps_per_epoch or 0) * line.epochs
        minutes = fmean(sum(one.seconds for one in run.metrics) for run in line.runs) / 60
        equal = int(trained * times.training[line.row.name] / times.training[peer.row.name] * BATCH / IMAGES)
        equal = min(equal, peer.epochs)  # it may have ended before
        reached = f"{with_spread(accuracies(peer, equal))} after {equal} epochs" if equal else ""
        entries.append(
            {
                "row": line.row.title,
                "parameters": f"{line.parameters:,}",
                "steps": str(trained),
                "minutes": f"{minutes:.0f}",
                "%": with_spread(accuracies(line, line.epochs)),
                "ms/step": f"{times.training[line.row.name]:.0f}",
                "forward": steps(line, line.epochs, "forward"),
                "backward": steps(line, line.epochs, "backward"),
                "unconverged": f"{failures(line, line.epochs):g}",
                f"{peer.row.title} in that time, %": reached,
            }
        )
    return markdown_table(entries)


@dataclass(frozen=True)
class Finding:
    """A sentence, and whether pcDEQ is ahead (1), behind (-1) or neither (0) in it."""

    sentence: str
    sign: int


def accuracy_findings(title: str, lines: list[Line], epochs: int) -> Iterable[Finding]:
    """The best pcDEQ against the best of every other family."""
    families = dict.fromkeys(line.row.family for line in lines)
    best = {
        family: max(
            ((fmean(accuracies(line, epochs)), line) for line in lines if line.row.family == family),
            key=lambda pair: pair[0],
        )
        for family in families
    }
    ours, our_line = best.pop("pcdeq")
    for theirs, line in best.values():
        gap = ours - theirs
        yield Finding(
            f"{title}, accuracy after {epochs} epoch(s): {our_line.row.title} {ours:.2f}, "
            f"{line.row.title} {theirs:.2f} ({gap:+.2f}).",
            0 if abs(gap) < NOISE else 1 if gap > 0 else -1,
        )


def time_findings(title: str, lines: list[Line], times: Times) -> Iterable[Finding]:
    """A step of pcDEQ with ReLU6 against one of every other model."""
    ours = next(line for line in lines if line.row.family == "pcdeq" and line.row.activation == "relu6")
    for line in lines:
        if line.row.family == "pcdeq" or line.row.name not in times.training:
            continue
        for kind, table in (("training", times.training), ("inference", times.inference)):
            ratio = table[line.row.name] / table[ours.row.name]
            sign = 0 if 1 / TIE < ratio < TIE else 1 if ratio > 1 else -1
            yield Finding(f"{title}, time of {kind}: {line.row.title} takes {ratio:.2f} times that of ours.", sign)


def failure_findings(title: str, lines: list[Line], epochs: int) -> Iterable[Finding]:
    """A run in the mean, the worst pcDEQ against every other model that solves."""
    ours = max(failures(line, epochs) for line in lines if line.row.family == "pcdeq")
    for line in lines:
        if line.row.family in ("pcdeq", "explicit"):
            continue
        theirs = failures(line, epochs)
        yield Finding(
            f"{title}, unconverged in {epochs} epoch(s): {line.row.title} {theirs:g}, the worst pcDEQ {ours:g}.",
            (theirs > ours) - (theirs < ours),
        )


def longest(lines: Iterable[Line], recipe: str) -> list[Line]:
    """Of each row the longest training by a recipe, with the usual solver."""
    found: dict[str, Line] = {}
    for line in lines:
        known = found.get(line.row.name)
        usual = line.runs and not line.changes and line.solver == "default" and line.row.recipe == recipe
        if usual and (known is None or line.epochs > known.epochs):
            found[line.row.name] = line
    return list(found.values())


def main() -> None:
    times = Times.read(RESULTS / "bench" / "models.json")
    all_lines = collect(find_runs(RESULTS / "runs"))[DATA]
    lines = longest(all_lines, "paper")
    quick = [line for line in longest(all_lines, "fast") if line.is_full]
    parts = ["# pcDEQ beside the models that it is compared with", HEAD.format(threads=times["l"].threads)]
    findings: list[Finding] = []
    for name, (title, topologies) in CLASSES.items():
        group = [line for line in lines if line.row.topology in topologies and line.steps_per_epoch is None]
        epochs = min(line.epochs for line in group)
        parts += [f"## {title}, {epochs} epoch{'s' if epochs > 1 else ''}", class_table(group, epochs, times[name])]
        findings += accuracy_findings(title, group, epochs)
        findings += time_findings(title, group, times[name])
        findings += failure_findings(title, group, epochs)
    for name, (title, topologies) in CLASSES.items():
        group = [line for line in quick if line.row.topology in topologies]
        if not {"pcdeq"} < {line.row.family for line in group}:
            continue  # nothing to compare with
        epochs, title = min(line.epochs for line in group), f"{title}, our recipe"
        parts += [f"## {title}, {epochs} epochs", QUICK, class_table(group, epochs, times[name])]
        findings += accuracy_findings(title, group, epochs)
        findings += failure_findings(title, group, epochs)
    slow = [line for line in lines if line.steps_per_epoch is not None]
    if slow:
        peer = next(line for line in lines if line.row.name == "pcdeq-1-mc-relu6")
        parts += ["## Too slow for an epoch: about half an hour each", SLOW, slow_table(slow, peer, times)]
    for heading, sign in (("Where pcDEQ is ahead", 1), ("Where it is not ahead", -1), ("Where neither is", 0)):
        sentences = [f"- {finding.sentence}" for finding in findings if finding.sign == sign]
        parts += [f"## {heading}", "\n".join(sentences) or "Nowhere in these tables."]
    parts += ["## What the numbers do not say", CAVEATS]
    write_file(RESULTS / "comparison.md", ("\n\n".join(parts) + "\n").encode())


HEAD = """Made by `python scripts/compare_models.py` from [runs](runs) and [times](bench/models.md). MNIST; all models
in the same trainer, with the same batches, epochs and, unless it says our recipe, one drop of the rate; learning rate
and weight decay are each model's own. Accuracy in percent of the 10,000 test images, one run unless it says otherwise.
Seconds of an epoch are 938 steps at the median of a step, {threads} threads, all models in turns in one process.
Forward and backward: evaluations of a layer in a solve, in the mean of that epoch. Unconverged: samples, over layers,
directions and epochs. Certified: share of 1,000 predictions proved to be those of the exact equilibrium; no other model
here can be asked."""

QUICK = """What each model reaches in the few epochs of our recipe, which was chosen for pcDEQ: `--recipe fast`."""

SLOW = """A pass over MNIST would take them from one to four hours on one thread, so they were stopped after some steps
and evaluated. Minutes are by the clock, on a machine with other work, pauses included. The last column is what pcDEQ
reached in as much work, at the ratio of their steps, measured in turns."""

CAVEATS = f"""- Differences of accuracy below {NOISE} points are called none: 10,000 images cannot tell
  them apart. Times within a factor of {TIE} are called equal.
- Implementations differ, not only methods: pcDEQ's solves run in a C kernel on a CPU, DEQ's and monDEQ's are plain
  torch, and the ODEs use torchdiffeq. Evaluations are the fairer count.
- The baselines were not tuned here. monDEQ has no weight decay, as in its authors' code, pcDEQ has the paper's. Batch
  size and the drop of the rate are ours for all of them.
- A few epochs say little about where a model ends; monDEQ-MT takes too long on this machine for all 40."""


if __name__ == "__main__":
    main()
