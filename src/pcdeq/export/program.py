"""Trained networks as files that run without pcdeq: ONNX and torch.export programs.

A file takes float32 pixels in [0, 1], ``(n, channels, height, width)``, normalises them itself and gives ``logits``,
and in the loop form ``converged``, one truth value per sample. Its metadata say what the input is, what the classes
are called, and how far the logits are from those of the exact equilibrium network: proved, or measured.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pcdeq._version import __version__
from pcdeq.errors import PcdeqError, UsageError
from pcdeq.export.graph import Graph, Loop, fixed_graph, loop_graph
from pcdeq.export.truncation import (
    DEEPEST,
    contractions,
    exact_logits,
    measured_depth,
    measured_error,
    proved_depth,
    proved_error,
)
from pcdeq.extras import needing
from pcdeq.files import write_file
from pcdeq.models import Network
from pcdeq.proofs.precision import full_precision

Form = Literal["fixed", "loop"]
Kind = Literal["onnx", "torch-export"]

PROVED = "proved for every input, in exact arithmetic"
PROVED_IF_CONVERGED = "proved for every input that converged, in exact arithmetic"  # the loop form
OPSET = 18
ERROR, TOL, MAX_STEPS = 0.01, 1e-4, 200  # by default


@dataclass(frozen=True)
class Plan:
    """What is going to be exported, and what can be said about it.

    Attributes:
        graph: the module.
        error: at most so far are its logits from those of the exact equilibrium network.
        basis: `PROVED`, `PROVED_IF_CONVERGED`, or on how many images this was measured.
        measured: the largest error on those images, at most half of ``error``, as others may be worse; None where
            the error is proved.
    """

    graph: Graph
    error: float
    basis: str
    measured: float | None = None

    @property
    def proved(self) -> bool:
        """Whether the error is a theorem."""
        return self.basis in (PROVED, PROVED_IF_CONVERGED)

    @property
    def steps(self) -> tuple[int, ...] | None:
        """Of each equilibrium layer, in the fixed form."""
        counts = tuple(getattr(layer, "steps", 0) for layer in self.graph.equilibria)
        return counts if all(counts) else None


@full_precision()
def plan_export(
    model: Network,
    form: Form = "fixed",
    *,
    error: float = ERROR,
    steps: int | None = None,
    tol: float = TOL,
    max_steps: int = MAX_STEPS,
    calibration: Tensor | None = None,
) -> Plan:
    """Choose the depth of a network's graph, and find out how far it is from the exact network.

    Args:
        form: ``"fixed"``, so many steps for every input, or ``"loop"``, each sample until its residual is small.
        error: fixed form: how far a logit may be off. The number of steps follows: by T4 where that is of use, that
            is with sigmoid or a floor under the input, else from the calibration images.
        steps: fixed form: the number of steps of each layer, instead; the error follows.
        tol: loop form: a sample is done when max|g(z) - z| < tol max|g(z)|.
        max_steps: loop form: after so many steps a sample that is not done is given up, and its ``converged`` false.
        calibration: pixels in [0, 1], ``(n, *image_shape)``, for networks about which nothing can be proved.

    >>> import pcdeq
    >>> model = pcdeq.build("pcdeq-2-l-sigmoid").eval()
    >>> plan = plan_export(model, error=1e-3)
    >>> plan.proved, plan.error <= 1e-3, plan.steps[0] < 12
    (True, True, True)
    """
    _check_model(model, calibration)
    check_options(form, error=error, steps=steps, tol=tol, max_steps=max_steps)
    graph = loop_graph(model, tol, max_steps) if form == "loop" else fixed_graph(model, (steps or 1,) * model.widths)
    rates = contractions(graph)
    if rates is not None:
        found = proved_depth(model, rates, error) if form == "fixed" and steps is None else graph
        if found is not None:
            return Plan(found, proved_error(found, rates), PROVED_IF_CONVERGED if form == "loop" else PROVED)
    if calibration is None:
        raise UsageError(
            "T4 gives no useful bound for this network (that takes sigmoid, or a floor under the input): give "
            "calibration images to measure the error on"
        )
    basis = f"measured on {len(calibration)} images"
    if form == "fixed" and steps is None:
        graph, worst = measured_depth(model, calibration, error)
        return Plan(graph, error, basis, worst)
    worst = measured_error(graph, calibration, exact_logits(model, calibration))
    return Plan(graph, 2 * worst, basis, worst)  # twice, for other images may be worse


def check_options(
    form: str, *, error: float = ERROR, steps: int | None = None, tol: float = TOL, max_steps: int = MAX_STEPS
) -> None:
    """Refuse numbers that make no sense."""
    if form not in ("fixed", "loop"):
        raise UsageError(f"form must be 'fixed' or 'loop', got {form!r}")
    if not 0 < error < float("inf"):
        raise UsageError(f"error must be above 0, got {error}")
    if steps is not None and not 1 <= steps <= DEEPEST:
        raise UsageError(f"steps must be from 1 to {DEEPEST}, got {steps}")
    if not 0 < tol < 1:
        raise UsageError(f"tol must be between 0 and 1, got {tol}")
    if max_steps < 1:
        raise UsageError(f"max_steps must be at least 1, got {max_steps}")


def _check_model(model: Network, calibration: Tensor | None) -> None:
    if not isinstance(model, Network):
        raise UsageError(f"export takes a network such as pcdeq.build or pcdeq.load give, not {type(model).__name__}")
    if model.training:
        raise UsageError("export wants a network in evaluation mode: call model.eval() first")
    if calibration is not None and (not len(calibration) or tuple(calibration.shape[1:]) != model.image_shape):
        wanted = f"(n, {', '.join(map(str, model.image_shape))})"
        raise UsageError(f"calibration images must have shape {wanted}, got {tuple(calibration.shape)}")


def describe(plan: Plan, model: Network, **more: Any) -> dict[str, str]:
    """The metadata of an exported file; ``more`` is what the caller knows about the network, such as its accuracy."""
    first = plan.graph.equilibria[0]
    if isinstance(first, Loop):
        rule = {"tol": first.tol, "max_steps": first.max_steps, "logit_error_holds": "for samples that are converged"}
    else:
        rule = {"steps": plan.steps}
    shape = ", ".join(map(str, model.image_shape))
    entries: dict[str, Any] = {
        "version": __version__,
        "form": "loop" if isinstance(first, Loop) else "fixed",
        **rule,
        "logit_error": plan.error,
        "logit_error_basis": plan.basis,
        "logit_error_measured": plan.measured,
        "activation": first.activation.name,
        "input": f"float32 (n, {shape}), pixels in [0, 1]; the normalisation is inside",
        **more,
    }
    if model.preprocessing is not None:
        entries["classes"] = model.preprocessing.classes
    return {f"pcdeq.{name}": _text(value) for name, value in entries.items() if value is not None}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def to_onnx(plan: Plan, metadata: dict[str, str]) -> bytes:
    """The graph as an ONNX model of dynamic batch size."""
    require_onnx("onnx", "onnxscript")
    names = ["logits", "converged"] if plan.steps is None else ["logits"]
    traced = trace(plan.graph)
    with _exporting():
        options: dict[str, Any] = {"opset_version": OPSET, "dynamo": True, "verbose": False}
        options |= {"input_names": ["pixels"], "output_names": names, "dynamic_shapes": ({0: "n"},)}
        program = torch.onnx.export(traced, **options)
    assert program is not None
    _tidy(program.model)
    program.model.metadata_props.update(metadata)
    program.model.producer_name, program.model.producer_version = "pcdeq", __version__
    return program.model_proto.SerializeToString()


def _tidy(model: Any) -> None:
    """Make the file small: the exporter repeats the weight in every step, and keeps stack traces and unused numbers."""
    passes = importlib.import_module("onnx_ir.passes.common")
    passes.DeduplicateInitializersPass(size_limit=1 << 30)(model)
    passes.ClearMetadataAndDocStringPass()(model)
    passes.RemoveUnusedNodesPass()(model)  # onnxruntime would warn of each number


def to_torch_export(plan: Plan, metadata: dict[str, str]) -> bytes:
    """The graph as a program for `torch.export.load`; its metadata are the extra file ``metadata.json``."""
    if plan.steps is None:
        raise UsageError("a torch.export program has a fixed number of steps: the loop form is for ONNX")
    buffer, traced = io.BytesIO(), trace(plan.graph)
    with _exporting():
        torch.export.save(traced, buffer, extra_files={"metadata.json": json.dumps(metadata, indent=2)})
    return buffer.getvalue()


def trace(graph: Graph) -> torch.export.ExportedProgram:
    """The graph as torch's own program, for any batch size."""
    pixels = torch.zeros(2, *graph.image_shape)
    with torch.no_grad(), _exporting():
        return torch.export.export(graph, (pixels,), dynamic_shapes=({0: torch.export.Dim("n")},))


def write_export(model: Network, path: str | os.PathLike[str], plan: Plan, to: Kind = "onnx") -> Path:
    """Write what was planned, whole or not at all.

    >>> import tempfile, pcdeq
    >>> model = pcdeq.build("pcdeq-2-l-sigmoid").eval()
    >>> path = write_export(model, Path(tempfile.mkdtemp()) / "digits.pt2", plan_export(model), to="torch-export")
    >>> program = torch.export.load(path)
    >>> program.module()(torch.zeros(5, 1, 28, 28)).shape
    torch.Size([5, 10])
    """
    return write_file(Path(path), render(plan, to, describe(plan, model)))


def render(plan: Plan, to: Kind, metadata: dict[str, str]) -> bytes:
    """The content of the file."""
    return to_onnx(plan, metadata) if to == "onnx" else to_torch_export(plan, metadata)


def require_onnx(*names: str) -> Any:
    """Import packages of the extra ``onnx``, and return the last; one clear line where one is missing."""
    module: Any = None
    with needing("onnx", "ONNX"):
        for name in names:
            module = importlib.import_module(name)
    return module


@contextmanager
def _exporting() -> Iterator[None]:
    """Torch's exporters log and warn about themselves, and fail with the types of their inner workings."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise PcdeqError(f"torch {torch.__version__} could not export this network: {reason}") from error
    finally:
        logger.setLevel(level)
