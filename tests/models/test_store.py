"""Networks on disk, of runs, of the package and of the Hub: they come back as they were, and nothing else comes in."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard

import pcdeq
from pcdeq.data import load_dataset
from pcdeq.errors import DataError, PcdeqError, UsageError
from pcdeq.models import MC, SC, L, Network, Preprocessing, equilibrium_layers, load, pretrained_names
from pcdeq.models.card import model_card
from pcdeq.models.description import Description
from pcdeq.models.store import read_header, read_weights, to_bytes
from pcdeq.recipes import TrainConfig, find_row
from pcdeq.training import Run, train

GREY = Preprocessing(mean=(0.5,), std=(0.25,), classes=tuple("0123456789"))


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("tests do not use the network")

    monkeypatch.setattr("socket.socket.connect", refuse)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = TrainConfig("pcdeq-1-l-tanh", epochs=1, channels=(8,), out=tmp_path_factory.mktemp("run"), device="cpu")
    return train(config, progress="none")


@pytest.mark.parametrize(
    ("kind", "channels", "options"),
    [
        (L, (6,), {"activation": "relu6", "solver": pcdeq.Picard(tol=1e-6, max_steps=7, stop="batch")}),
        (SC, (3,), {"activation": "sigmoid", "warm_start": False, "weight_norm": False, "gradient": "phantom"}),
        (MC, (2, 3, 4), {"activation": "softsign", "floor": 0.25, "adjoint_solver": pcdeq.Picard(tol=1e-3)}),
    ],
)
def test_round_trip(kind, channels, options, tmp_path):
    model = kind(channels, **options)
    model(torch.rand(16, 1, 28, 28)).sum().backward()  # batch norms and warm starts have learned something
    model.eval().preprocessing = GREY
    folder = model.save_pretrained(tmp_path / "new")
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    copy = Network.from_pretrained(folder)
    assert type(copy) is kind and not copy.training
    assert copy.preprocessing == GREY
    for ours, theirs in zip(equilibrium_layers(model), equilibrium_layers(copy), strict=True):
        for name in ("solver", "adjoint_solver", "floor", "gradient", "gradient_steps", "activation"):
            assert getattr(ours, name) == getattr(theirs, name)
    images = torch.rand(5, 1, 28, 28)
    with torch.no_grad():
        assert copy(images).equal(model(images))  # bit for bit


def test_every_file_of_weights_says_what_it_is(run, tmp_path):
    images = torch.rand(3, 1, 28, 28)
    network = load(run)
    lonely = tmp_path / "lonely.safetensors"
    lonely.write_bytes((run.path / "last" / "model.safetensors").read_bytes())
    for source in (run.path, str(run.path), lonely, network.save_pretrained(tmp_path / "saved")):
        copy = load(source)
        assert (copy.preprocessing, copy.channels, copy.training) == (run.preprocessing, (8,), False)
        assert copy(images).equal(network(images))
    headers = [read_header(path) for path in (lonely, tmp_path / "saved" / "model.safetensors")]
    assert headers[0] | {"training": None} == headers[1] | {"training": None}
    assert headers[1] == json.loads((tmp_path / "saved" / "config.json").read_text())


def test_of_a_folder_the_configuration_counts_which_people_can_edit(tmp_path):
    folder = L((4,)).save_pretrained(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["layers"]["solver"]["tol"] = 1e-7
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).deq.solver.tol == 1e-7


def test_of_a_run_with_its_card(run, tmp_path):
    model = load(run)
    folder = model.save_pretrained(tmp_path)
    copy = L.from_pretrained(str(folder))
    images = torch.randint(256, (4, 1, 28, 28), dtype=torch.uint8)
    assert copy(copy.preprocessing(images)).equal(model(run.preprocessing(images)))
    assert copy.training_facts == model.training_facts
    assert copy.save_pretrained(tmp_path / "again").joinpath("README.md").read_text() == model_card(model)
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "pcdeq"
    (result,) = card.data.eval_results
    assert result.metric_value == pytest.approx(run.accuracy, abs=0.005)
    assert f"| test accuracy | {run.accuracy:.2f} % |" in card.text
    assert "| epochs | 1 |" in card.text and "| seed | 0 |" in card.text
    assert "pcDEQ-1" in card.text and "rate is known" not in card.text


def test_the_code_of_a_card_runs(run, tmp_path):
    folder = load(run).save_pretrained(tmp_path)
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names = {"images": torch.zeros(2, 1, 28, 28, dtype=torch.uint8)}
    exec(code.replace("this folder, or owner/name on the Hub", str(folder)), names)
    assert names["logits"].shape == (2, 10)


class TestCard:
    def test_the_rate_is_told_where_there_is_one(self):
        assert "8 steps bring it below 1e-4" in model_card(L((4,), activation="sigmoid"))

    def test_nothing_is_invented(self):
        assert "## Training" not in model_card(L((4,)))

    def test_no_place_of_this_machine_is_told(self, run, tmp_path):
        command = [
            "/home/me/bin/pcdeq",
            "train",
            "demo",
            "--data",
            "/home/me/cats",
            "--out",
            "/home/me/x",
            "--lr",
            "0.1",
        ]
        description = run.description | {"command": [*command, "--json"]}
        description["config"] = description["config"] | {"out": "/home/me/x"}
        folder = tmp_path / "r"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(description))
        (folder / "metrics.jsonl").write_text((run.path / "metrics.jsonl").read_text())
        (folder / "last").symlink_to(run.path.resolve() / "last")
        saved = load(Run.open(folder)).save_pretrained(tmp_path / "saved")
        text = (saved / "README.md").read_text() + (saved / "config.json").read_text()
        assert "`pcdeq train demo --data cats --lr 0.1`" in text
        assert "/home/me" not in text

    @pytest.mark.parametrize(("epoch", "told"), [(1, True), (2, False)])
    def test_what_was_proved_is_told(self, run, epoch, told):
        summary = run.path / "summary.json"
        summary.write_text(json.dumps({"epoch": epoch, "certified": 998, "certified_of": 1000}))
        try:
            assert ("| predictions proved | 998 of 1,000 test images |" in model_card(load(run))) is told
        finally:
            summary.unlink()

    def test_lost_metrics_do_not_keep_a_network_from_loading(self, run, tmp_path):
        folder = tmp_path / "r"
        folder.mkdir()
        (folder / "config.json").write_text((run.path / "config.json").read_text())
        (folder / "last").symlink_to(run.path.resolve() / "last")
        assert load(folder).training_facts.test_accuracy is None


class TestRefused:
    @pytest.fixture
    def folder(self, tmp_path):
        return L((4,)).save_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model_type": "bert"}, "not the configuration of a pcdeq network"),
            ({"topology": "xl"}, "xl"),
            ({"channels": [4, 5]}, "channels"),
            ({"channels": [5]}, "weights of this network"),
            ({"extra": 1}, "extra"),
            ({"layers": {}}, "activation"),
            ({"layers": None}, "does not describe"),
            ({"preprocessing": {"mean": [0.0]}}, "std"),
            ({"num_classes": "ten"}, "num_classes must be int, got 'ten'"),
            ({"num_classes": 10**400}, "too many digits"),
            ({"image_shape": [-1, -28, 28]}, "must be above 0"),
            ({"image_shape": [1, 28]}, "image_shape must be"),
            ({"family": "bert"}, "family must be"),
            ({"family": "explicit"}, "does not describe"),
            ({"topology": "ode"}, "no network ode of the family pcdeq"),
            ({"training": {"test_accuracy": "high"}}, "test_accuracy must be"),
            ({"training": {"author": "me"}}, "unknown or missing: author"),
            (
                {"preprocessing": {"mean": [0.0], "std": [float("nan")], "classes": list("0123456789")}},
                "not a finite number",
            ),
            ({"preprocessing": {"mean": [0.0], "std": [1.0], "classes": ["0"]}}, "1 channels and 10 classes"),
        ],
    )
    def test_a_configuration_that_is_wrong(self, folder, change, message):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(DataError, match=message) as caught:
            Network.from_pretrained(folder)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("floor", "0.5"),
            ("floor", -1.0),
            ("weight_norm", 1),
            ("gradient", "none"),
            ("gradient_steps", 2.5),
            ("activation", ["tanh"]),
            ("activation", "relu"),
            ("warm_start", None),
            ("injection", "softplus"),
            ("solver", None),
            ("solver", {"name": "Picard", "tol": "small"}),
            ("solver", {"name": "Picard", "max_steps": True}),
            ("adjoint_solver", {"name": "Anderson", "memory": 0}),
            ("adjoint_solver", {"name": "Anderson", "depth": 2}),
        ],
    )
    def test_an_option_that_is_wrong(self, folder, option, value):
        config = json.loads((folder / "config.json").read_text())
        config["layers"][option] = value
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(DataError, match=r"config\.json does not describe a network: .") as caught:
            load(folder)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("change", [{"channels": [25_000]}, {"image_shape": [1, 40_000, 40_000]}])
    def test_what_is_too_large_takes_no_memory(self, folder, change):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        code = (
            "import resource, sys, pcdeq, pcdeq.models.store\n"
            "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
            "resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000,) * 2)\n"
            "pcdeq.load(sys.argv[1])\n"
        )
        done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
        assert "DataError" in done.stderr and "does not hold the weights of this network" in done.stderr, done.stderr

    @pytest.mark.parametrize("name", ["os.system", "Solver"])
    def test_a_solver_that_is_none(self, folder, name):
        config = json.loads((folder / "config.json").read_text())
        config["layers"]["solver"]["name"] = name
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(DataError, match="does not describe"):
            Network.from_pretrained(folder)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_broken_files(self, folder, name):
        (folder / name).write_bytes(b"{ half")
        with pytest.raises(DataError, match=name):
            Network.from_pretrained(folder)

    def test_a_description_that_goes_too_deep(self, folder):
        (folder / "config.json").write_text("[" * 100_000)
        with pytest.raises(DataError, match=r"config\.json cannot be read"):
            load(folder)

    def test_tensors_too_many(self, tmp_path):
        model = L((4,))
        content = to_bytes(model.state_dict() | {"more": torch.ones(1)}, Description.of(model))
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(DataError, match="more") as caught:
            load(tmp_path / "x.safetensors")
        assert "\n" not in str(caught.value)

    def test_a_file_that_does_not_say_what_it_is(self, tmp_path):
        (tmp_path / "x.safetensors").write_bytes(to_bytes(L((4,)).state_dict(), None))
        with pytest.raises(DataError, match=r"x\.safetensors does not describe a network"):
            load(tmp_path / "x.safetensors")

    def test_another_topology(self, folder):
        with pytest.raises(UsageError, match="a network L, not MC"):
            MC.from_pretrained(folder)

    @pytest.mark.parametrize("source", ["nowhere", "a/b/c", "../x"])
    def test_no_such_folder(self, source):
        with pytest.raises(UsageError, match="neither a folder"):
            Network.from_pretrained(source)

    @pytest.mark.parametrize("source", [None, 3, b"pcdeq-1-l-tanh-mnist"])
    def test_what_is_no_name(self, source):
        with pytest.raises(UsageError, match="load takes a run, its folder or a name"):
            load(source)

    def test_what_is_code_is_not_saved(self, tmp_path):
        own = pcdeq.Activation("own", lambda y: 1 - torch.exp2(-y), supremum=1.0)
        for model in (L((4,), activation=own), L((4,), injection=torch.nn.functional.softplus)):
            with pytest.raises(UsageError, match="cannot be saved"):
                model.save_pretrained(tmp_path / "x")
        model = MC((2, 3, 4))
        model.deq2.floor = 0.5
        with pytest.raises(UsageError, match="different settings"):
            model.save_pretrained(tmp_path / "x")
        assert not (tmp_path / "x").exists()


class FakeHub:
    """What pcdeq uses of the Hub, on a dict."""

    def __init__(self):
        self.repositories: dict[str, dict[str, bytes]] = {}

    def create_repo(self, repo_id, *, private, token, exist_ok):
        assert exist_ok and token in (None, "secret")
        self.repositories.setdefault(repo_id, {})
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, commit_message, token):
        assert "pcdeq" in commit_message
        self.repositories[repo_id] |= {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}

    def snapshot_download(self, repo_id, *, revision, token, allow_patterns):
        for name in allow_patterns:
            (self.cache / name).write_bytes(self.repositories[repo_id][name])
        return str(self.cache)


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch, tmp_path):
        hub = FakeHub()
        hub.cache = tmp_path
        for name in ("create_repo", "upload_folder", "snapshot_download"):
            monkeypatch.setattr(huggingface_hub, name, getattr(hub, name))
        return hub

    def test_there_and_back(self, hub):
        model = L((4,)).eval()
        assert model.push_to_hub("me/digits", private=True, token="secret") == "https://huggingface.co/me/digits"
        assert set(hub.repositories["me/digits"]) == {"config.json", "model.safetensors", "README.md"}
        images = torch.rand(2, 1, 28, 28)
        assert Network.from_pretrained("me/digits", revision="main")(images).equal(model(images))

    def test_what_goes_wrong_there_is_one_line(self, hub, monkeypatch):
        with pytest.raises(DataError, match="owner/other is no folder here"):
            Network.from_pretrained("owner/other")

        def fail(*arguments, **options):
            raise RuntimeError("401 Client Error\nfor a token")

        monkeypatch.setattr(huggingface_hub, "create_repo", fail)
        with pytest.raises(PcdeqError, match=r"could not upload to me/digits: 401 Client Error$"):
            L((4,)).push_to_hub("me/digits")
        with pytest.raises(UsageError, match="owner/name"):
            L((4,)).push_to_hub("digits")


class TestOfThePackage:
    @pytest.mark.parametrize("name", pretrained_names())
    def test_the_network_is_the_rows(self, name):
        network = load(name)
        facts = network.training_facts
        title, _, radius = name.partition("-robust")
        assert title == f"{facts.row}-{facts.data}"
        row = find_row(facts.row, facts.data, recipe="fast" if "--recipe fast" in facts.command else "paper")
        if radius:
            assert f"--robust-radius {radius} " in facts.command
            row = row.against_noise()
            if "--channels 190 " in facts.command:  # wider than the paper's
                row = replace(row, parameters=188_110)
        assert sum(parameter.numel() for parameter in network.parameters()) == row.parameters
        assert facts.epochs == row.epochs
        assert not network.training

    @pytest.mark.parametrize("name", [name for name in pretrained_names() if "-mnist" in name])
    def test_it_reads_digits(self, name):
        network, digits = load(name), load_dataset("mnist-mini").test
        with torch.inference_mode():
            right = network(network.preprocessing(digits.images)).argmax(1) == digits.labels
        assert right.double().mean() > (0.95 if name.endswith("robust0.3") else 0.96)

    @pytest.mark.parametrize(("row", "radius", "share"), [("l", 0.1, 0.94), ("l", 0.3, 0.84), ("tc", 0.1, 0.94)])
    def test_what_was_trained_against_noise_is_proved_to_withstand_it(self, row, radius, share):
        network, digits = load(f"pcdeq-1-{row}-relu6-mnist-robust{radius}"), load_dataset("mnist-mini").test
        scale, images, labels = network.preprocessing, digits.images[:300], digits.labels[:300]
        proof = pcdeq.certify(network, scale(images), radius=scale.scaled(radius), limits=scale.limits())
        assert (proof.proved & (proof.classes == labels)).double().mean() > share

    def test_a_name_that_is_not_there(self):
        with pytest.raises(UsageError, match="did you mean pcdeq-1-l-tanh-mnist"):
            load("pcdeq-1-l-than-mnist")
        with pytest.raises(UsageError, match="neither a folder"):
            load("runs/some-run")

    def test_what_is_packed_keeps_every_bit_and_no_place_of_this_machine(self, run):
        network = load(run)
        content = to_bytes(network.state_dict(), Description.of(network))
        assert str(run.path).encode() not in content
        (run.path / "packed.safetensors").write_bytes(content)
        tensors = read_weights(run.path / "packed.safetensors")
        for name, tensor in run.load().model.items():
            assert torch.equal(tensors[name], tensor)


def test_loading_imports_only_what_it_needs():
    code = (
        "import sys, pcdeq; pcdeq.load('pcdeq-1-l-tanh-mnist'); "
        "print({name.split('.')[0] for name in sys.modules} & "
        "{'accelerate', 'rich', 'tyro', 'huggingface_hub', 'matplotlib', 'PIL', 'scipy', 'torchdiffeq', 'pooch'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
