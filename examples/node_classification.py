"""Node classification with a graph operator: z = s(A z Wᵀ + x), the equilibrium of what neighbours tell each other.

An explicit graph network passes messages as often as it has layers. Here they are passed until nothing changes,
so that every node hears from all that it is connected with, at the cost of one layer's parameters and memory. The
operator z -> A z Wᵀ is nonnegative because A is, and W is kept so: existence, uniqueness and bounds come for free.

The data are made: three communities (a stochastic block model), nodes with noisy features, a tenth of them labelled.
``python examples/node_classification.py``
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pcdeq

NODES, CLASSES, FEATURES, HIDDEN = 300, 3, 16, 12
WIDTH = 1e-6


class GraphMap(pcdeq.LinearMap):
    """z -> A z Wᵀ for one weight; z is (samples, nodes, features)."""

    def __init__(self, weight: Tensor, adjacency: Tensor) -> None:
        super().__init__(weight)
        self.adjacency = adjacency

    def apply(self, z: Tensor) -> Tensor:
        return self.adjacency @ z @ self.weight.T

    def adjoint(self, y: Tensor) -> Tensor:
        return self.adjacency.T @ y @ self.weight

    def terms(self, state: torch.Size) -> int:  # roundings in one component, for proved bounds
        return state[0] + self.weight.shape[1]


class Graph(pcdeq.Operator):
    """The learned weight of a graph operator, for one fixed adjacency matrix A >= 0."""

    def __init__(self, adjacency: Tensor, features: int) -> None:
        super().__init__((features, features), state_ndim=2)
        self.register_buffer("adjacency", adjacency)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start as diffusion, W = I; the paper's start is near 0, where neighbours are not heard yet."""
        self.weight_v.copy_(torch.eye(len(self.weight_v)))
        self.weight_g.fill_(1.0)

    def bind(self, weight: Tensor) -> pcdeq.LinearMap:
        return GraphMap(weight, self.adjacency.to(weight.dtype))


class Classifier(nn.Module):
    """Features into the equation, equilibrium, class scores for each node."""

    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.lift = nn.Linear(FEATURES, HIDDEN)
        self.deq = pcdeq.PcDEQ(Graph(adjacency, HIDDEN), activation="tanh")
        self.score = nn.Linear(HIDDEN, CLASSES)

    def forward(self, features: Tensor) -> Tensor:  # (1, nodes, features) -> (nodes, classes)
        return self.score(self.deq(self.lift(features)))[0]


def communities(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Adjacency with rows of sum 1, features (1, nodes, features), classes, and which nodes are labelled."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(NODES) % CLASSES
    same = classes[:, None] == classes[None, :]
    edge = torch.rand(NODES, NODES, generator=generator) < torch.where(same, 0.06, 0.008)
    edge = (edge.triu(1) | edge.triu(1).T).float() + torch.eye(NODES)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    features = centres[classes] + 2.5 * torch.randn(NODES, FEATURES, generator=generator)
    labelled = torch.randperm(NODES, generator=generator) < NODES // 10
    return edge / edge.sum(1, keepdim=True), features[None], classes, labelled


def fit(model: nn.Module, features: Tensor, classes: Tensor, labelled: Tensor, steps: int = 100) -> float:
    """Train on the labelled nodes; the share of the other nodes that is right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)
    for _ in range(steps):
        loss = F.cross_entropy(model(features)[labelled], classes[labelled])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = model(features).argmax(1) == classes
    return float(right[~labelled].float().mean())


def main() -> None:
    torch.manual_seed(0)
    right = {"features alone": 0.0, "graph equilibrium": 0.0}
    graphs = 3
    for seed in range(graphs):
        adjacency, features, classes, labelled = communities(seed)
        alone = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES), nn.Flatten(0, 1))
        model = Classifier(adjacency)
        for name, net in zip(right, (alone, model), strict=True):
            right[name] += fit(net, features, classes, labelled) / graphs
    print(f"{int(labelled.sum())} of {NODES} nodes have a label; right on the others, mean of {graphs} graphs:")
    for name, share in right.items():
        print(f"   {name:20} {100 * share:.1f} %")
    layer, report = model.deq, pcdeq.check(model, features).layers[0]
    print(f"the last graph: {layer.last_forward.steps} steps; spectral radius of the operator {report.radius:.2f}")
    box = layer.enclose(model.lift(features).detach(), width=WIDTH)
    print(f"guarantee holds: {report.holds}; equilibrium proved to {WIDTH:g}: {bool(box.certified.all())}")


if __name__ == "__main__":
    main()
