"""Networks on disk: one writer and one reader, for runs, for the package and for the Hub.

A file of weights says in its header, as a `Description`, what network they are of:

    a run         last/model.safetensors, and best/ where there was a validation split
    the package   weights/ROW-DATA.safetensors
    the Hub       model.safetensors, README.md (the card), and config.json: the description again, for people to read
                  and to change

Nothing in these files can run code, and memory is taken only for a network that fits the tensors that are there.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor

from pcdeq._version import __version__
from pcdeq.errors import DataError, PcdeqError, UsageError
from pcdeq.extras import needing
from pcdeq.files import find_folder, parse_json, read_json, write_file
from pcdeq.models.card import model_card
from pcdeq.models.description import Description
from pcdeq.models.facts import Which, describe_training, fingerprint, told_by
from pcdeq.models.networks import Network

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
KEY, RUN = "pcdeq", "run"  # of the description, and of the run's fingerprint, in the header of a file of weights
SHIPPED = Path(__file__).parents[1] / "weights"


def pretrained_names() -> list[str]:
    """The trained networks of the package, by the names that `pcdeq.load` knows.

    >>> "pcdeq-1-l-tanh-mnist" in pretrained_names()
    True
    """
    return sorted(path.stem for path in SHIPPED.glob("*.safetensors"))


def to_bytes(tensors: Mapping[str, Tensor], description: Description | None, run: str | None = None) -> bytes:
    """A file of weights, which says what they are of: the network and, by its fingerprint, the run."""
    header = {} if description is None else {KEY: description.to_json()}
    header |= {} if run is None else {RUN: run}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save_safetensors(plain, {"format": "pt", **header})


@contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_header(path: Path) -> Any:
    """What a file of weights says of itself, as JSON brings it, or None."""
    with _open_weights(path) as file:
        text = (file.metadata() or {}).get(KEY)
        return None if text is None else parse_json(text)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a file of weights."""
    with _open_weights(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)


def require_fit(path: Path, sketch: Network) -> None:
    """Refuse a file whose tensors are not those of a network, which is one on the device "meta": no memory is taken."""
    with _open_weights(path) as file:
        names = list(file.keys())
        sizes = {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in names}
    try:
        sketch.load_state_dict(sizes, assign=True)
    except RuntimeError as error:
        raise DataError(f"{path} does not hold the weights of this network: {_one_line(error)}") from error


def require_run(path: Path, run: str, told: Path) -> None:
    """Refuse a file of weights that says it is of another run than its folder; older ones do not say."""
    with _open_weights(path) as file:
        said = (file.metadata() or {}).get(RUN, run)
    if said != run:
        raise DataError(f"the weights in {path} are of another run than {told} describes: put back those of this run")


def save_pretrained(model: Network, folder: str | os.PathLike[str]) -> Path:
    """Write the three files of the Hub, each whole or not at all, and return the folder."""
    description = Description.of(model)
    content = {
        WEIGHTS: to_bytes(model.state_dict(), description),
        CARD: model_card(model).encode(),
        CONFIG: description.to_json().encode(),
    }
    for name, file in content.items():
        write_file(Path(folder) / name, file)
    return Path(folder)


def load(source: str | os.PathLike[str], checkpoint: Which = "last") -> Network:
    """A trained network, in evaluation mode: of a run or its folder, of the package, or of a folder of weights.

    Those of the package were trained on the whole of their training set. That of MNIST holds all digits of
    ``mnist-mini``, so accuracy on these says nothing.

    Its ``preprocessing`` turns uint8 images into its input and names its classes:

    >>> import torch
    >>> model = load("pcdeq-1-l-tanh-mnist")  # or load("runs/...")
    >>> images = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    >>> model(model.preprocessing(images)).shape, model.preprocessing.classes[:3]
    (torch.Size([2, 10]), ('0', '1', '2'))

    Args:
        source: what `train` returned, a run folder, a name of `pcdeq.models.pretrained_names`, or what
            `Network.save_pretrained` wrote.
        checkpoint: of a run: ``"last"``, or ``"best"``, which there is if it had a validation split.
    """
    if checkpoint not in get_args(Which):
        raise UsageError(f"checkpoint must be 'last' or 'best', got {checkpoint!r}")
    if not isinstance(source, (str, os.PathLike)):
        raise UsageError(f"load takes a run, its folder or a name of pcdeq.models.pretrained_names(), got {source!r}")
    folder = Path(source)
    config = folder / CONFIG
    told = read_json(config) if config.is_file() else None
    is_run = isinstance(told, dict) and "config" in told
    if is_run:
        path = find_checkpoint(folder, checkpoint) / WEIGHTS
    elif checkpoint != "last":
        raise UsageError(f"{source} is not a run: of it there is only the last epoch")
    else:
        path = _find_file(folder) if told is None else folder / WEIGHTS
    given = read_header(path)
    # People may edit the configuration of a folder. That of a run says what was to be done; the weights know better.
    by_weights = told is None or (is_run and given is not None)
    network = _restore(given, path, path) if by_weights else _restore(told, config, path)
    if is_run:
        require_run(path, fingerprint(*told_by(told)), config)
        if (network.image_shape, network.preprocessing) != told_by(told)[1:]:
            raise DataError(f"the weights in {path} do not fit {config}: other images or classes")
        network.training_facts = describe_training(folder, told, checkpoint)
    return network


def _restore(given: Any, said_by: Path, path: Path) -> Network:
    """The network that is described, with the tensors of a file, of whose sizes it must be."""
    try:
        description = Description.read(given)
        with torch.device("meta"):
            sketch = description.make()
    except (PcdeqError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise DataError(f"{said_by} does not describe a network: {_one_line(error)}") from error
    require_fit(path, sketch)
    network = description.make()
    network.load_state_dict(read_weights(path))
    return network.eval()


def find_checkpoint(run: Path, which: Which) -> Path:
    """The folder of a run's checkpoint."""
    path = find_folder(run / which)
    if path is None:
        reason = "it is kept only with --validation" if which == "best" else "no epoch was completed"
        raise UsageError(f"{run} has no checkpoint '{which}': {reason}")
    return path


def _find_file(path: Path) -> Path:
    """A file of weights by its path, or by the name of a network of the package."""
    names = pretrained_names()
    if str(path) in names:
        return SHIPPED / f"{path}.safetensors"
    if path.is_file():
        return path
    near = difflib.get_close_matches(str(path), names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}; `pcdeq list runs` shows runs"
    raise UsageError(f"{path} is neither a folder with a {CONFIG} nor a trained network of the package; {hint}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def from_pretrained(
    source: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
) -> Network:
    """What `load` finds, or else the network in a repository on the Hub."""
    if Path(source).exists() or not _is_repository(str(source)):
        return load(source)
    with needing("hub", "fetching from the Hub"):
        from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(str(source), revision=revision, token=token, allow_patterns=[CONFIG, WEIGHTS])
    except Exception as error:  # of the network, of the Hub, of the disk: their types change between versions
        raise DataError(
            f"{source} is no folder here, and could not be fetched from the Hub: {_first_line(error)}"
        ) from error
    return load(folder)


def push_to_hub(model: Network, repository: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Upload the three files to a repository on the Hub, which is made if it is not there; return its address."""
    if not _is_repository(repository):
        raise UsageError(f"a repository is called owner/name, got {repository!r}")
    with needing("hub", "uploading to the Hub"):
        from huggingface_hub import create_repo, upload_folder

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        try:
            address = create_repo(repository, private=private, token=token, exist_ok=True)
            message = f"Upload with pcdeq {__version__}"
            upload_folder(repo_id=repository, folder_path=folder, commit_message=message, token=token)
        except Exception as error:
            raise PcdeqError(f"could not upload to {repository}: {_first_line(error)}") from error
    return str(address)


def _is_repository(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
