"""Statistics of batch norms measured anew: exact, in one pass, and nothing else is changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pcdeq
from pcdeq.data import load_dataset
from pcdeq.errors import UsageError
from pcdeq.kernels import binding
from pcdeq.models.batch_norm import BatchNorm2d


def network(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, width),
        nn.BatchNorm1d(width),
        pcdeq.PcDEQLinear(width),
        nn.BatchNorm1d(width),
        nn.Dropout(0.9),
        nn.Linear(width, 2),
        nn.BatchNorm1d(2, momentum=None),
    )


def norms(model):
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def statistics(model):
    return [buffer.clone() for norm in norms(model) for buffer in norm.buffers()]


def same(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


class TestStatistics:
    @pytest.mark.parametrize("size", [2, 7, 64, 1000])
    def test_are_those_of_the_data_however_they_come(self, size):
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
        images = (torch.randn(1004, 5) + 30).sort(0).values  # batches that differ, and one that is small
        pcdeq.recalibrate(model, images.split(size))
        seen = model[0](images).double()
        torch.testing.assert_close(model[1].running_mean.double(), seen.mean(0), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(model[1].running_var.double(), seen.var(0), rtol=1e-5, atol=1e-6)

    def test_of_later_norms_are_of_what_training_mode_gives(self):
        model, images = network(), torch.randn(60, 5)
        pcdeq.recalibrate(model, images.split(20))
        model[4].eval()
        first = nn.Sequential(*model[:3]).train()
        model[2].eval()
        with torch.no_grad():
            seen = torch.cat([first(batch) for batch in images.split(20)])
        torch.testing.assert_close(model[3].running_mean, seen.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model[3].running_var, seen.var(0), rtol=1e-4, atol=1e-5)
        assert model[3].num_batches_tracked == 3

    def test_one_batch_makes_evaluation_equal_to_training(self):
        """All statistics are those of the batch then, but for n against n - 1."""
        model, images = network().requires_grad_(False), torch.randn(2000, 5)
        pcdeq.recalibrate(model, [(images, torch.zeros(2000))])
        evaluated = model.eval()(images)
        for norm in norms(model):
            norm.train()
        torch.testing.assert_close(evaluated, model(images), rtol=5e-3, atol=5e-3)

    @pytest.mark.skipif(binding._KERNELS is None, reason=binding.engine())
    def test_with_the_kernel(self, monkeypatch):
        def fail(self, x):
            raise AssertionError("torch's own was called")

        images = (3 * torch.randn(50, 4, 6, 6) + 1).contiguous(memory_format=torch.channels_last)
        monkeypatch.setattr(nn.BatchNorm2d, "forward", fail)
        norm = BatchNorm2d(4)
        pcdeq.recalibrate(norm, images.split(16))
        torch.testing.assert_close(norm.running_mean, images.mean((0, 2, 3)))
        torch.testing.assert_close(norm.running_var, images.transpose(0, 1).flatten(1).var(1))

    def test_a_norm_used_twice_has_those_of_both(self):
        norm, x = nn.BatchNorm1d(3, affine=False), torch.randn(40, 3)
        pcdeq.recalibrate(nn.Sequential(norm, norm), [x])  # the second time of what has mean 0 and variance 1
        torch.testing.assert_close(norm.running_mean, x.mean(0) / 2)

    def test_of_half_precision_are_summed_in_more(self):
        norm, x = nn.BatchNorm1d(3, affine=False), 100 + torch.randn(4096, 3).bfloat16()
        pcdeq.recalibrate(norm, x.split(8))
        torch.testing.assert_close(norm.running_mean, x.float().mean(0))
        torch.testing.assert_close(norm.running_var, x.float().var(0))


class TestNothingElse:
    def test_modes_momenta_hooks_and_weights(self):
        model = network()
        model[3].eval()
        before = copy.deepcopy(model)
        pcdeq.recalibrate(model, torch.randn(30, 5).split(10))
        assert [module.training for module in model.modules()] == [module.training for module in before.modules()]
        assert [norm.momentum for norm in norms(model)] == [0.1, 0.1, None]
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True))
        assert model[2].state_dict().keys() == before[2].state_dict().keys()
        assert all(torch.equal(model[2].state_dict()[k], v) for k, v in before[2].state_dict().items())
        assert not same(statistics(model), statistics(before))

    @pytest.mark.parametrize(
        ("batches", "words"),
        [
            ([], "no batches"),
            ([torch.randn(9, 5), torch.randn(1, 5)], "leave it out"),
            ([torch.randn(9, 5), torch.full((9, 5), torch.nan)], "batch norm .1. got infinite values or NaN"),
        ],
    )
    def test_after_a_failure_all_is_as_before(self, batches, words):
        model = network().train()
        model(torch.randn(20, 5))
        before = statistics(model)
        with pytest.raises(UsageError, match=words):
            pcdeq.recalibrate(model, batches)
        assert same(statistics(model), before)
        assert all(module.training for module in model.modules())
        assert not any(module._forward_pre_hooks for module in model.modules())

    def test_whatever_the_failure(self):
        def interrupted():
            yield torch.randn(9, 5)
            raise KeyboardInterrupt

        model = network().train()
        before = statistics(model)
        with pytest.raises(KeyboardInterrupt):
            pcdeq.recalibrate(model, interrupted())
        assert same(statistics(model), before)
        assert all(module.training for module in model.modules())

    def test_norms_without_statistics_and_networks_without_norms(self):
        model = nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 5))
        pcdeq.recalibrate(model, torch.randn(30, 5).split(10))
        assert model[0].running_mean is None

    def test_a_norm_that_is_not_reached_keeps_its_own(self):
        class Half(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

            def forward(self, x):
                return self.used(x)

        model = Half()
        pcdeq.recalibrate(model, [4 + torch.randn(20, 3)])
        assert torch.equal(model.unused.running_var, torch.ones(3))
        assert bool((model.used.running_mean > 2).all())


def test_a_network_whose_statistics_lag(tiny_data):
    """Right in training mode and wrong in evaluation, until recalibrated: after a few large steps."""
    data = load_dataset(tiny_data).train
    images, labels = data.images.flatten(1).float() / 255, data.labels
    model = nn.Sequential(
        nn.Linear(784, 40), nn.BatchNorm1d(40), pcdeq.PcDEQLinear(40), nn.BatchNorm1d(40), nn.Linear(40, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    @torch.no_grad()
    def accuracy():
        return float((model(images).argmax(1) == labels).float().mean())

    with torch.no_grad():
        trained = float((copy.deepcopy(model)(images).argmax(1) == labels).float().mean())
    model.eval()
    lagging = accuracy()
    pcdeq.recalibrate(model, images.split(75))
    assert trained > 0.95 and lagging < 0.8
    assert accuracy() > trained - 0.02
