"""Inference that knows when it knows: an answer with a proof, and no more steps than the proof needs.

A small network learns digits. Then, for each test image: (1) the solve stops as soon as bounds on the equilibrium
settle the class; (2) the class is proved to be that of the exact equilibrium network; (3) also for every picture
within a given distance, which training against noise makes possible. What is not proved is said to be not proved.
``python examples/certified_inference.py``
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import pcdeq
from pcdeq.data import load_dataset
from pcdeq.proofs.certify import Certificate, class_decided

RADIUS = 0.02  # in each pixel, which go from 0 to 1


def trained(folder: Path, robust_radius: float | None) -> torch.nn.Sequential:
    config = pcdeq.TrainConfig(
        "pcdeq-1-l-tanh", epochs=4, schedule="one-cycle", lr=5e-3, robust_radius=robust_radius, out=folder
    )
    return pcdeq.load(pcdeq.train(config, progress="none"))


def early_answers(model: torch.nn.Sequential, images: torch.Tensor) -> None:
    """Stop each image's solve when its class is settled, and compare with solving on."""
    *before, deq, norm, classifier = model
    rest, front = torch.nn.Sequential(norm, classifier), torch.nn.Sequential(*before)
    with torch.no_grad():
        x = front(images)
        early = deq.solve(x, solver=pcdeq.Picard(), until=class_decided(rest))
        full = deq.solve(x, solver=pcdeq.Picard(tol=1e-6))
        same = rest(early.value).argmax(1) == rest(full.value).argmax(1)
    print(f"   settled for {int(early.converged.sum())} of {len(images)} images, the same class for {int(same.sum())}")
    print(
        f"   plain steps a picture: {early.steps.double().mean():.1f}, against {full.steps.double().mean():.1f} to 1e-6"
    )


def main() -> None:
    data = load_dataset("mnist-mini")
    labels = data.test.labels
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "ordinary training": trained(Path(folder, "plain"), None),
            f"trained against noise of {RADIUS}": trained(Path(folder, "robust"), RADIUS),
        }
    for name, model in models.items():
        scale = model.preprocessing
        images = scale(data.test.images)
        print(f"{name}:")
        early_answers(model, images)
        exact = pcdeq.certify(model, images)
        print(f"   class of the exact network proved for {100 * exact.share:.1f} %, right for {right(exact, labels)}")
        noisy = pcdeq.certify(model, images, radius=scale.scaled(RADIUS), limits=scale.limits())
        print(f"   proved and right for every picture within {RADIUS}: {right(noisy, labels)}")


def right(certificate: Certificate, labels: torch.Tensor) -> str:
    return f"{100 * (certificate.proved & (certificate.classes == labels)).double().mean():.1f} %"


if __name__ == "__main__":
    main()
