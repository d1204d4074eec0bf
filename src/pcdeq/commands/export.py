"""Hand a trained network on: to ONNX, to torch.export, to the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from pcdeq.commands.shared import Checkpoint, Json, RunDataDir, RunFolder, saying, show
from pcdeq.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from pcdeq.models import Network
    from pcdeq.training import Run

USUAL = {"form": "fixed", "calibration": 500, "compare": 1000}  # for files
SUFFIX = {"onnx": ".onnx", "torch-export": ".pt2"}


@dataclass(frozen=True)
class Export:
    """Write a trained network for others: an ONNX file, a torch.export program, a folder for the Hugging Face Hub.

    A file takes float32 pixels in [0, 1] (n, channels, height, width): the normalisation is inside. Its metadata hold
    the names of the classes and how far its logits may be from those of the exact equilibrium network: proved (T4),
    where the network has sigmoid or a floor under its input, else measured on training images, and marked so. Before it
    is written it is run on test images and compared with PyTorch.
    """

    folder: RunFolder
    to: Literal["onnx", "torch-export", "hub"] = "onnx"
    """onnx: for onnxruntime; torch-export: for torch.export.load; hub: a folder for from_pretrained, with a card."""
    form: Literal["fixed", "loop"] | None = None
    """fixed: so many steps for every picture; loop: each until its residual is small; a second output says if it is.
    (default: fixed)"""
    error: float | None = None
    """Fixed form: how far a logit may be off; the number of steps follows. (default: 0.01)"""
    steps: int | None = None
    """Fixed form: the number of steps instead; the error follows."""
    tol: float | None = None
    """Loop form: the relative residual, in the largest component, at which a picture is done. (default: 1e-4)"""
    max_steps: int | None = None
    """Loop form: the steps after which a picture is given up. (default: 200)"""
    calibration: int | None = None
    """So many training images to measure the error on, where it cannot be proved. (default: 500)"""
    compare: int | None = None
    """So many test images to compare with PyTorch on; 0 writes without looking. (default: 1000)"""
    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    """File to write, or folder for the Hub. (default: model.onnx, model-loop.onnx, model.pt2, hub in the run)"""
    push_to: str | None = None
    """Upload to this repository on the Hub too, such as me/digits; with --to hub."""
    checkpoint: Checkpoint = "last"
    data_dir: RunDataDir = None
    json: Json = False

    def run(self) -> None:
        """Export and say what was written."""
        self._check()
        usual = {name: value for name, value in USUAL.items() if getattr(self, name) is None}
        replace(self, **usual)._export()

    def _export(self) -> None:
        from pcdeq.models import load
        from pcdeq.training import Run

        run = Run.open(self.folder)
        model = load(run, self.checkpoint)
        result = self._to_hub(run, model) if self.to == "hub" else self._to_file(run, model)
        show([result], _as_text(result), self.json)

    def _check(self) -> None:
        of_form = {"fixed": ("error", "steps"), "loop": ("tol", "max_steps")}
        of_files = (*USUAL, *of_form["fixed"], *of_form["loop"])
        form = self.form or USUAL["form"]
        foreign = dict.fromkeys(of_files if self.to == "hub" else (), "a file: --to onnx or torch-export")
        foreign |= {name: f"--form {one}" for one, names in of_form.items() if one != form for name in names}
        foreign |= {"push_to": "--to hub"} if self.to != "hub" else {}
        for name, owner in foreign.items():
            if getattr(self, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} belongs to {owner}; here it would do nothing")
        if self.error is not None and self.steps is not None:
            raise UsageError("give either --error or --steps: each decides the other")
        if self.to == "torch-export" and self.form == "loop":
            raise UsageError("a torch.export program has a fixed number of steps: --form loop is for --to onnx")
        for name in ("calibration", "compare"):
            if (getattr(self, name) or 0) < 0:
                raise UsageError(f"{name} must be at least 0, got {getattr(self, name)}")

    def _to_hub(self, run: Run, model: Network) -> dict[str, Any]:
        folder = self.out or run.path / "hub"
        model.save_pretrained(folder)
        result = {"to": "hub", "out": str(folder)}
        if self.push_to is not None:
            result["pushed_to"] = model.push_to_hub(self.push_to)
        return result

    def _to_file(self, run: Run, model: Network) -> dict[str, Any]:
        from pcdeq.export import compare, describe, open_exported, plan_export, require_agreement
        from pcdeq.export.program import check_options, render, require_onnx
        from pcdeq.files import write_file

        assert self.to != "hub" and self.form is not None
        if self.to == "onnx":
            require_onnx("onnx", "onnxscript", *(["onnxruntime"] if self.compare else []))
        given = {name: getattr(self, name) for name in ("error", "steps", "tol", "max_steps")}
        options = {name: value for name, value in given.items() if value is not None}
        check_options(self.form, **options)  # before data are fetched
        training, test = self._images(run)
        with saying("finding the number of steps and the error", quiet=self.json):
            plan = plan_export(model, self.form, calibration=training, **options)
        metadata = describe(
            plan, model, row=run.config.row, data=Path(run.config.data).name, test_accuracy=run.accuracy
        )
        out = self.out or run.path / f"model{'-loop' if self.form == 'loop' else ''}{SUFFIX[self.to]}"
        with saying(f"writing the graph as {SUFFIX[self.to]}, which may take torch a minute", quiet=self.json):
            content, agreement = render(plan, self.to, metadata), None
        if test is not None:
            with saying(f"comparing with PyTorch on {len(test):,} test images", quiet=self.json):
                agreement = compare(model, open_exported(content), test)
            require_agreement(agreement, plan)
        write_file(out, content)
        return {
            "to": self.to,
            "form": self.form,
            "out": str(out),
            "bytes": len(content),
            "steps": plan.steps,
            "error": plan.error,
            "basis": plan.basis,
            "measured": plan.measured,
            "compared": None if agreement is None else asdict(agreement),
        }

    def _images(self, run: Run) -> tuple[Tensor | None, Tensor | None]:
        """Pixels of some training and some test images, each spread over its split."""
        if not self.calibration and not self.compare:
            return None, None
        from pcdeq.training import spread

        def some(images: Tensor, count: int | None) -> Tensor | None:
            return images[spread(len(images), count)].float() / 255 if count else None

        dataset = run.dataset(self.data_dir, quiet=self.json)
        return some(dataset.train.images, self.calibration), some(dataset.test.images, self.compare)


def _error(result: dict[str, Any]) -> str:
    if result["measured"] is None:
        return f"at most {result['error']:.3g} in a logit, {result['basis']}"
    return f"{result['measured']:.3g} in a logit, {result['basis']}; {result['error']:.3g} is allowed for others"


def _as_text(result: dict[str, Any]) -> list[str]:
    if result["to"] == "hub":
        lines = [f"written         {result['out']}: config.json, model.safetensors, README.md"]
        lines.append(f"load with       from pcdeq.models import Network; Network.from_pretrained({result['out']!r})")
        return lines + ([f"uploaded        {result['pushed_to']}"] if "pushed_to" in result else [])
    steps = result["steps"]
    lines = [
        f"written         {result['out']} ({result['bytes'] / 1e6:.2f} MB)",
        f"steps           {'until the residual is small' if steps is None else ', '.join(map(str, steps))}",
        f"error           {_error(result)}",
    ]
    if (seen := result["compared"]) is not None:
        lines += [
            f"compared        {seen['same_class']:,} of {seen['images']:,} test images: class as in PyTorch",
            *([] if seen["converged"] == seen["images"] else [f"                {seen['converged']:,} converged"]),
            f"                largest difference of a logit: {seen['difference']:.3g} from the exact network, "
            f"{seen['from_torch']:.3g} from PyTorch's",
            f"speed           {seen['speed']:.2f} times that of pcdeq.freeze in PyTorch, all images at once",
        ]
    return lines
