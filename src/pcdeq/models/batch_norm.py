"""The networks' batch norm, faster than torch's where channels are few."""

from __future__ import annotations

from torch import Tensor, nn

from pcdeq.kernels import binding
from pcdeq.proofs.network import know_twin


class BatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, faster on channels-last images on a CPU: same parameters, same numbers."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.track_running_stats or self.momentum is None:
            return super().forward(input)
        y = binding.batch_norm(
            input,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        )
        if y is None:
            return super().forward(input)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return y


know_twin(BatchNorm2d, nn.BatchNorm2d)
