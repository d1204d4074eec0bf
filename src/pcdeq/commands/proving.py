"""Certify what a network says, and audit why its equilibria exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pcdeq.commands.shared import Flag, Json, RunDataDir, RunFolder, draw, show, table, track
from pcdeq.errors import PcdeqError, UsageError

if TYPE_CHECKING:
    from pcdeq.proofs.check import LayerReport


@dataclass(frozen=True)
class Certify:
    """Prove, test image by test image, which class the exact equilibrium network gives."""

    folder: RunFolder
    images: int | None = None
    """So many test images, spread over the test set. (default: all)"""
    radius: float = 0.0
    """Prove the class for every picture within this distance in each pixel, which go from 0 to 1: robustness."""
    bounds: Literal["best", "intervals", "linear"] = "best"
    """With a radius: intervals are quick and coarse, linear ones prove far more; best: linear where that is cheap."""
    attack: Flag = False
    """Also search for pictures within the radius that are given another class: the other end of what is known."""
    curve: Flag = False
    """Also the share of images that are right and proved, by radius: the robustness curve."""
    data_dir: RunDataDir = None
    json: Json = False

    def run(self) -> None:
        """Certify, print, and draw the margins."""
        from pcdeq.models import load
        from pcdeq.proofs.attack import withstood
        from pcdeq.proofs.certify import BATCH, Certificate, certify, robustness_curve
        from pcdeq.report import figures
        from pcdeq.training import Run, spread

        if self.images is not None and self.images < 1:
            raise UsageError(f"images must be at least 1, got {self.images}")
        if not 0 <= self.radius < float("inf"):
            raise UsageError(f"radius must be a number >= 0, got {self.radius}")
        if self.attack and not self.radius:
            raise UsageError("an attack needs a radius: add --radius R")
        run = Run.open(self.folder)
        test = run.dataset(self.data_dir, quiet=self.json).test
        network, chosen = load(run), spread(len(test), self.images)
        images, labels = run.preprocessing(test.images[chosen]), test.labels[chosen]
        scale = run.preprocessing
        certificate = Certificate.join(
            certify(network, batch, radius=scale.scaled(self.radius), limits=scale.limits(), bounds=self.bounds)
            for batch in track(images.split(BATCH), "certifying", quiet=self.json)
        )
        kept = [
            withstood(network, *batch, radius=scale.scaled(self.radius), limits=scale.limits())
            for batch in track([*zip(images.split(BATCH), labels.split(BATCH), strict=True)], "attacking", self.json)
            if self.attack
        ]
        curve = robustness_curve(network, images, labels, scale) if self.curve else None
        proved, total = int(certificate.proved.sum()), len(certificate.proved)
        right = int((certificate.proved & (certificate.classes == labels)).sum())
        result = {"images": total, "certified": proved, "share": certificate.share, "radius": self.radius}
        result |= {"certified_and_right": right} | ({"curve": curve} if curve else {})
        what = f"for every picture within {self.radius:g}" if self.radius else "for the exact equilibrium network"
        text = [
            f"{proved:,} of {total:,} test images ({100 * certificate.share:.2f} %): class proved {what}",
            f"{right:,} of them ({100 * right / total:.2f} %): proved and right",
        ]
        if self.attack:
            left = int(sum(part.sum() for part in kept))
            result["withstood"] = left
            text.append(f"{left:,} ({100 * left / total:.2f} %): right, and no attack found otherwise")
        if self.radius and proved < total:
            text.append(
                "a class that is not proved is not refuted: the bounds widen from layer to layer, and beyond one layer "
                "soon hold every class; `pcdeq train --robust-radius R` trains a network for which they stay narrow"
            )
        if proved:
            lead = float(certificate.margin[certificate.proved].min())
            text.append(f"smallest lead of a proved class over the next: {lead:.3g}")
        text += [f"within {radius}: {100 * share:.2f} % proved and right" for radius, share in (curve or {}).items()]
        show([result], text, self.json)
        name = f"certificate-{self.radius:g}" if self.radius else "certificate"
        draw("drawn in", lambda: [figures.draw_certificate(run, certificate, labels, curve, name)], self.json)


@dataclass(frozen=True)
class Check:
    """Audit a trained network: which guarantee holds for each equilibrium layer, and why.

    Columns: rate, a priori: factor by which a step shrinks the distance for any weights (T4; 1 without a floor says
    nothing); measured: the same on test images; norm and radius: largest singular value and spectral radius of W;
    Banach enough: whether the classical theorem, norm times largest slope below 1, would have sufficed; dead rows:
    units whose weights are all 0; saturated: share of units whose slope is below 1e-3.
    """

    folder: RunFolder
    data_dir: RunDataDir = None
    json: Json = False

    def run(self) -> None:
        """Audit and print; fails where a guarantee does not hold."""
        from pcdeq.models import load
        from pcdeq.proofs.check import check
        from pcdeq.training import Run

        run = Run.open(self.folder)
        test = run.dataset(self.data_dir, quiet=self.json).test
        report = check(load(run), run.preprocessing(test.images[:64]))
        show([report.to_dict()], table([_check_entry(layer) for layer in report.layers]), self.json)
        for layer in report.layers:
            if not layer.holds:
                raise PcdeqError(f"{layer.name}: no guarantee: {layer.reason}")
        if not self.json:
            print("every equilibrium exists, is unique, and plain iteration reaches it, for every input")


def _check_entry(layer: LayerReport) -> dict[str, Any]:
    return {
        "layer": layer.name,
        "activation": layer.activation,
        "guarantee": f"pcDEQ-{layer.kind}" if layer.holds else "none",
        "rate, a priori": f"{layer.rate:.4f}",
        "measured": "-" if layer.measured_rate is None else f"{layer.measured_rate:.3f}",
        "norm of W": f"{layer.norm:.3f}",
        "radius": f"{layer.radius:.3f}",
        "Banach enough": "yes" if layer.contraction else "no",
        "dead rows": layer.dead_rows,
        "saturated": "-" if layer.saturated is None else f"{100 * layer.saturated:.1f} %",
    }
