"""Where the published data sets are: addresses, checksums, and the files of a user's own data folder.

Every SHA-256 below was read in the checksum lists of TensorFlow Datasets and found again in at
least one independent project (torchvision's prototype data sets, ``torchvision-ruby``, GoMLX);
none was computed here. The mirrors are those used by torchvision, Keras, TensorFlow Datasets and
Swift for TensorFlow; a mirror that serves other bytes does no harm, its file is refused.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pcdeq.data.downloads import DownloadBar
from pcdeq.errors import DataError, UsageError
from pcdeq.extras import needing

CONNECT_SECONDS = 10.0  # a dead host must not hold up the mirror behind it for long
READ_SECONDS = 60.0


@dataclass(frozen=True)
class RemoteFile:
    """One published file: its name, its SHA-256 and its addresses, the official one first."""

    name: str
    sha256: str
    urls: tuple[str, ...]

    @property
    def plain(self) -> str:
        """How it is called after unpacking."""
        return "cifar-10-batches-bin" if self.name == "cifar-10-binary.tar.gz" else self.name.removesuffix(".gz")


# Under a data folder, where people keep the files.
_FOLDERS = {
    "mnist": ("MNIST/raw", "mnist", "MNIST"),
    "fashion-mnist": ("FashionMNIST/raw", "fashion-mnist", "FashionMNIST"),
    "kmnist": ("KMNIST/raw", "kmnist", "KMNIST"),
    "cifar10": ("cifar10", "CIFAR10", "cifar-10"),
    "svhn": ("svhn", "SVHN"),
}
# Of SVHN no mirror is known to serve its files byte for byte: only the two schemes of one host.
_ADDRESSES = """
mnist         http://yann.lecun.com/exdb/mnist/
mnist         https://ossci-datasets.s3.amazonaws.com/mnist/
mnist         https://storage.googleapis.com/cvdf-datasets/mnist/
fashion-mnist http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/
fashion-mnist https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/
fashion-mnist https://storage.googleapis.com/tensorflow/tf-keras-datasets/
kmnist        http://codh.rois.ac.jp/kmnist/dataset/kmnist/
kmnist        https://storage.googleapis.com/s4tf-hosted-binaries/datasets/KMNIST/
cifar10       https://www.cs.toronto.edu/~kriz/
cifar10       https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/
svhn          http://ufldl.stanford.edu/housenumbers/
svhn          https://ufldl.stanford.edu/housenumbers/
"""
_FILES = """
mnist         train-images-idx3-ubyte.gz 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
mnist         train-labels-idx1-ubyte.gz 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
mnist         t10k-images-idx3-ubyte.gz  8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
mnist         t10k-labels-idx1-ubyte.gz  f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6
fashion-mnist train-images-idx3-ubyte.gz 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
fashion-mnist train-labels-idx1-ubyte.gz a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
fashion-mnist t10k-images-idx3-ubyte.gz  346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
fashion-mnist t10k-labels-idx1-ubyte.gz  67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5
kmnist        train-images-idx3-ubyte.gz 51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4
kmnist        train-labels-idx1-ubyte.gz e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17
kmnist        t10k-images-idx3-ubyte.gz  edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5
kmnist        t10k-labels-idx1-ubyte.gz  20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c
cifar10       cifar-10-binary.tar.gz     c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd
svhn          train_32x32.mat            435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8
svhn          test_32x32.mat             cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b
"""


def _files(dataset: str) -> tuple[RemoteFile, ...]:
    """The lines of one data set in the tables above."""
    bases = [base for owner, base in map(str.split, _ADDRESSES.strip().splitlines()) if owner == dataset]
    return tuple(
        RemoteFile(name, sha256, tuple(base + name for base in bases))
        for owner, name, sha256 in map(str.split, _FILES.strip().splitlines())
        if owner == dataset
    )


SOURCES = {dataset: _files(dataset) for dataset in _FOLDERS}


def fetch(dataset: str, *, data_dir: str | os.PathLike[str] | None = None, quiet: bool = False) -> tuple[Path, ...]:
    """Return the paths of a data set's files, looking in the user's folder first, then downloading.

    ``data_dir`` defaults to the environment variable ``PCDEQ_DATA``. Files found there are taken as they
    are, packed or plain: the readers validate them. Downloads go to ``PCDEQ_CACHE``, by default the
    system's cache folder, and must have the published SHA-256.
    """
    folder = _data_folder(data_dir)
    paths = []
    for file in SOURCES[dataset]:
        found = _find(dataset, file, folder) if folder else None
        paths.append(found or _download(dataset, file, quiet))
    return tuple(paths)


def _data_folder(data_dir: str | os.PathLike[str] | None) -> Path | None:
    given = data_dir or os.environ.get("PCDEQ_DATA")
    if not given:
        return None
    folder = Path(given).expanduser()
    if not folder.is_dir():
        origin = "data_dir" if data_dir else "the environment variable PCDEQ_DATA"
        raise UsageError(f"{origin} names {str(folder)!r}, which is not a folder")
    return folder


def _find(dataset: str, file: RemoteFile, folder: Path) -> Path | None:
    for subfolder in (*_FOLDERS[dataset], ""):
        for name in (file.plain, file.name):
            path = folder / subfolder / name
            if path.exists() and (subfolder or _belongs_to(dataset, file, path)):
                return path
    return None


def _belongs_to(dataset: str, file: RemoteFile, path: Path) -> bool:
    """Tell whether a file that lies in no data set's own folder is of this data set.

    MNIST, Fashion-MNIST and KMNIST share their file names, and must not be taken for each other. A
    packed original is known by its checksum; any other file of these names is taken for MNIST.
    """
    rivals = {other.sha256: name for name, files in SOURCES.items() for other in files if other.name == file.name}
    if len(rivals) == 1:
        return True
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return rivals.get(sha256, "mnist") == dataset


def _download(dataset: str, file: RemoteFile, quiet: bool) -> Path:
    """Return the cached file, else get it from the first address that serves the right bytes.

    pooch writes to a temporary file that takes its name only once the checksum is right, so that no
    half-written file is ever used; a cached file is checked again at each use.
    """
    with needing("train", f"downloading {dataset}"):
        import pooch

    folder = Path(os.environ.get("PCDEQ_CACHE") or pooch.os_cache("pcdeq")).expanduser() / dataset
    pooch.get_logger().setLevel("WARNING")  # where a file comes from is for our progress bar to say
    failures = []
    for url in file.urls:
        bar: Any = False if quiet else DownloadBar(f"{file.name} from {urlsplit(url).hostname}")
        downloader: Any = pooch.HTTPDownloader(  # whose type is not the one that pooch asks for
            progressbar=bar,
            chunk_size=1 << 16,
            timeout=(CONNECT_SECONDS, READ_SECONDS),
            # Else some servers announce a .gz as a compressed transfer, and it arrives unpacked.
            headers={"Accept-Encoding": "identity"},
        )
        try:
            return Path(pooch.retrieve(url, f"sha256:{file.sha256}", file.name, folder, downloader=downloader))
        except (OSError, ValueError) as error:  # requests raises the one, a wrong checksum the other
            failures.append(f"{url} ({_reason(error)})")
        finally:
            if bar:
                bar.stop()
    raise DataError(
        f"could not download {file.name}: {'; '.join(failures)}. Get the file by other means and name its "
        "folder with --data-dir or the environment variable PCDEQ_DATA"
    )


def _reason(error: Exception) -> str:
    """Why a download failed, in a few words."""
    import requests

    if isinstance(error, requests.Timeout):
        return "no answer"
    if isinstance(error, requests.ConnectionError):  # whose own words are a page of nested exceptions
        return "no connection"
    return str(error).split(". ")[0].split(" for url")[0]
