"""explain() with models: it counts the parameters that a plan divides, and names the embeddings on servers."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

from torch import nn

import fleet
from fleet.options.explain import mesh_lines
from fleet.options.explain_models import divided_lines, row_lines
from fleet.ps.embeddings.served_embedding import serve_embeddings
from tests.helpers.workers import run_workers

PLAN = {"blocks.*.up": "column", "blocks.*.down": "row"}


class PlannedNet(nn.Module):
    """Three blocks of two layers, and a head that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(100, 200), "down": nn.Linear(200, 100)}) for _ in range(3)
        )
        self.head = nn.Linear(100, 10, bias=False)


def strategy_of() -> fleet.DistributedStrategy:
    """Returns options with the plan."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"mp_degree": 2}
    strategy.tensor_parallel_configs = {"plan": PLAN}
    return strategy


def said(rank: int, world_size: int) -> list[str]:
    fleet.init(is_collective=True, strategy=strategy_of(), log_level="ERROR")
    with redirect_stdout(io.StringIO()):
        before = fleet.explain()
        fleet.distributed_model(PlannedNet())
        return [before, fleet.explain(), fleet.explain(strategy_of(), 2)]


def test_counts_and_bytes() -> None:
    """3 x (20,000 + 200 + 20,000) numbers of 4 bytes are divided; biases of row layers and the head are whole."""
    for before, after, other in run_workers(said, 2, backend=None):
        assert "Divided" not in before + other
        assert "blocks.*.up: column: the outputs of a linear layer are divided" in before
        assert "Divided: 9 of 13 parameters on this worker, 0.241 MB of 0.482 MB; whole: 4, 0.005 MB" in after
        assert "blocks.*.up.weight: 3 along dim 0 over mp 2, 0.120 MB of 0.240 MB" in after
        assert "blocks.*.up.bias: 3 along dim 0 over mp 2, 0.001 MB of 0.002 MB" in after
        assert "blocks.*.down.weight: 3 along dim 1 over mp 2" in after
        assert "down.bias" not in after


def test_whole_models_have_none() -> None:
    """Nothing is said where nothing is divided; a style that is refused later is left out."""
    assert divided_lines([PlannedNet()]) == []
    strategy = strategy_of()
    strategy.tensor_parallel_configs = {"plan": {"*": "auto"}}
    assert any("model's own plan" in line for line in mesh_lines(strategy, 2))
    strategy.tensor_parallel_configs = {"plan": {"head": "colunm"}}
    assert not any("head" in line for line in mesh_lines(strategy, 2))


def test_tables_alike_share_a_line() -> None:
    model = nn.ModuleDict({name: nn.Embedding(7, 2, sparse=True) for name in ("a", "b")})
    model["ads"] = fleet.SparseEmbedding(4, name="shown")
    model["out"] = nn.Linear(4, 1)
    assert row_lines([nn.Linear(2, 1)], {}) == []
    serve_embeddings(model)
    assert row_lines([model], {"shown": {"initial_range": 0.5}}) == [
        "Rows on the servers:",
        "  a, b: 7 rows of 2, from the module's own weights",
        "  ads: rows of 4 for any 64-bit id, each from uniform (-0.5, 0.5)",
        "Dense parameters: 5 elements",
    ]
