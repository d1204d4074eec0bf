"""Trained networks for other runtimes: ONNX files and torch.export programs.

plan = pcdeq.export.plan_export(model, "fixed", error=0.01)   # how many steps, and what is proved or measured
pcdeq.export.write_export(model, "digits.onnx", plan)
"""

from pcdeq.export.program import Plan, describe, plan_export, write_export
from pcdeq.export.runtime import Agreement, OnnxFile, compare, open_exported, require_agreement

__all__ = [
    "Agreement",
    "OnnxFile",
    "Plan",
    "compare",
    "describe",
    "open_exported",
    "plan_export",
    "require_agreement",
    "write_export",
]
