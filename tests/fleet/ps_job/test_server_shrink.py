"""fleet.shrink: which tables it acts on (D.4, D.8)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError
from fleet.facade import Fleet
from tests.fleet.ps_job.test_server_job import alone, make_sgd, rows_of, strategy
from tests.helpers.served import WideAndDeep, batches, train


def started(net: nn.Module, tables: dict[str, Any] | None = None) -> tuple[Fleet, Any, Any]:
    """Returns a Fleet with the server inside this process, started with ``net``."""
    made, own = strategy("sync"), Fleet()
    made.sparse_table_configs = tables or {}
    own.init(strategy=made, log_level="WARNING")
    optimizer, model = own.distributed_optimizer(make_sgd(net.parameters())), own.distributed_model(net)
    own.init_worker()
    return own, model, optimizer


def test_rows_of_an_embedding_with_weights_of_its_own_stay() -> None:
    """D.8: a deleted row of nn.Embedding would read as zeros; its initial weights cannot be made again."""
    own, model, optimizer = alone(strategy("sync"))
    train(model, optimizer, batches(1))
    words, rows = model.state_dict()["words.weight"].clone(), rows_of(model).clone()
    assert own.shrink(1000) == len(batches(1)[0][0].unique())  # the rows of 'ads', which were trained
    assert torch.equal(model.state_dict()["words.weight"], words)
    assert bool(words.any(dim=1).all())
    assert not torch.equal(rows_of(model), rows)
    own.stop_worker()
    own.session.close()


def test_tables_without_an_accessor_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """D.4, D.8: without a threshold the accessors decide, one table for itself."""
    own, model, optimizer = started(WideAndDeep(accessor=fleet.ps.Accessor(delete_after_unseen_days=0)))
    train(model, optimizer, batches(1))
    own.set_date(0, "20260101")
    assert own.shrink() > 0
    own.print_table_stat(0)
    own.print_table_stat(1)
    first, second = capsys.readouterr().out.splitlines()
    assert ": 0 rows" in first
    assert ": 20 rows" in second
    own.stop_worker()
    own.session.close()


def test_nothing_to_decide_by_is_said_before_anything_is_deleted() -> None:
    """D.8: the error says what to write, and each worker gets it before it waits for the others."""
    own, model, optimizer = alone(strategy("sync"))
    train(model, optimizer, batches(1))
    with pytest.raises(ConfigError, match=r"\['ads', 'words'\].*no table has one.*Accessor"):
        own.shrink()
    own.stop_worker()
    own.session.close()
    own, model, optimizer = started(nn.Sequential(nn.Embedding(5, 1, sparse=True)))
    with pytest.raises(ConfigError, match=r"shrink\(threshold=2\).*there is none"):
        own.shrink(2)
    own.stop_worker()
    own.session.close()
    own, model, optimizer = started(nn.Sequential(nn.Embedding(5, 1, sparse=True)), {"0": {"delete_threshold": 0.5}})
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert own.shrink(2) == 5  # with an accessor, which sparse_table_configs gives it
    own.stop_worker()
    own.session.close()
