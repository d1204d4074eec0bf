"""The model card: what a network is, what it was trained on, what is guaranteed, how to load it."""

from __future__ import annotations

import json

from pcdeq._version import __version__
from pcdeq.layers import PcDEQ
from pcdeq.models.facts import TrainingFacts
from pcdeq.models.networks import Network, pcdeq_layers

TOPOLOGY = {
    "L": "one dense equilibrium layer",
    "SC": "one convolutional equilibrium layer",
    "MC": "three convolutional equilibrium layers",
    "TC": "two convolutional equilibrium layers",
}


def model_card(model: Network) -> str:
    """The card as Markdown, from the network and, if it comes from a run, from what that run recorded.

    >>> from pcdeq.models import build
    >>> print(model_card(build("pcdeq-2-l-sigmoid")).split("## ")[1])
    What it is
    <BLANKLINE>
    An equilibrium network (pcDEQ) for pictures of 1 x 28 x 28, with one dense equilibrium layer of width 80,
    activation sigmoid; 70,410 parameters, 10 classes.
    <BLANKLINE>
    <BLANKLINE>
    """
    facts, layers = model.training_facts or TrainingFacts(), pcdeq_layers(model)
    title = facts.row or f"pcdeq-{type(model).__name__.lower()}-{layers[0].activation.name}"
    sections = [
        _front_matter(facts, title),
        f"# {title}" + (f", trained on {facts.data}" if facts.data else ""),
        _what(model, layers),
        _results(facts),
        _guarantee(layers[0]),
        _loading(model),
        "## Reference\n\nPositive Concave Deep Equilibrium Models (Gabor, Piotrowski and Cavalcante, ICML 2024). "
        f"Made with pcdeq {__version__}, Apache-2.0.",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(facts: TrainingFacts, title: str) -> str:
    """What the Hub reads; strings as JSON, which is YAML too."""
    lines = ["library_name: pcdeq", "license: apache-2.0", "pipeline_tag: image-classification"]
    lines += ["tags:", "- pcdeq", "- deep-equilibrium", "- certified"]
    data, accuracy = facts.data, facts.test_accuracy
    if data:
        lines += ["datasets:", f"- {json.dumps(data)}"]
    if data and accuracy is not None:
        lines += [
            "model-index:",
            f"- name: {json.dumps(title)}",
            "  results:",
            "  - task: {type: image-classification}",
            f"    dataset: {{name: {json.dumps(data)}, type: {json.dumps(data)}}}",
            f"    metrics: [{{type: accuracy, value: {accuracy:.2f}}}]",
        ]
    return "\n".join(["---", *lines, "---"])


def _what(model: Network, layers: list[PcDEQ]) -> str:
    shape, widths = " x ".join(map(str, model.image_shape)), ", ".join(map(str, model.channels))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    text = (
        f"An equilibrium network (pcDEQ) for pictures of {shape}, with {TOPOLOGY[type(model).__name__]} of "
        f"{'widths' if len(layers) > 1 else 'width'} {widths},\n"
        f"activation {layers[0].activation.name}; {parameters:,} parameters, {model.num_classes} classes."
    )
    if model.preprocessing is not None:
        text += f"\n\nClasses: {', '.join(model.preprocessing.classes)}."
    return f"## What it is\n\n{text}"


def _results(facts: TrainingFacts) -> str:
    """What the run recorded; nothing is said that it did not."""
    told = {
        "data": facts.data,
        "test accuracy": _percent(facts.test_accuracy),
        "published accuracy": _percent(facts.published_accuracy),
        "epochs": facts.epochs,
        "seed": facts.seed,
        "predictions proved": facts.certified,
        "trained with": facts.versions,
        "command": f"`{facts.command}`" if facts.command else None,
    }
    rows = [f"| {name} | {value} |" for name, value in told.items() if value is not None]
    return "\n".join(["## Training", "", "| | |", "|---|---|", *rows]) if rows else ""


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f} %"


def _guarantee(layer: PcDEQ) -> str:
    name, rate = layer.activation.name, layer.rate()
    text = (
        f"Each equilibrium layer solves z = s(Wz + x) with W >= 0 and s = {name}, which is concave (pcDEQ-"
        f"{layer.activation.kind}): it has exactly one solution, for every picture, and plain iteration reaches it. "
        "`pcdeq.certify(model, images)` proves, picture by picture, which class the exact network gives."
    )
    if rate.steps is not None and rate.factor < 0.99:
        text += (
            f" The rate is known in advance: each step shrinks the relative distance to the solution by a factor of "
            f"{rate.factor:.3f} or better, so that {rate.steps} steps bring it below 1e-4 from any start."
        )
    return f"## What is guaranteed\n\n{text}"


def _loading(model: Network) -> str:
    plain = model.preprocessing is None
    prepared, kind = ("images", "float32") if plain else ("model.preprocessing(images)", "uint8")
    return f"""## How to load it

```python
from pcdeq.models import Network

model = Network.from_pretrained("this folder, or owner/name on the Hub")
logits = model({prepared})  # images: {kind} (n, {", ".join(map(str, model.image_shape))})
```"""
