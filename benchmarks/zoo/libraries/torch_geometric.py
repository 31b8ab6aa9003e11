"""Graph networks of `torch_geometric`: on one graph of 400 nodes, or on point clouds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as geometric
from torch import nn

from ..case import Case, integers, noise, uneven

NODES, EDGES = 400, 2400


def _graph(**more: Any) -> dict[str, Any]:
    return {"x": noise(NODES, 16), "edge_index": integers(NODES, 2, EDGES), **more}


def _model(build: Callable[..., nn.Module], *sizes: int, more: Any = None, **options: Any) -> Callable[[], Case]:
    return lambda: Case(build(*sizes, **options).train(), _graph(**(more or {})), uneven)


class _Stack(nn.Module):
    """Three convolutions of a graph with normalisation and dropout between."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(geometric.BatchNorm(32) for _ in layers)

    def forward(self, x: torch.Tensor, *edges: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = nn.functional.dropout(norm(layer(x, *edges)).relu(), 0.1, self.training)
        return x


def _stack(build: Callable[..., nn.Module], *edges: torch.Tensor, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        model = _Stack([build(16 if i == 0 else 32, 32, **options) for i in range(3)])
        return Case(model.train(), (noise(NODES, 16), integers(NODES, 2, EDGES), *edges), uneven)

    return make


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.layers = nn.ModuleList(
            geometric.GPSConv(32, geometric.GINConv(nn.Sequential(nn.Linear(32, 32), nn.ReLU())), heads=4, dropout=0.1)
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, edge_index, batch)
        return geometric.global_mean_pool(x, batch, size=4)


def _gps() -> Case:
    groups = torch.arange(NODES) // (NODES // 4)
    return Case(_Transformer().train(), _graph(batch=groups), uneven)


class _Equivariant(nn.Module):
    """SchNet with its neighbours given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = geometric.SchNet(hidden_channels=32, num_filters=32, num_interactions=3, interaction_graph=_given)

    def forward(self, z: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return self.net(z, pos)


def _given(pos: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    row, col = torch.arange(0, 60).repeat(6), (torch.arange(0, 60).repeat(6) + torch.arange(360) // 60 + 1) % 60
    return torch.stack([row, col]), (pos[row] - pos[col]).norm(dim=-1)


CASES = {
    "gcn": _model(geometric.GCN, 16, 32, 3, 8, dropout=0.1, norm="batch_norm"),
    "gat": _model(geometric.GAT, 16, 32, 3, 8, dropout=0.1, heads=4),
    "gat_v2": _model(geometric.GAT, 16, 32, 3, 8, dropout=0.1, heads=4, v2=True),
    "graph_sage": _model(geometric.GraphSAGE, 16, 32, 3, 8, dropout=0.1),
    "gin": _model(geometric.GIN, 16, 32, 3, 8, dropout=0.1, jk="cat"),
    "edge_cnn": _model(geometric.EdgeCNN, 16, 32, 3, 8, dropout=0.1),
    "pna": _model(geometric.PNA, 16, 16, 2, 8, aggregators=["mean", "max", "std"], scalers=["identity"],
                  deg=torch.ones(16, dtype=torch.long)),
    "transformer_conv": _stack(geometric.TransformerConv, heads=4, concat=False, dropout=0.1),
    "rgcn": _stack(geometric.RGCNConv, integers(4, EDGES), num_relations=4),
    "cheb_conv": _stack(geometric.ChebConv, K=3),
    "gps_transformer": _gps,
    "schnet": lambda: Case(_Equivariant().train(), (integers(20, 60, low=1), noise(60, 3)), uneven),
    "light_gcn": lambda: Case(geometric.LightGCN(NODES, 32, 3).train(), integers(NODES, 2, EDGES), uneven),
    "graph_unet": _model(geometric.GraphUNet, 16, 32, 8, depth=2),
    "sgformer": _model(geometric.SGFormer, 16, 32, 8, trans_num_heads=2,
                       more={"batch": torch.arange(NODES) // (NODES // 4)}),
}  # fmt: skip
