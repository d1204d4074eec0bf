"""The paper's tables, and the configuration of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pcdeq.errors import UsageError
from pcdeq.recipes import ResolvedConfig, TrainConfig, find_row, own_rows, paper_dataset, rows


class TestRows:
    def test_every_row_of_the_paper_is_there(self):
        counts = {data: len(rows(data)) for data in ("mnist", "svhn", "cifar10")}
        assert counts == {"mnist": 17, "svhn": 12, "cifar10": 20}
        assert len(rows()) == 49
        assert sum(row.family == "pcdeq" for row in rows()) == 32
        assert len({(row.dataset, row.name) for row in rows()}) == 49

    @pytest.mark.parametrize(
        ("data", "name", "accuracy", "parameters", "channels", "epochs", "lr", "lr_step", "weight_decay"),
        [
            ("mnist", "pcdeq-1-l-tanh", 98.2, 70410, (80,), 40, 1e-3, 30, 0.02),
            ("mnist", "pcdeq-2-sc-sigmoid", 98.9, 69136, (82,), 40, 2e-4, 30, 0.02),
            ("mnist", "pcdeq-1-mc-relu6", 99.3, 41278, (12, 24, 48), 40, 5e-4, 30, 0.015),
            ("svhn", "pcdeq-2-sc-sigmoid", 87.3, 164760, (125,), 80, 5e-4, 70, 0.02),
            ("svhn", "pcdeq-1-mc-relu6", 93.0, 130950, (20, 50, 80), 50, 5e-4, 40, 0.015),
            ("cifar10", "pcdeq-1-mc-relu6-aug", 89.2, 661470, (100, 120, 140), 120, 7e-4, 100, 0.02),
            ("cifar10", "pcdeq-2-mc-sigmoid-aug", 85.6, 661470, (100, 120, 140), 120, 2e-4, 100, 0.02),
        ],
    )
    def test_numbers_are_the_papers(
        self, data, name, accuracy, parameters, channels, epochs, lr, lr_step, weight_decay
    ):
        row = find_row(name, data)
        assert (row.dataset, row.accuracy, row.parameters, row.channels) == (data, accuracy, parameters, channels)
        assert (row.epochs, row.lr, row.lr_step, row.lr_factor) == (epochs, lr, lr_step, 0.1)
        assert (row.weight_decay, row.augment) == (weight_decay, name.endswith("-aug"))

    @pytest.mark.parametrize(
        ("data", "name", "title", "accuracy", "params", "channels", "epochs", "lr", "schedule"),
        [
            ("mnist", "node", "NODE", 96.4, "84K", (92,), 40, 1e-3, "step"),
            ("cifar10", "anode", "ANODE", 60.6, "172K", (64, 10), 50, 1e-3, "step"),
            ("cifar10", "mondeq-mt-aug", "monDEQ-MT*", 89.0, "1M", (64, 128, 128), 65, 0.05, "one-cycle"),
        ],
    )
    def test_baselines(self, data, name, title, accuracy, params, channels, epochs, lr, schedule):
        row = find_row(name, data)
        assert (row.title, row.accuracy, row.params, row.channels) == (title, accuracy, params, channels)
        assert (row.epochs, row.lr, row.schedule, row.weight_decay) == (epochs, lr, schedule, 0.0)
        assert row.augment == name.endswith("-aug")

    def test_our_rows_are_trained_like_the_pcdeq(self):
        for data in ("mnist", "svhn", "cifar10"):
            for row in own_rows(data):
                if row.topology == "tc":
                    continue
                kind = 2 if row.activation == "sigmoid" else 1
                aug = "-aug" if row.augment else ""
                like = find_row(f"pcdeq-{kind}-{row.topology}-{row.activation}{aug}", data)
                named = {"name": row.name, "title": row.title, "family": row.family, "accuracy": None}
                assert row == replace(like, **named)
                assert find_row(row.name, data) == row
        assert len(own_rows()) == 2 * 32 + 2 * 4

    @pytest.mark.parametrize(("data", "channels", "reach"), [("mnist", (16, 32), None), ("cifar10", (32, 64), 1.1)])
    def test_our_topology_is_trained_like_mc_and_by_its_own_recipe_against_noise(self, data, channels, reach):
        ours, like = (
            [row for row in table(data) if row.kind == kind] for table, kind in ((own_rows, "tc"), (rows, "mc"))
        )
        assert [row.name for row in ours] == [row.name.replace("-mc-", "-tc-") for row in like]
        same = ("family", "activation", "epochs", "lr", "schedule", "lr_step", "weight_decay", "batch_size", "dataset")
        for row, other in zip(ours, like, strict=True):
            assert all(getattr(row, name) == getattr(other, name) for name in same)
            assert (row.accuracy, row.channels, row.robust_reach) == (None, channels, None)
            assert f"{row.parameters / 1000:.0f}K" == row.params
            changed = row.against_noise()
            assert (changed.schedule, changed.lr_step, changed.robust_reach) == ("one-cycle", None, reach)
            assert changed.augment == (data == "cifar10")

    def test_a_setting_for_other_data_alone_leaves_the_rows(self, monkeypatch):
        recipe = {"epochs": {"svhn": 2}, "lr": {"svhn": 0.5, "other": 0.25}}
        monkeypatch.setitem(find_row.__globals__["_ROBUST"], "mc", recipe)
        for data, epochs, lr in (("svhn", 2, 0.5), ("cifar10", find_row("pcdeq-1-mc-tanh", "cifar10").epochs, 0.25)):
            row = find_row("pcdeq-1-mc-tanh", data).against_noise()
            assert (row.epochs, row.lr) == (epochs, lr)

    def test_kind_agrees_with_activation(self):
        for row in rows():
            if row.family == "pcdeq":
                assert row.name.startswith("pcdeq-2") == (row.activation == "sigmoid")

    @pytest.mark.parametrize(
        ("data", "image_channels", "expected"),
        [
            ("mnist-mini", None, "mnist"),
            ("fashion-mnist", None, "mnist"),
            ("kmnist", None, "mnist"),
            ("svhn", None, "svhn"),
            ("my/grey", 1, "mnist"),
            ("my/colour", 3, "cifar10"),
        ],
    )
    def test_other_data_take_the_nearest_rows(self, data, image_channels, expected):
        assert paper_dataset(data, image_channels) == expected
        assert find_row("pcdeq-1-mc-tanh", data, image_channels).dataset == expected

    def test_a_row_the_paper_has_for_other_data_only(self):
        assert find_row("pcdeq-1-l-tanh", "cifar10").dataset == "mnist"

    @pytest.mark.parametrize(
        ("typo", "meant"), [("pcdeq-1-mc-relu", "pcdeq-1-mc-relu6"), ("nod", "node"), ("dmo", "demo")]
    )
    def test_unknown_row_suggests_the_nearest(self, typo, meant):
        with pytest.raises(UsageError, match=f"unknown row '{typo}'; did you mean {meant}"):
            find_row(typo)

    def test_rows_of_unknown_data(self):
        with pytest.raises(UsageError, match="no rows for 'imagenet'"):
            rows("imagenet")


CLASSES = ("l", "sc", "mc", "mc-aug")


class TestOurRecipe:
    def test_every_pcdeq_has_one_of_its_class_and_the_network_stays(self):
        for row in rows():
            if row.family == "pcdeq":
                ours = row.with_recipe("fast")
                assert (ours.name, ours.channels, ours.parameters, ours.accuracy, ours.augment) == (
                    (row.name, row.channels, row.parameters, row.accuracy, row.augment)
                )
                assert ours.recipe == "fast" and ours.epochs < row.epochs / 2
                assert ours.with_recipe("paper") == row == row.with_recipe("paper")

    @pytest.mark.parametrize("kind", CLASSES)
    def test_within_a_class_only_rates_and_epochs_differ(self, kind):
        of_the_row = {"row", "data", "channels", "flip"}
        found = [row for row in rows() if row.family == "pcdeq" and row.kind == kind]
        configs = [TrainConfig(row.name, data=row.dataset, recipe="fast").resolve() for row in found]
        assert len(configs) >= 4
        for config in configs:
            assert config.changes_from(configs[0]).keys() <= {"lr", "scale_rate", "epochs"} | of_the_row

    def test_the_most_special_entry_counts(self, monkeypatch):
        epochs = {"svhn sigmoid": 1, "svhn": 2, "sigmoid": 3, "other": 4}
        monkeypatch.setitem(find_row.__globals__["_FAST"], "mc", {"epochs": epochs})
        cases = [("svhn", "2-mc-sigmoid"), ("svhn", "1-mc-tanh"), ("mnist", "2-mc-sigmoid"), ("mnist", "1-mc-tanh")]
        found = [find_row(f"pcdeq-{name}", data, recipe="fast").epochs for data, name in cases]
        assert found == [1, 2, 3, 4]

    @pytest.mark.parametrize("name", ["deq-mc-relu6", "explicit-l-tanh", "mondeq-l"])
    def test_baselines_of_a_class_share_it(self, name):
        row, like = find_row(name, recipe="fast"), find_row(f"pcdeq-1-{name.split('-')[1]}-tanh", recipe="fast")
        assert (row.epochs, row.lr, row.schedule) == (like.epochs, like.lr, like.schedule)
        assert row.weight_decay == find_row(name).weight_decay

    def test_a_class_without_one_is_refused(self):
        with pytest.raises(UsageError, match="there is no recipe fast for mondeq-mt; it is for l, sc, mc and mc-aug"):
            TrainConfig("mondeq-mt", data="mnist", recipe="fast").resolve()

    def test_it_fills_in_and_the_user_overrides(self):
        config = TrainConfig("pcdeq-1-l-tanh", data="mnist", recipe="fast", lr=0.1).resolve()
        assert (config.lr, config.schedule, config.lr_step) == (0.1, "one-cycle", None)
        assert config.changes_from(TrainConfig("pcdeq-1-l-tanh", data="mnist").resolve())["recipe"] == "fast"

    def test_a_run_of_before_is_the_papers(self):
        config = TrainConfig("pcdeq-1-l-tanh", data="mnist").resolve()
        before = {name: value for name, value in config.to_dict().items() if name != "recipe"}
        assert TrainConfig.from_dict(before).resolve() == config


class TestConfig:
    def test_demo_is_the_default(self):
        config = TrainConfig().resolve()
        assert (config.row, config.data, config.channels) == ("demo", "mnist-mini", (12, 24, 48))
        assert (config.schedule, config.lr_step) == ("one-cycle", None)

    @pytest.mark.parametrize("recipe", ["paper", "fast"])
    def test_the_demo_has_no_numbers_of_its_own(self, recipe):
        demo = TrainConfig(recipe=recipe).resolve()
        ours = TrainConfig("pcdeq-1-mc-relu6", data="mnist-mini", recipe="fast").resolve()
        assert demo.changes_from(ours).keys() <= {"row", "recipe"}

    def test_row_fills_in_and_the_user_overrides(self):
        config = TrainConfig("pcdeq-1-mc-relu6-aug", data="cifar10", lr=0.1).resolve()
        assert (config.lr, config.epochs, config.lr_step, config.weight_decay) == (0.1, 120, 100, 0.02)
        assert config.augment and config.flip
        assert not TrainConfig("pcdeq-1-mc-relu6-aug", data="cifar10", augment=False).resolve().flip

    @pytest.mark.parametrize("data", ["svhn", "mnist"])
    def test_digits_are_not_mirrored(self, data):
        assert not TrainConfig("pcdeq-1-mc-relu6", data=data, augment=True).resolve().flip

    def test_survives_json(self):
        config = TrainConfig("pcdeq-1-l-tanh", channels=(3,), out=Path("a/b"), optimizer_options={"eps": 1e-7})
        assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        resolved = config.resolve()
        assert ResolvedConfig.from_dict(json.loads(json.dumps(resolved.to_dict()))) == resolved

    def test_resolving_again_changes_nothing(self):
        for config in (TrainConfig(), TrainConfig("pcdeq-1-mc-tanh-aug", data="cifar10", epochs=2)):
            assert config.resolve().resolve() == config.resolve()

    def test_unknown_key(self):
        with pytest.raises(UsageError, match="unknown setting 'learning_rate'"):
            TrainConfig.from_dict({"learning_rate": 1.0})

    @pytest.mark.parametrize(
        "bad",
        [
            {"epochs": 0},
            {"epochs": 2.5},
            {"epochs": "5"},
            {"batch_size": 0},
            {"accumulate": 100, "batch_size": 64},
            {"lr": 0.0},
            {"lr": float("nan")},
            {"tol": float("inf")},
            {"max_steps": 0},
            {"weight_decay": -1.0},
            {"seed": -1},
            {"seed": True},
            {"validation": 1.0},
            {"robust_radius": 0.0},
            {"robust_radius": 1.0},
            {"robust_radius": float("nan")},
            {"robust_reach": 0.0},
            {"channels": ()},
            {"channels": (3, 0, 1)},
            {"schedule": "cosine"},
            {"solver": "broyden"},
            {"device": "tpu"},
            {"precision": "fp8"},
            {"optimizer_options": {"momentum": "much"}},
        ],
    )
    def test_values_out_of_range(self, bad):
        with pytest.raises(UsageError, match=next(iter(bad))):
            TrainConfig(**bad)
        with pytest.raises(UsageError):
            TrainConfig.from_dict(bad)

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ({"row": "pcdeq-3-l-tanh"}, "unknown row"),
            ({"lr_step": 3}, "lr_step"),
            ({"flip": True}, "augment"),
        ],
    )
    def test_settings_that_contradict(self, bad, message):
        with pytest.raises(UsageError, match=message):
            TrainConfig(**bad).resolve()

    def test_a_resolved_configuration_has_no_open_ends(self):
        with pytest.raises(UsageError, match="epochs must be int, got None"):
            replace(TrainConfig().resolve(), epochs=None)


def test_a_row_by_the_name_that_the_tables_print():
    assert TrainConfig("monDEQ-MT*", data="cifar10").resolve().row == "mondeq-mt-aug"
