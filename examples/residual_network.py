"""An equilibrium layer as a block of a residual network of your own, in a training loop of your own.

The block replaces a stack of convolutions: its depth is whatever the equilibrium needs, its memory that of one layer.
Nothing about the rest of the network changes: batch norms, strides, the loss, the optimiser are the usual ones.
``python examples/residual_network.py`` trains it on the 4,000 digits that ship with the package.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import pcdeq
from pcdeq.data import load_dataset

EPOCHS, BATCH = 2, 50


def equilibrium_block(channels: int, activation: str = "tanh") -> pcdeq.Residual:
    """x + mix(z*), where z* = s(W z* + inject(norm(x))).

    Equilibria are nonnegative; the 1x1 convolution gives the branch its signs back before it is added.
    """
    norm, mix = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 1)
    return pcdeq.Residual(norm, pcdeq.PcDEQConv2d(channels, activation), mix)


def network(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1),
        equilibrium_block(width),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        equilibrium_block(2 * width),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 3 * 3, 10),
    )


def main() -> None:
    torch.manual_seed(0)
    data = load_dataset("mnist-mini")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = EPOCHS * len(data.train) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    for epoch in range(1, EPOCHS + 1):
        for index in torch.randperm(len(data.train)).split(BATCH):
            images, labels = data.train.images[index].float() / 255, data.train.labels[index]
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(
            f"epoch {epoch}: loss of the last batch {loss.item():.3f}, {accuracy(model, data.test):.1f} % of the test"
        )
    for name, module in model.named_modules():
        if isinstance(module, pcdeq.PcDEQ):
            forward, backward = module.last_forward, module.last_backward
            print(
                f"{name}: {forward.steps} steps forward, {backward.steps} backward, {forward.unconverged} unconverged"
            )
    report = pcdeq.check(model, data.test.images[:64].float() / 255)
    print("guarantees hold:", report.holds)
    certificate = pcdeq.certify(model.eval(), data.test.images[:64].float() / 255)
    print(f"classes proved: {int(certificate.proved.sum())} of {len(certificate.proved)}")


@torch.no_grad()
def accuracy(model: nn.Module, split) -> float:
    model.eval()
    hits = sum(
        int((model(images.float() / 255).argmax(1) == labels).sum())
        for images, labels in zip(split.images.split(250), split.labels.split(250), strict=True)
    )
    model.train()
    return 100 * hits / len(split)


if __name__ == "__main__":
    main()
