"""Train the paper's tables, check its claims, and write the report."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from pcdeq.commands.shared import DataDir, Device, Flag, show, table, warn
from pcdeq.errors import PcdeqError, UsageError
from pcdeq.recipes import PAPER_DATASETS, Recipe, TrainConfig

if TYPE_CHECKING:
    from pcdeq.reproduce import Job
    from pcdeq.training import Run


@dataclass(frozen=True)
class Reproduce:
    """Train the rows of the paper's tables; what is done is skipped, what was interrupted is resumed.

    Repeat the command after any interruption: at most an epoch of each run is lost. Examples:
      pcdeq reproduce mnist --rows 'pcdeq-?-l-*'
      pcdeq reproduce all --on ray --gpus 0.25
      pcdeq reproduce claims
    """

    what: Annotated[str, Positional, arg(metavar="{mnist,svhn,cifar10,all,claims}")]
    """A data set of the paper, all of them, or claims: check what the paper says against the runs that are there.
    Another data set is trained with the rows of the one it resembles."""
    rows: str = "*"
    """Only rows whose names match, as in 'pcdeq-1-mc-*' (`pcdeq list` shows them)."""
    runs: int = 5
    """Runs of each row, with seeds 0, 1, ..."""
    recipe: Recipe = "paper"
    """paper: its epochs and rates; fast: ours, of few epochs, for the rows that have one (`pcdeq list`)."""
    epochs: int | None = None
    """Epochs of each run, the first of the full length's; of a one-cycle row a whole cycle. (default: the recipe's)"""
    steps_per_epoch: int | None = None
    """End each epoch after so many steps, for a model too slow for whole passes. (default: no)"""
    solver: Literal["default", "paper", "picard", "anderson"] = "default"
    """default: ours; paper: plain iteration stopped by the whole batch, whose steps the paper counts."""
    on: Literal["local", "ray"] = "local"
    """local: one run after the other; ray: many at once, on the cluster at RAY_ADDRESS, all of whose machines must see
    runs_dir, or on this machine."""
    cpus: int | None = None
    """Cores of each run on Ray. (default: 1)"""
    gpus: float | None = None
    """GPUs of each run on Ray; may be a fraction. (default: 0)"""
    device: Device = "auto"
    runs_dir: Path = Path("runs")
    """Where the run folders are."""
    data_dir: DataDir = None
    json: Flag = False
    """Print a JSON object per row or claim at the end, for programs."""

    def run(self) -> None:
        """Train what is missing and write the tables."""
        if self.what == "claims":
            self._refuse_training()
            self._check_claims()
            return
        from pcdeq.data import dataset_names, load_dataset
        from pcdeq.reproduce import plan

        TrainConfig(epochs=self.epochs, steps_per_epoch=self.steps_per_epoch)  # mistakes before downloads
        given = {name: value for name in ("cpus", "gpus") if (value := getattr(self, name)) is not None}
        if self.on == "local" and given:
            options = " and ".join(f"--{name}" for name in given)
            raise UsageError(f"{options} belong to --on ray; here OMP_NUM_THREADS decides the cores")

        datasets = PAPER_DATASETS if self.what == "all" else (self.what,)
        if self.what not in ("all", *dataset_names()):
            if not Path(self.what).exists():
                raise UsageError(f"what is {self.what!r}? Choose mnist, svhn, cifar10, all or claims")
            datasets = (str(Path(self.what).resolve()),)
        # Fetch the data once, before many want them at once.
        shapes = [load_dataset(data, data_dir=self.data_dir, quiet=self.json).image_shape for data in datasets]
        names = ("runs", "runs_dir", "recipe", "epochs", "solver", "steps_per_epoch", "device", "data_dir")
        settings = {name: getattr(self, name) for name in names}
        jobs = plan(datasets, pattern=self.rows, image_channels=shapes[0][0], **settings)
        self._do(jobs, given)
        self._write_tables(jobs, datasets)

    def _refuse_training(self) -> None:
        """Claims are checked on the runs that are there: options of training would do nothing."""
        for item in fields(self):
            meant = item.name in ("what", "runs_dir", "data_dir", "json")
            if not meant and getattr(self, item.name) != item.default:
                option = item.name.replace("_", "-")
                raise UsageError(f"--{option} is for training; claims are checked on the runs that are there")

    def _do(self, jobs: list[Job], resources: dict[str, Any]) -> None:
        from rich.console import Console

        from pcdeq.reproduce import Board, run_locally, run_on_ray

        board = Board(jobs, Console(highlight=False, file=sys.stderr if self.json else sys.stdout))
        try:
            with board:
                if self.on == "ray":
                    run_on_ray(jobs, board, **resources)
                else:
                    run_locally(jobs, board)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt("interrupted; repeat the command to go on") from stop
        if board.failures:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in board.failures.items())
            count = f"{len(board.failures)} of {len(jobs)} runs failed"
            raise PcdeqError(f"{count}; repeat the command to retry them: {reasons}")

    def _write_tables(self, jobs: list[Job], datasets: tuple[str, ...]) -> None:
        from pcdeq.files import write_file
        from pcdeq.report.tables import collect, markdown_table

        lines = collect(_readable(self.runs_dir), datasets)
        wanted = {(job.config.row, job.config.data) for job in jobs}
        entries = [
            {"data": data, **line.cells()}
            for data in lines
            for line in lines[data]
            if (line.row.name, data) in wanted or (self.rows == "*" and data in datasets)
        ]
        write_file(self.runs_dir / "table.md", f"{markdown_table(entries)}\n".encode())
        where = f"saved in {self.runs_dir / 'table.md'}"
        more = f"figures, claims and the whole table: pcdeq report {self.runs_dir} -o report.html"
        show(entries, [*table(entries), "", where, more], self.json)

    def _check_claims(self) -> None:
        from pcdeq.report.claims import check_claims
        from pcdeq.report.studies import find_subjects
        from pcdeq.report.tables import collect

        lines = [line for group in collect(_readable(self.runs_dir)).values() for line in group]
        claims = check_claims(lines, *find_subjects(lines, self.data_dir))
        text = (f"{one.verdict:<12}  {one.statement} ({one.source})\n{'':12}  {one.measured}" for one in claims)
        show((claim.cells() for claim in claims), text, self.json)


def _readable(folder: Path) -> list[Run]:
    """The runs in a folder; those that are broken are named on standard error."""
    from pcdeq.training import readable_runs

    runs, broken = readable_runs(folder)
    for reason in broken:
        warn(f"left out: {reason}")
    return runs


@dataclass(frozen=True)
class Report:
    """Write tables, figures and claims of many runs as one page, to be looked at without a network."""

    runs_dir: Annotated[Path, Positional, arg(metavar="[RUNS]")] = Path("runs")
    """Folder of run folders."""
    out: Annotated[Path, arg(aliases=("-o",))] = Path("report.html")
    """The page: .html, self-contained, or .md, with its pictures beside it."""
    figures: Path | None = None
    """Folder for each figure as PNG and SVG with its data as CSV. (default: figures beside the page)"""
    bench: Path | None = None
    """What `make bench` wrote (bench.json), for the minutes that the authors' code would take. (default: left out)"""
    studies: bool = True
    """Also the figures for which trained networks are run: convergence, solvers, tolerance."""
    data_dir: DataDir = None

    def run(self) -> None:
        """Write the page and the figures."""
        from pcdeq.report.page import write_report

        if self.out.suffix not in (".html", ".md"):
            raise UsageError(f"the page must be .html or .md, got {self.out}")
        if not self.runs_dir.is_dir():
            raise UsageError(f"there is no folder {self.runs_dir}; `pcdeq reproduce` makes runs")
        folder = self.figures or self.out.parent / "figures"
        options = {"studies": self.studies, "data_dir": self.data_dir, "bench": self.bench}
        page = write_report(self.runs_dir, self.out, folder, **options)
        for reason in page.broken:
            warn(f"left out: {reason}")
        ran = sum(bool(line.runs) for lines in page.tables.values() for line in lines)
        print(f"{self.out}: {ran} rows with runs, {len(page.claims)} claims")
        print(f"{folder}: {len(page.charts)} figures")
