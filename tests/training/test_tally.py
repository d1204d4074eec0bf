"""What is counted while an epoch runs."""

import torch

from pcdeq.training.tally import Numbers, Tally


class TestNumbers:
    def test_they_are_those_that_came(self):
        numbers = Numbers()
        for i in range(10_000):  # more than there is room for at first
            numbers.append(torch.tensor(float(i)))
        assert numbers.since(0).tolist() == list(range(10_000))
        assert numbers.since(9_998).tolist() == [9_998, 9_999]

    def test_none(self):
        assert Numbers().since(0).sum() == 0

    def test_what_came_is_not_held(self):
        """Each would hold its place among large tensors: memory that is in pieces after an epoch."""
        numbers, came = Numbers(), torch.tensor(1.0)
        numbers.append(came)
        came.fill_(7.0)
        assert numbers.since(0).tolist() == [1.0]


def test_sums_and_what_is_recent():
    tally = Tally([])
    tally.add(torch.tensor(4.0), torch.tensor(3), 4)
    assert tally.recent()[:2] == (1.0, 75.0)
    tally.add(torch.tensor(1.0), torch.tensor(0), 2)
    assert tally.recent()[:2] == (0.5, 0.0)
    assert tally.sums() == [5.0, 3.0, 6, 2, 0]
