"""Networks in the Hugging Face manner: a folder of config.json, model.safetensors and a model card.

Nothing in such a folder can run code: the configuration is checked key by key, weights are safetensors.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from pcdeq._version import __version__
from pcdeq.errors import DataError, PcdeqError, UsageError
from pcdeq.files import write_file
from pcdeq.layers import PcDEQ
from pcdeq.models.card import model_card
from pcdeq.models.networks import MC, SC, L, Network, Preprocessing, pcdeq_layers
from pcdeq.solvers import Anderson, Newton, Picard, Solver

TOPOLOGIES: dict[str, type[Network]] = {"l": L, "sc": SC, "mc": MC}
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
SOLVERS: dict[str, type[Solver]] = {kind.__name__: kind for kind in (Anderson, Picard, Newton)}
LAYER_KEYS = {"activation", "floor", "weight_norm", "solver", "adjoint_solver", "gradient", "gradient_steps"}
NETWORK_KEYS = {"topology", "channels", "image_shape", "num_classes", "layers", "preprocessing", "training"}


def save_pretrained(model: Network, folder: str | os.PathLike[str]) -> Path:
    """Write the three files, each whole or not at all, and return the folder."""
    path, config = Path(folder), to_config(model)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    content = {
        WEIGHTS: save_safetensors(weights, {"format": "pt"}),
        CARD: model_card(model).encode(),
        CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
    }
    for name, file in content.items():
        write_file(path / name, file)
    return path


def to_config(model: Network) -> dict[str, Any]:
    """What is needed to build the network again, as plain values."""
    topology = {kind: name for name, kind in TOPOLOGIES.items()}.get(type(model))
    if topology is None:
        raise UsageError(f"only the networks of pcdeq can be saved like this, not {type(model).__name__}")
    options = [_options_of(layer) for layer in pcdeq_layers(model)]
    if any(other != options[0] for other in options):
        raise UsageError("the equilibrium layers have different settings, which a configuration cannot tell")
    return {
        "model_type": "pcdeq",
        "pcdeq_version": __version__,
        "topology": topology,
        "channels": [layer.operator.shape[0] for layer in pcdeq_layers(model)],
        "image_shape": list(model.image_shape),
        "num_classes": model.num_classes,
        "layers": options[0],
        "preprocessing": None if model.preprocessing is None else asdict(model.preprocessing),
        "training": model.training_facts,
    }


def _options_of(layer: PcDEQ) -> dict[str, Any]:
    if layer.injection is not None or not layer.activation.builtin:
        raise UsageError("an injection or activation of your own is code, and cannot be saved: save the state_dict")
    return {
        "activation": layer.activation.name,
        "floor": layer.floor,
        "weight_norm": layer.operator.weight_norm,
        "solver": _solver_to_dict(layer.solver),
        "adjoint_solver": _solver_to_dict(layer.adjoint_solver),
        "gradient": layer.gradient,
        "gradient_steps": layer.gradient_steps,
        "warm_start": layer.warm is not None,
    }


def _solver_to_dict(solver: Solver) -> dict[str, Any]:
    if SOLVERS.get(type(solver).__name__) is not type(solver):
        raise UsageError(f"a solver of your own is code, and cannot be saved: {type(solver).__name__}")
    return {"name": type(solver).__name__, **asdict(solver)}


def from_pretrained(
    source: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
) -> Network:
    """The network in a folder, or in a repository on the Hub, in evaluation mode."""
    folder = Path(source)
    if (folder / CONFIG).is_file():
        config, weights = folder / CONFIG, folder / WEIGHTS
    elif folder.exists() or not _is_repository(str(source)):
        raise UsageError(f"{source} is neither a folder with a {CONFIG} nor a repository such as owner/name")
    else:
        config, weights = (_download(str(source), name, revision, token) for name in (CONFIG, WEIGHTS))
    network = from_config(_read_json(config), config)
    try:
        network.load_state_dict(load_safetensors(weights.read_bytes()))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DataError(f"{weights} does not hold the weights of this network: {error}") from error
    return network.eval()


def _is_repository(name: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not name.startswith(".")


def _download(repository: str, name: str, revision: str | None, token: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name, revision=revision, token=token))
    except Exception as error:  # of the network, of the Hub, of the disk: their types change between versions
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"{repository} is no folder here, and its {name} could not be fetched from the Hub: {reason}"
        ) from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def from_config(config: Any, path: Path) -> Network:
    """The untrained network that a configuration describes; every key is checked."""
    if not isinstance(config, dict) or config.get("model_type") != "pcdeq":
        hint = "; it is a run folder: pcdeq.load opens it" if isinstance(config, dict) and "config" in config else ""
        raise DataError(f"{path} is not the configuration of a pcdeq network{hint}")
    given = {name: value for name, value in config.items() if name not in ("model_type", "pcdeq_version")}
    try:
        _require_keys(given, NETWORK_KEYS)
        _require_keys(given["layers"], LAYER_KEYS | {"warm_start"})
        options = given["layers"] | {
            name: _solver_from_dict(given["layers"][name]) for name in ("solver", "adjoint_solver")
        }
        channels, image_shape = tuple(given["channels"]), tuple(given["image_shape"])
        network = TOPOLOGIES[given["topology"]](channels, image_shape, given["num_classes"], **options)
        if (preprocessing := given["preprocessing"]) is not None:
            _require_keys(preprocessing, {item.name for item in fields(Preprocessing)})
            network.preprocessing = Preprocessing(**{name: tuple(value) for name, value in preprocessing.items()})
    except (PcdeqError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DataError(f"{path} does not describe a network: {error}") from error
    network.training_facts = given["training"]
    return network


def _require_keys(given: dict[str, Any], expected: set[str]) -> None:
    if wrong := sorted(given.keys() ^ expected):
        raise DataError(f"unknown or missing: {', '.join(wrong)}")


def _solver_from_dict(given: dict[str, Any]) -> Solver:
    kind = SOLVERS[given["name"]]
    return kind(**{name: value for name, value in given.items() if name != "name"})


def push_to_hub(
    model: Network,
    repository: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    message: str | None = None,
) -> str:
    """Upload the three files to a repository on the Hub, which is made if it is not there; return its address."""
    from huggingface_hub import HfApi

    if not _is_repository(repository):
        raise UsageError(f"a repository is called owner/name, got {repository!r}")
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        try:
            api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=message or f"Upload with pcdeq {__version__}"
            )
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise PcdeqError(f"could not upload to {repository}: {reason}") from error
    return f"https://huggingface.co/{repository}"
