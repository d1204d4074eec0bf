"""Files that are not what they seem: small ones that unpack to gigabytes, deep ones, ones with impossible numbers.

Each is refused in one line, and no more memory is taken than what the file may hold.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import resource
import shutil
import struct
import tarfile
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import pcdeq
from pcdeq.cli import main
from pcdeq.data import formats, load_dataset
from pcdeq.errors import DataError, PcdeqError, UsageError
from pcdeq.models import load
from pcdeq.recipes import TrainConfig
from pcdeq.training import Run, resume, train
from pcdeq.training.summary import read_summary

GIGABYTE = 1 << 30


@contextmanager
def little_memory(extra: int):
    """No more than so much beyond what the process has already."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def refused(message: str, kind: type[PcdeqError] = DataError, *, memory: int = GIGABYTE // 2):
    with little_memory(memory), pytest.raises(kind, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert "allocate" not in str(caught.value)


def gzipped(start: bytes, zeros: int) -> bytes:
    """A gzip file of some bytes and many zeros, without ever holding them; members of a gzip file are joined."""
    block = 1 << 24
    return gzip.compress(start) + gzip.compress(bytes(block)) * (zeros // block)


class TestPublished:
    def test_idx_that_unpacks_to_gigabytes(self, tmp_path):
        header = b"\0\0\x08\x03" + struct.pack(">3I", 5, 28, 28)
        (tmp_path / "images").write_bytes(gzipped(header, 4 * GIGABYTE))
        with refused("has more bytes of data"):
            formats.read_idx(tmp_path / "images", (5, 28, 28))

    def test_idx_whose_header_says_gigabytes(self, tmp_path):
        header = b"\0\0\x08\x03" + struct.pack(">3I", 60_000, 2_800, 28)
        (tmp_path / "images").write_bytes(gzipped(header, 4 * GIGABYTE))
        with refused(r"shape \(60000, 2800, 28\), not \(60000, 28, 28\)"):
            formats.read_idx_split(tmp_path / "images", tmp_path / "labels", count=60_000)

    def test_cifar_archive_that_unpacks_to_gigabytes(self, tmp_path):
        (tmp_path / "cifar.tar.gz").write_bytes(gzipped(b"", 4 * GIGABYTE))
        with refused("cifar.tar.gz (cannot be read|lacks)"):
            formats.read_cifar10(tmp_path / "cifar.tar.gz")

    def test_cifar_archive_whose_member_is_all_holes(self, tmp_path):
        header = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        header.type, header.size = tarfile.GNUTYPE_SPARSE, 0
        block = bytearray(header.tobuf(tarfile.GNU_FORMAT))
        block[386:410] = b"%011o\0%011o\0" % (0, 0)  # one piece, of no bytes
        block[483:495] = b"%011o\0" % (8 * GIGABYTE - 1)  # of a file of this size
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        path = tmp_path / "cifar.tar.gz"
        path.write_bytes(gzip.compress(bytes(block) + bytes(1024)))
        assert path.stat().st_size < 1000
        with refused(r"data_batch_1\.bin does not have the 30,730,000 bytes|lacks"):
            formats.read_cifar10(path)

    def test_cifar_folder_with_a_file_of_gigabytes(self, tmp_path):
        (tmp_path / "data_batch_1.bin").write_bytes(gzipped(b"", 4 * GIGABYTE))
        with (tmp_path / "unknown.bin").open("wb") as file:
            file.truncate(8 * GIGABYTE)  # all holes
        with refused(r"data_batch_1\.bin does not have the 30,730,000 bytes"):
            formats.read_cifar10(tmp_path)

    def test_svhn_that_unpacks_to_gigabytes(self, tmp_path):
        packed = zlib.compress(bytes(1 << 28), 9)
        head = b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\x01IM"
        (tmp_path / "train.mat").write_bytes(head + struct.pack("<II", 15, len(packed)) + packed)
        with refused("holds more than the 15,400 bytes", memory=1 << 26):
            formats.read_svhn(tmp_path / "train.mat", count=5)

    def test_svhn_whose_array_is_said_to_be_gigabytes(self, tmp_path):
        from scipy.io import savemat

        path = tmp_path / "train.mat"
        savemat(path, {"X": np.zeros((32, 32, 3, 5), np.uint8), "y": np.ones((5, 1))})
        content = path.read_bytes().replace(struct.pack("<4i", 32, 32, 3, 5), struct.pack("<4i", 32, 32, 3, 10**6))
        path.write_bytes(content)
        with refused("not .32, 32, 3, 5. of uint8"):
            formats.read_svhn(path, count=5)


class TestOwnData:
    def write(self, path: Path, shape: tuple[int, ...], zeros: int, packing: int) -> Path:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
        with zipfile.ZipFile(path, "w", packing) as archive, archive.open("x_train.npy", "w", force_zip64=True) as file:
            file.write(header.getvalue())
            for _ in range(zeros >> 24):
                file.write(bytes(1 << 24))
        return path

    def test_npz_that_unpacks_to_gigabytes(self, tmp_path):
        path = self.write(tmp_path / "own.npz", (GIGABYTE // 784 + 1, 28, 28), 0, zipfile.ZIP_STORED)
        with refused("has the header of .* and not the data"):
            load_dataset(path)

    def test_npz_of_a_packing_that_numpy_does_not_write(self, tmp_path):
        path = self.write(tmp_path / "own.npz", (1 << 8, 1024, 512), 1 << 27, zipfile.ZIP_BZIP2)
        assert path.stat().st_size < 1000
        with refused("packed in a way that numpy does not write", memory=1 << 26):
            load_dataset(path)

    @pytest.mark.filterwarnings("default")
    def test_picture_of_more_pixels_than_a_camera_has(self, tmp_path):
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            Image.new("1", (12_000, 12_000)).save(tmp_path / name / "large.png")
        with refused("cannot be read as a picture .*DecompressionBombWarning"):
            load_dataset(tmp_path)


DEEP = "[" * 500 + "]" * 500  # not so deep that Python's reader of JSON gives up
DEEPER = "[" * 200_000 + "]" * 200_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = TrainConfig("pcdeq-1-l-tanh", epochs=1, channels=(8,), out=tmp_path_factory.mktemp("run"), device="cpu")
    return train(config, progress="none")


@pytest.fixture
def run(trained, tmp_path) -> Run:
    shutil.copytree(trained.path, tmp_path / "run")
    return Run.open(tmp_path / "run")


def change_config(run: Run, **changes: object) -> None:
    path = run.path / "config.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"config": told["config"] | changes}))


class TestRuns:
    def test_a_width_that_the_weights_do_not_have(self, run):
        change_config(run, channels=[25_000])
        with refused("does not hold the weights of this network"):
            resume(run, progress="none")
        with refused("are of another run than"):  # by the fingerprint of the configuration that they were trained with
            load(run)

    @pytest.mark.parametrize(
        "changes",
        [{"max_steps": 2**31}, {"seed": 2**63}, {"seed": 2**64}, {"epochs": 10**30}, {"batch_size": 2**40}],
    )
    def test_numbers_that_no_machine_has(self, run, changes):
        change_config(run, **changes)
        with refused("2\\^(31|63)|too many digits", PcdeqError):
            resume(run, progress="none")

    def test_more_steps_than_c_can_count(self):
        with pytest.raises(UsageError, match="below 2\\^31"):
            pcdeq.Anderson(max_steps=2**31)
        layer = pcdeq.PcDEQLinear(3, solver=pcdeq.Anderson(max_steps=2**31 - 1))
        assert layer.solve(torch.zeros(1, 3)).converged.all()

    @pytest.mark.parametrize(
        "text", [DEEP, DEEPER, "[NaN]", '{"data": 1e999}', "1" * 5000, "[1", "\xff", "{}", "[]", ""]
    )
    @pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json"])
    def test_json_that_is_nothing(self, run, capsys, name, text):
        (run.path / name).write_bytes(text.encode("latin1") + b"\n")
        if name == "summary.json":
            with refused("summary.json cannot be read"):
                read_summary(run)
        elif name == "metrics.jsonl":
            with refused("metrics.jsonl cannot be read"):
                _ = run.metrics
            assert load(run).channels == (8,)  # the network is there all the same
        else:
            for command in ("evaluate", "certify", "check"):
                with little_memory(GIGABYTE // 2):
                    assert main([command, str(run.path)]) in (1, 2)
                assert capsys.readouterr().err.count("\n") == 1

    @pytest.mark.parametrize("odd", [{}, {"a": {}}, 1, True, "x", None, [1], [[]], [None, "x"], {"x": [1]}])
    @pytest.mark.parametrize("key", ["command", "versions", "environment", "preprocessing", "image_shape", "config"])
    def test_parts_of_a_configuration_that_are_something_else(self, run, key, odd):
        told = json.loads((run.path / "config.json").read_text())
        (run.path / "config.json").write_text(json.dumps(told | {key: odd}))
        try:
            assert load(run).channels == (8,)
        except pcdeq.PcdeqError as error:
            assert "\n" not in str(error)

    def test_a_text_without_end(self, run):
        with (run.path / "metrics.jsonl").open("wb") as file:
            file.truncate(8 * GIGABYTE)
        with refused("more than the 67,108,864 bytes"):
            _ = run.metrics

    @pytest.mark.parametrize(
        "data",
        [
            {"mean": ["a"]},
            {"mean": [float(2**200)], "std": [0.0]},
            {"classes": [1, 2]},
            {"image_shape": [1, 28]},
            {"image_shape": ["1", 28, 28]},
            {"image_shape": None},
        ],
    )
    def test_data_that_no_network_has(self, run, data):
        path = run.path / "config.json"
        told = json.loads(path.read_text())
        path.write_text(json.dumps(told | {"data": told["data"] | data}))
        with refused("not the configuration of a run"):
            load(run)

    @pytest.mark.parametrize("other", [{"versions": [1]}, {"command": 5}, {"command": [5]}])
    def test_a_record_that_is_none(self, run, other):
        path = run.path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | other))
        with refused("not the configuration of a run"):
            load(run)

    def test_a_checkpoint_that_makes_gigabytes(self, run):
        class Large:
            def __reduce__(self):
                return bytearray, (4 * GIGABYTE,)

        path = run.path / "last" / "training.pt"
        with zipfile.ZipFile(path) as archive:
            contents = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in contents.items():
                archive.writestr(name, pickle.dumps(Large(), 2) if name.endswith("data.pkl") else content)
        assert path.stat().st_size < 100_000
        with refused("no tensor .*bytearray"):
            run.load()
