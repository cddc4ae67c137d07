"""Bounds: what a limit may be, and what is refused with the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.ps.embeddings.embedding import SparseEmbedding
from fleet.ps.embeddings.served_embedding import serve_embeddings
from fleet.ps.table.bounds import Bounds, bounds_of
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.sparse_table import SparseTable
from fleet.ps.worker.table_configs import configure_table
from fleet.ps.worker.table_plan import plan_tables

PLAIN = SparseTableConfig("ads", 9)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_rows": 0}, "max_rows is 0; it takes an integer of 1 or more"),
    ({"max_rows": True}, "max_rows is True"),
    ({"max_rows": "10"}, "max_rows is '10'"),
    ({"max_rows": 1.5}, "max_rows is 1.5"),
    ({"max_rows": 2**40}, "at most"),
    ({"max_bytes": -1}, "max_bytes is -1"),
    ({"max_rows": 5, "max_bytes": 2**30}, "one limit"),
    ({"evict": "lru"}, "no limit to keep"),
    ({"evict": "fifo", "max_rows": 5}, "one of"),
    ({"evict": 1, "max_rows": 5}, "one of"),
    ({"evict": "ttl"}, "no ttl_days"),
    ({"evict": "ttl", "max_rows": 5}, "no ttl_days"),
    ({"ttl_days": 5}, 'belongs to evict="ttl"'),
    ({"evict": "lru", "max_rows": 5, "ttl_days": 5}, 'belongs to evict="ttl"'),
    ({"evict": "ttl", "ttl_days": 0}, "ttl_days is 0"),
    ({"evict": "ttl", "ttl_days": 2.5}, "ttl_days is 2.5"),
    ({"evict": "ttl", "ttl_days": 60_000}, "at most 49151"),
    ({"rows": "disk"}, "needs memory_bytes"),
    ({"rows": "ssd"}, "one of"),
    ({"rows": True}, "one of"),
    ({"memory_bytes": 2**30}, "belongs to rows"),
    ({"rows": "disk", "memory_bytes": "1G"}, "memory_bytes is '1G'"),
    ({"rows": "disk", "memory_bytes": 2**30, "max_bytes": 2**30}, "set max_rows"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_a_wrong_limit_is_refused_wherever_it_is_written(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Bounds(**given)
    with pytest.raises(ConfigError, match=r"^sparse_table_configs\['ads'\]: .*" + message):
        configure_table(PLAIN, given)
    with pytest.raises(ConfigError, match="^SparseEmbedding: .*" + message):
        SparseEmbedding(9, name="ads", **given)


@pytest.mark.parametrize("key", ["ttl", "ttl_s", "ttl_hours", "ttl_steps"])
def test_other_units_of_a_time_to_live_are_refused(key: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"{key} cannot be honoured: .*fleet.set_date.*write ttl_days"):
        configure_table(PLAIN, {"evict": "ttl", key: 5})


def test_a_limit_alone_leaves_the_statistics_of_a_table() -> None:
    made = configure_table(PLAIN, {"max_rows": 100})
    assert made.bounds == Bounds(max_rows=100)
    assert (made.accessor, made.rule) == (None, PLAIN.rule)
    assert configure_table(PLAIN, {"max_rows": 100, "embedx_threshold": 3}).accessor is not None
    assert SparseEmbedding(9, name="ads", max_rows=100).table_config(PLAIN.rule).bounds == made.bounds
    assert SparseEmbedding(9, name="ads").table_config(PLAIN.rule).bounds is None
    with pytest.raises(ConfigError, match="in one place"):
        configure_table(made, {"max_rows": 200})
    assert configure_table(made, {"max_rows": 100}) == made
    assert configure_table(made, {"embedx_threshold": 3}).bounds == made.bounds


def test_bounds_of_nothing() -> None:
    assert bounds_of("x", {}) is None
    assert bounds_of("x", {"rows": "memory", "max_rows": None}) is None


def test_a_table_too_small_for_its_pieces_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_bytes is 1000; memory comes in 64 pieces of 1024 rows"):
        SparseTable(SparseTableConfig("ads", 9, bounds=Bounds(max_bytes=1000)))


@pytest.mark.parametrize("given", [{"max_rows": 10}, {"max_bytes": 2**30}, {"evict": "ttl", "ttl_days": 2}])
def test_modes_and_modules_whose_rows_cannot_be_deleted_refuse_limits(given: dict[str, Any]) -> None:
    model = nn.Sequential(SparseEmbedding(4, name="ads", **given))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert plan_tables([model], optimizer).sparse[0].config.bounds == Bounds(**given)
    with pytest.raises(ConfigError, match="geo workers keep theirs"):
        plan_tables([model], optimizer, geo=True)
    plain = nn.Sequential(nn.Embedding(50, 4, sparse=True))
    serve_embeddings(plain)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"nn.Embedding has a fixed number of rows .* use fleet.SparseEmbedding"):
        plan_tables([plain], sgd, configure=lambda config: configure_table(config, given))


def test_rows_on_disk_suit_every_module() -> None:
    given = {"rows": "disk", "memory_bytes": 2**30}
    for module in (SparseEmbedding(4, name="ads"), nn.Embedding(50, 4, sparse=True)):
        model = nn.Sequential(module)
        serve_embeddings(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for geo in (False, True):
            plan = plan_tables([model], optimizer, geo=geo, configure=lambda config: configure_table(config, given))
            assert plan.sparse[0].config.bounds == Bounds(**given)
