"""Publishing as a script asks for it: by a call or by options, under servers and with the server inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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


def test_one_process_with_its_server_inside_publishes_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    own, model, optimizer = embedded({"publish": f"folder:{tmp_path / 'rows'}", "publish_every_s": 0.02})
    train_model(model, optimizer, batches(4))
    own.stop_worker()
    rows = rows_in(tmp_path / "rows")
    own.session.close()
    state = model.state_dict()
    tables = {name.removesuffix(".weight"): weight for name, weight in state.items()}
    found = {name: tables[name] for name in rows if name in tables}
    assert found
    for name, weight in found.items():
        for key, row in rows[name].items():
            assert row == weight[key].numpy().tobytes(), (name, key)


def test_a_server_sends_a_function_what_its_workers_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path))
    deltas: list[Delta] = []
    pulled: list[dict[str, torch.Tensor]] = []

    def serve(own: Fleet, index: int) -> None:
        own.init_server()
        ps.publish(deltas.append, every_s=0.01)
        own.run_server()

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, strategy("sync"), make_sgd)
        train_model(model, optimizer, batches(3))
        pulled.append({name: value.clone() for name, value in model.state_dict().items()})
        own.stop_worker()

    run_job(work, strategy=strategy("sync"), serve=serve)
    assert deltas[0].whole
    assert deltas[-1].step == 3
    latest: dict[tuple[str, int], np.ndarray] = {}
    for delta in deltas:
        for table in delta.tables:
            latest.update({(table.table, int(key)): row for key, row in zip(table.keys, table.values, strict=True)})
    weights = {name.removesuffix(".weight"): value for name, value in pulled[0].items()}
    shared = [(name, key) for name, key in latest if name in weights]
    assert shared
    for name, key in shared:
        np.testing.assert_array_equal(latest[name, key], weights[name][key].numpy())


def test_two_sinks_level_0_and_tables_that_do_not_exist_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, model, optimizer = embedded({"publish": f"folder:{tmp_path}"})
    with pytest.raises(ConfigError, match="a_sync_configs.'publish'.*no journal.*FLEET_PS_FOLDER"):
        train_model(model, optimizer, batches(1))
    own.session.close()
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    ps.publish(f"folder:{tmp_path}")
    own, model, optimizer = embedded({"publish": f"folder:{tmp_path}"})
    with pytest.raises(ConfigError, match="a job publishes to one sink"):
        train_model(model, optimizer, batches(1))
    own.session.close()
    ps.publish(f"folder:{tmp_path}", tables=["nowhere"])
    own, model, optimizer = embedded()
    with pytest.raises(ConfigError, match="there is no sparse table 'nowhere'; the model has"):
        train_model(model, optimizer, batches(1))
    own.session.close()


def test_a_key_without_a_sink_is_noted_and_a_wrong_address_refused() -> None:
    chosen = strategy("async")
    chosen.a_sync_configs = {"publish_every_s": 0.5}
    assert "'publish_every_s'] was set and changes nothing" in Fleet().explain(chosen, 2)
    chosen.a_sync_configs = {"publish": "http://x"}
    with pytest.raises(ConfigError, match="schemes are redis://"):
        Fleet().init(strategy=chosen)
