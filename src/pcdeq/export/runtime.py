"""An exported file put to the test: what it says, and how fast, next to the network that it was made from."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any

import torch
from torch import Tensor

from pcdeq.errors import PcdeqError
from pcdeq.export.program import Plan, require_onnx
from pcdeq.export.truncation import exact_logits
from pcdeq.models import Network, freeze

ROUNDS = 5
SINGLE = 1e-5  # relative rounding of a network in float32, amply


@dataclass(frozen=True)
class Agreement:
    """How an exported network compares with its original on some images.

    Attributes:
        images: how many.
        same_class: for how many the class is that of the network in PyTorch.
        converged: for how many it says that it converged; all of them in the fixed form.
        difference: the largest difference of a logit from the exact network's, which the bound is about, on these.
        from_torch: the same from the network in PyTorch with its own solver's tolerance.
        rounding: what float32 may add to a bound in exact arithmetic, from the size of the logits.
        speed: PyTorch's time over that of the file, for all these images at once; above 1 the file is faster.
    """

    images: int
    same_class: int
    converged: int
    difference: float
    from_torch: float
    rounding: float
    speed: float


class OnnxFile:
    """An ONNX file, or its content, in onnxruntime, called like a module."""

    def __init__(self, source: str | Path | bytes) -> None:
        runtime = require_onnx("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = runtime.InferenceSession(
            source if isinstance(source, bytes) else str(source), options, providers=["CPUExecutionProvider"]
        )

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says about itself."""
        return dict(self.session.get_modelmeta().custom_metadata_map)

    def __call__(self, pixels: Tensor) -> Tensor:
        return torch.from_numpy(self.outputs(pixels)[0])

    def outputs(self, pixels: Tensor) -> list[Any]:
        """All of them, as arrays."""
        return self.session.run(None, {"pixels": pixels.numpy()})


def open_exported(content: bytes) -> Any:
    """A function from pixels to logits, from the content of a file of either kind."""
    is_zip = content.startswith(b"PK")  # as programs of torch.export are
    return torch.export.load(io.BytesIO(content)).module() if is_zip else OnnxFile(content)


@torch.no_grad()
def compare(model: Network, exported: Any, pixels: Tensor) -> Agreement:
    """Run both on the same images."""
    fast = freeze(model)
    inputs = pixels if model.preprocessing is None else model.preprocessing.normalise(pixels)
    ours, theirs = fast(inputs), exported(pixels)
    converged = torch.ones(len(pixels), dtype=torch.bool)
    if isinstance(exported, OnnxFile) and len(outputs := exported.outputs(pixels)) > 1:
        converged = torch.from_numpy(outputs[1])
    error = (theirs - exact_logits(model, pixels)).abs()[converged]
    # Interleaved, so that a busy machine slows both.
    times = [
        (timeit(lambda: fast(inputs), number=1), timeit(lambda: exported(pixels), number=1)) for _ in range(ROUNDS)
    ]
    return Agreement(
        images=len(pixels),
        same_class=int((ours.argmax(1) == theirs.argmax(1)).sum()),
        converged=int(converged.sum()),
        difference=float(error.max()) if len(error) else 0.0,
        from_torch=float((theirs - ours).abs().max()),
        rounding=SINGLE * float(ours.abs().max()),
        speed=median(ours for ours, _ in times) / median(theirs for _, theirs in times),
    )


def require_agreement(agreement: Agreement, plan: Plan) -> None:
    """Refuse a file that does not keep its word."""
    if not agreement.converged:
        raise PcdeqError("no test image converged; nothing was written: raise --max-steps or --tol")
    if not agreement.difference <= plan.error + agreement.rounding:
        advice = "a smaller --tol" if plan.steps is None else "more --steps, or a larger --error"
        raise PcdeqError(
            f"on {agreement.images} test images a logit is off by {agreement.difference:.3g}, more than "
            f"{plan.error:.3g} ({plan.basis}); nothing was written: try {advice}, or more images for --calibration"
        )
