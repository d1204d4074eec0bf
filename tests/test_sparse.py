"""The sparse operator: what every operator must do, the matrix that it is, and how large a graph may be."""

from __future__ import annotations

import pytest
import torch

import pcdeq
from pcdeq.errors import UsageError
from pcdeq.testing import OperatorConformance

# A directed graph with a loop, a node that nobody hears, and an entry that occurs twice.
INDICES = torch.tensor([[0, 0, 1, 2, 2, 2, 3, 3], [1, 2, 1, 0, 3, 3, 0, 2]])


class TestSparse(OperatorConformance):
    state = (5,)

    def build(self):
        return pcdeq.Sparse(INDICES, torch.linspace(0.1, 0.8, 8), nodes=5)

    def matrix(self, weight):
        found = torch.zeros(5, 5, dtype=weight.dtype)
        for (i, j), value in zip(INDICES.T.tolist(), weight[0], strict=True):
            found[i, j] += value
        return found

    def test_starts_with_the_values_given(self):
        torch.testing.assert_close(self.build().effective_weight()[0], torch.linspace(0.1, 0.8, 8))

    def test_terms_are_the_entries_of_a_row_or_column(self):
        assert self.bound().terms(torch.Size(self.state)) == 3

    def test_fixed_values_get_no_gradient(self):
        layer = pcdeq.PcDEQ(pcdeq.Sparse(INDICES, torch.ones(8), nodes=5, learnable=False), "softsign")
        x = torch.randn(2, 5, requires_grad=True)
        layer(x).sum().backward()
        assert layer.operator.weight.grad is None
        assert x.grad.abs().sum() > 0

    def test_is_stored_and_loaded(self):
        layer = pcdeq.PcDEQ(self.build(), "tanh")
        other = pcdeq.PcDEQ(pcdeq.Sparse(torch.zeros_like(INDICES), torch.ones(8), nodes=5), "tanh")
        other.load_state_dict(layer.state_dict())
        x = torch.randn(2, 5)
        assert torch.equal(layer(x), other(x))
        assert other.operator.bind(other.operator.effective_weight()).terms(torch.Size(self.state)) == 3

    def test_bounds_on_gradients(self):
        layer = pcdeq.PcDEQ(self.build(), "tanh")
        bounds = layer.enclose_gradient(torch.randn(2, 5), torch.ones(2, 5))
        assert bounds.certified.all()
        assert pcdeq.check(layer, torch.randn(2, 5)).holds

    @pytest.mark.parametrize(
        ("indices", "values", "message"),
        [
            (INDICES.float(), torch.ones(8), "indices must be int64"),
            (INDICES[:1], torch.ones(8), r"shape \(2, entries\)"),
            (INDICES, torch.ones(7), "one for each of the 8 entries"),
            (INDICES, torch.ones(8, dtype=torch.int64), "floating point"),
            (INDICES[:, :0], torch.ones(0), "at least one entry"),
            (INDICES + 3, torch.ones(8), "from 0 to 4, got 3 to 6"),
            (INDICES - 1, torch.ones(8), "from 0 to 4, got -1"),
            (INDICES, -torch.ones(8), "finite and >= 0, got -1"),
            (INDICES, torch.full((8,), torch.nan), "finite and >= 0"),
        ],
    )
    def test_mistakes_are_one_clear_line(self, indices, values, message):
        with pytest.raises(UsageError, match=message):
            pcdeq.Sparse(indices, values, nodes=5)

    def test_an_input_of_another_size_is_refused(self):
        with pytest.raises(UsageError, match="5 nodes but the input's last dimension is 4"):
            pcdeq.PcDEQ(self.build(), "tanh")(torch.zeros(2, 4))


def test_a_hundred_thousand_nodes_and_a_million_entries():
    """Value, gradient and bounds, in seconds, with memory for no matrix."""
    generator = torch.Generator().manual_seed(0)
    nodes, entries = 100_000, 1_000_000
    indices = torch.randint(nodes, (2, entries), generator=generator)
    layer = pcdeq.PcDEQ(pcdeq.Sparse(indices, torch.full((entries,), 0.1), nodes), "softsign", injection=lambda x: x)
    x = torch.full((1, nodes), 0.01, requires_grad=True)
    z = layer(x)
    z.sum().backward()
    assert layer.last_forward.unconverged == layer.last_backward.unconverged == 0
    assert layer.last_forward.steps + layer.last_backward.steps < 60
    assert layer.operator.weight.grad.shape == (1, entries)
    box = layer.enclose(x.detach())
    assert box.certified.all()
    assert float(box.width.max()) < 1e-3
