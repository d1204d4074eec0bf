"""Downloads against a local server, and the search of a user's data folder."""

from __future__ import annotations

import gzip
import hashlib
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pcdeq.data import sources
from pcdeq.data.sources import SOURCES, RemoteFile, fetch
from pcdeq.errors import DataError, UsageError

CONTENT = bytes(range(256)) * 1000
NAME = "file.bin"


class Server(ThreadingHTTPServer):
    """Serves CONTENT well or badly, as the first part of the path says, and counts the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: Counter[str] = Counter()

    def url(self, behaviour: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{behaviour}/{NAME}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        behaviour = self.path.split("/")[1]
        self.server.requests[behaviour] += 1
        body = {"wrong": CONTENT[::-1], "half": CONTENT[: len(CONTENT) // 2]}.get(behaviour, CONTENT)
        if behaviour == "missing":
            self.send_error(404)
            return
        self.send_response(200)
        if behaviour != "unsized":
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(body[:1000] if behaviour == "unsized" else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PCDEQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PCDEQ_DATA", raising=False)
    return tmp_path / "cache"


def offer(monkeypatch: pytest.MonkeyPatch, *urls: str) -> None:
    """Make a data set "toy" of one file that is to be found at these addresses."""
    file = RemoteFile(NAME, hashlib.sha256(CONTENT).hexdigest(), urls)
    monkeypatch.setitem(SOURCES, "toy", (file,))
    monkeypatch.setitem(sources._FOLDERS, "toy", ("toy",))


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------------------------------- downloads


def test_download_is_kept_and_not_repeated(server: Server, cache: Path, monkeypatch):
    offer(monkeypatch, server.url("good"), server.url("mirror"))
    for _ in range(2):
        (path,) = fetch("toy", quiet=True)
        assert path == cache / "toy" / NAME
        assert path.read_bytes() == CONTENT
    assert server.requests == {"good": 1}
    assert files_in(cache) == [f"toy/{NAME}"]


@pytest.mark.parametrize("fault", ["missing", "wrong", "half", "unsized"])
def test_mirror_helps_after_a_bad_address(server: Server, cache: Path, monkeypatch, fault):
    offer(monkeypatch, server.url(fault), server.url("mirror"))
    (path,) = fetch("toy", quiet=True)
    assert path.read_bytes() == CONTENT
    assert server.requests == {fault: 1, "mirror": 1}
    assert files_in(cache) == [f"toy/{NAME}"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("missing", "404 Client Error"),
        ("wrong", "does not match the known hash"),
        ("half", "IncompleteRead"),
        ("unsized", "does not match the known hash"),
    ],
)
def test_bad_addresses_leave_nothing_behind(server: Server, cache: Path, monkeypatch, fault, reason):
    offer(monkeypatch, server.url(fault), server.url("missing"))
    with pytest.raises(DataError, match=f"could not download {NAME}.*{reason}.*PCDEQ_DATA") as caught:
        fetch("toy", quiet=True)
    assert server.url(fault) in str(caught.value)
    assert server.url("missing") in str(caught.value)
    assert files_in(cache) == []


def test_dead_host_is_passed_over(server: Server, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        dead = f"http://127.0.0.1:{closed.server_port}/{NAME}"
    offer(monkeypatch, dead, server.url("mirror"))
    (path,) = fetch("toy", quiet=True)
    assert path.read_bytes() == CONTENT


def test_dead_hosts_are_named_in_one_line(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        dead = f"http://127.0.0.1:{closed.server_port}/{NAME}"
    offer(monkeypatch, dead)
    with pytest.raises(DataError) as caught:
        fetch("toy", quiet=True)
    assert str(caught.value).startswith(f"could not download {NAME}: {dead} (no connection). Get the file")


def test_cached_file_that_went_bad_is_replaced(server: Server, cache: Path, monkeypatch):
    offer(monkeypatch, server.url("good"))
    (cache / "toy").mkdir(parents=True)
    (cache / "toy" / NAME).write_bytes(CONTENT[:-1])
    (path,) = fetch("toy", quiet=True)
    assert path.read_bytes() == CONTENT


def test_progress_is_lines_away_from_a_terminal_and_nothing_when_quiet(server: Server, cache, monkeypatch, capfd):
    offer(monkeypatch, server.url("good"))
    fetch("toy")
    out, error = capfd.readouterr()
    assert out == ""
    assert error == f"downloading {NAME} from 127.0.0.1, 0.3 MB\ndownloaded {NAME} from 127.0.0.1\n"
    fetch("toy")  # from the cache: nothing to tell
    (cache / "toy" / NAME).unlink()
    fetch("toy", quiet=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("fault", [None, "half", "unsized", "missing"])
def test_progress_is_a_bar_on_a_terminal(server: Server, monkeypatch, capfd, fault):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    offer(monkeypatch, *([server.url(fault)] if fault else []), server.url("good"))
    fetch("toy")
    out, error = capfd.readouterr()
    assert out == ""
    assert f"{NAME} from 127.0.0.1" in error
    assert "256.0/256.0 kB" in re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", error)


# -------------------------------------------------------------------------------- the user's folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dataset: str, file: RemoteFile, quiet: bool) -> Path:
        raise DataError(f"no network for {file.name}")

    monkeypatch.setattr(sources, "_download", refuse)


IDX_NAMES = [file.plain for file in SOURCES["mnist"]]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("dataset", "folder"),
    [
        ("mnist", "."),
        ("mnist", "MNIST/raw"),
        ("mnist", "mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
        ("kmnist", "KMNIST/raw"),
        ("kmnist", "kmnist"),
    ],
)
def test_idx_files_are_found_packed_and_plain(tmp_path: Path, offline, dataset, folder, suffix):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    paths = [tmp_path / folder / f"{name}{suffix}" for name in IDX_NAMES]
    for path in paths:
        path.write_bytes(gzip.compress(b"regenerated: not the published bytes"))
    assert list(fetch(dataset, data_dir=tmp_path)) == paths


@pytest.mark.parametrize("folder", [".", "cifar10"])
@pytest.mark.parametrize("name", ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"])
def test_cifar10_is_found_as_folder_and_archive(tmp_path: Path, offline, monkeypatch, folder, name):
    path = tmp_path / folder / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if name.endswith("bin") else path.touch()
    monkeypatch.setenv("PCDEQ_DATA", str(tmp_path))
    assert fetch("cifar10") == (path,)


@pytest.mark.parametrize("folder", [".", "svhn", "SVHN"])
def test_svhn_is_found(tmp_path: Path, offline, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    paths = tuple(tmp_path / folder / f"{part}_32x32.mat" for part in ("train", "test"))
    for path in paths:
        path.touch()
    assert fetch("svhn", data_dir=str(tmp_path)) == paths


def test_argument_goes_before_environment(tmp_path: Path, offline, monkeypatch):
    for folder in ("argument", "environment"):
        (tmp_path / folder / "cifar-10-batches-bin").mkdir(parents=True)
    monkeypatch.setenv("PCDEQ_DATA", str(tmp_path / "environment"))
    assert fetch("cifar10", data_dir=tmp_path / "argument")[0].parent.name == "argument"
    assert fetch("cifar10")[0].parent.name == "environment"


def test_files_that_are_missing_are_downloaded(server: Server, tmp_path: Path, monkeypatch):
    offer(monkeypatch, server.url("good"))
    assert fetch("toy", data_dir=tmp_path, quiet=True)[0].read_bytes() == CONTENT
    assert server.requests == {"good": 1}


@pytest.mark.parametrize("dataset", ["fashion-mnist", "kmnist"])
def test_unknown_idx_files_in_no_folder_of_their_own_are_mnist(tmp_path: Path, offline, dataset):
    for name in IDX_NAMES:
        (tmp_path / name).write_bytes(b"")
    assert len(fetch("mnist", data_dir=tmp_path)) == 4
    with pytest.raises(DataError, match="no network"):
        fetch(dataset, data_dir=tmp_path)


def test_packed_originals_are_told_apart_by_their_checksum(tmp_path: Path, offline, monkeypatch):
    originals = {}
    for dataset in ("mnist", "fashion-mnist"):
        files = []
        for file in SOURCES[dataset]:
            content = f"{dataset} {file.name}".encode()
            originals[dataset, file.name] = content
            files.append(RemoteFile(file.name, hashlib.sha256(content).hexdigest(), file.urls))
        monkeypatch.setitem(SOURCES, dataset, tuple(files))
    for (dataset, name), content in originals.items():
        if dataset == "fashion-mnist":
            (tmp_path / name).write_bytes(content)
    assert len(fetch("fashion-mnist", data_dir=tmp_path)) == 4
    with pytest.raises(DataError, match="no network"):
        fetch("mnist", data_dir=tmp_path)


def test_folder_that_is_not_there_is_named(tmp_path: Path, monkeypatch):
    with pytest.raises(UsageError, match=r"data_dir names '.*nowhere', which is not a folder"):
        fetch("mnist", data_dir=tmp_path / "nowhere")
    monkeypatch.setenv("PCDEQ_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"PCDEQ_DATA names '.*nowhere'"):
        fetch("mnist")


# ---------------------------------------------------------------------------------------- the table


def test_every_published_file_has_a_checksum_and_the_official_address_first():
    official = {
        "mnist": "http://yann.lecun.com/exdb/mnist/",
        "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "kmnist": "http://codh.rois.ac.jp/kmnist/dataset/kmnist/",
        "cifar10": "https://www.cs.toronto.edu/~kriz/",
        "svhn": "http://ufldl.stanford.edu/housenumbers/",
    }
    assert SOURCES.keys() == official.keys()
    files = [(name, file) for name, files in SOURCES.items() for file in files]
    assert len({file.sha256 for _, file in files}) == len(files) == 15
    for name, file in files:
        assert re.fullmatch("[0-9a-f]{64}", file.sha256)
        assert file.urls[0] == official[name] + file.name
        assert len(set(file.urls)) >= 2
