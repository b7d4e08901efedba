"""A graph network in plain torch: which of two communities does each node belong to? No library of graphs is needed.

everstep run examples/graph_network.py --workers 3

A batch is one large graph of several: `collate` joins them, and shifts the numbers of their nodes.
"""

import torch
from torch import nn
from torch.utils.data import Dataset

import everstep

NODES = 24


class Communities(Dataset):
    """Random graphs of two communities: edges (2, E) within one are likelier; features (24, 8) say little by
    themselves."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        community = torch.randint(0, 2, (NODES,), generator=generator)
        likely = torch.where(community[:, None] == community[None, :], 0.5, 0.05)
        edges = (torch.rand(NODES, NODES, generator=generator) < likely).triu(1).nonzero().T
        features = torch.randn(NODES, 8, generator=generator)
        features[:, 0] += 0.5 * (2 * community - 1)
        return features, torch.cat([edges, edges.flip(0)], 1), community


def collate(graphs):
    """One graph of all."""
    features, edges, communities = zip(*graphs, strict=True)
    shifted = [e + k * NODES for k, e in enumerate(edges)]
    return torch.cat(features), torch.cat(shifted, 1), torch.cat(communities)


class GraphLayer(nn.Module):
    """Each node gets the mean of its neighbours."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, nodes, edges):
        source, target = edges
        total = torch.zeros_like(nodes).index_add(0, target, nodes[source])
        count = torch.zeros(len(nodes)).index_add(0, target, torch.ones(len(target)))
        return self.own(nodes) + self.others(total / count.clamp(min=1)[:, None])


class GraphNetwork(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList([GraphLayer(8, width), GraphLayer(width, width), GraphLayer(width, 2)])

    def forward(self, nodes, edges):
        for layer in self.layers[:-1]:
            nodes = layer(nodes, edges).relu()
        return self.layers[-1](nodes, edges)


torch.manual_seed(0)
model = GraphNetwork()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

run = everstep.join(model, optimizer, Communities(512), lanes=4, micro_batch=8, epochs=5, collate=collate)
for step in run:
    for nodes, edges, communities in step:
        step.backward(nn.functional.cross_entropy(model(nodes, edges), communities))
    if run.is_main and step.number % 10 == 0:
        print(f"step {step.number}: loss {step.loss:.4f}")
