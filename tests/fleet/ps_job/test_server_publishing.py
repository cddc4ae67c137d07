"""Publishing as a script asks for it: by a call or by options, under servers and with the server inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fleet import ps
from fleet.errors import ConfigError
from fleet.facade import Fleet
from fleet.ps.publishing.delta import Delta
from fleet.ps.publishing.publication import take_asked
from tests.fleet.ps.publishing.test_folder_sink import rows_in
from tests.fleet.ps_job.test_server_job import make_sgd, served, strategy
from tests.helpers.served import batches, run_job
from tests.helpers.served import train as train_model

Rows = dict[str, dict[int, bytes]]


@pytest.fixture(autouse=True)
def nothing_is_asked() -> Any:
    take_asked()
    yield
    take_asked()


def embedded(*configs: dict[str, Any]) -> tuple[Fleet, Any, Any]:
    own = Fleet()
    chosen = strategy("sync")
    for config in configs:
        chosen.a_sync_configs = config
    own.init(strategy=chosen, log_level="WARNING")
    model, optimizer = served(own, chosen, make_sgd)
    return own, model, optimizer


def learned(model: Any) -> Rows:
    """Returns the rows of all ids of the batches, as the servers have them."""
    ids = torch.arange(40) * 10**12
    ads = model.module.ads.lookup_rows(ids)
    words = model.state_dict()["words.weight"]
    return {
        "ads": {key: row.numpy().tobytes() for key, row in zip(ids.tolist(), ads, strict=True)},
        "words": {key: row.numpy().tobytes() for key, row in enumerate(words)},
    }


def check(rows: Rows, expected: Rows) -> None:
    """Every published row is the learned one, and every word is published, for worker 0 adds its weights."""
    assert rows.keys() == expected.keys()
    assert rows["words"] == expected["words"]
    assert 20 < len(rows["ads"]) <= 40
    assert rows["ads"].items() <= expected["ads"].items()


def test_one_process_with_its_server_inside_publishes_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    own, model, optimizer = embedded({"publish": f"folder:{tmp_path / 'rows'}", "publish_every_s": 0.02})
    train_model(model, optimizer, batches(4))
    expected = learned(model)
    own.stop_worker()
    own.session.close()
    check(rows_in(tmp_path / "rows"), expected)


def test_a_server_sends_a_function_what_its_workers_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path))
    deltas: list[Delta] = []
    expected: list[Rows] = []

    def serve(own: Fleet, index: int) -> None:
        own.init_server()
        ps.publish(deltas.append, every_s=0.01)
        own.run_server()

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, strategy("sync"), make_sgd)
        train_model(model, optimizer, batches(3))
        expected.append(learned(model))
        own.stop_worker()

    run_job(work, strategy=strategy("sync"), serve=serve)
    assert deltas[0].whole
    assert deltas[-1].step == 3
    rows: Rows = {}
    for delta in deltas:
        for table in delta.tables:
            found = zip(table.keys.tolist(), table.values, strict=True)
            rows.setdefault(table.table, {}).update({key: row.tobytes() for key, row in found})
    check(rows, expected[0])


def test_two_sinks_level_0_and_tables_that_do_not_exist_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="a_sync_configs.'publish'.*no journal.*FLEET_PS_FOLDER"):
        embedded({"publish": f"folder:{tmp_path}"})
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    ps.publish(f"folder:{tmp_path}")
    with pytest.raises(ConfigError, match="a job publishes to one sink"):
        embedded({"publish": f"folder:{tmp_path}"})
    ps.publish(f"folder:{tmp_path}", tables=["nowhere"])
    with pytest.raises(ConfigError, match="there is no sparse table 'nowhere'; the model has"):
        embedded()


def test_a_job_without_servers_has_nothing_to_publish(tmp_path: Path) -> None:
    own = Fleet()
    own.init(is_collective=True, log_level="WARNING")
    ps.publish(tmp_path / "rows")
    model = torch.nn.Linear(2, 1)
    with pytest.raises(
        ConfigError, match=r"publish\(\) was called, and this job has no parameter servers.*Remove the call"
    ):
        own.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    own.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    own.session.close()


def test_a_key_without_a_sink_is_noted_and_a_wrong_address_refused() -> None:
    chosen = strategy("async")
    chosen.a_sync_configs = {"publish_every_s": 0.5}
    assert "'publish_every_s'] was set and changes nothing" in Fleet().explain(chosen, 2)
    with pytest.raises(ConfigError, match="schemes are redis://"):
        embedded({"publish": "http://x"})
