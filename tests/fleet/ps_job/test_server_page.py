"""What a parameter server writes for the page of the job, as the launcher reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet.env import Environment
from fleet.facade import Fleet
from fleet.launch.page.page_folder import PageFolder, ServerRecord
from fleet.ps_job.server_page import write_server_page
from tests.fleet.ps_job.test_server_job import make_sgd, served, strategy
from tests.helpers.served import batches, run_job, train


def test_each_server_shows_its_tables_while_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PAGE_FOLDER", str(tmp_path))
    monkeypatch.setattr("fleet.ps_job.server_page._PERIOD_S", 0.02)
    found: list[dict[int, list[ServerRecord]]] = []

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, strategy("async"), make_sgd)
        train(model, optimizer, batches(4))
        own.session.server_job.running().flush()
        folder = PageFolder(tmp_path)
        for _ in range(500):
            servers = folder.servers()
            if len(servers) == 2 and all(r.totals["changes"] and r.tables for (r,) in servers.values()):
                found.append(servers)
                break
        own.stop_worker()

    run_job(work, num_servers=2, strategy=strategy("async"))
    rows = [sum(t.get("table_rows", 0) for t in record.tables.values()) for (record,) in found[0].values()]
    assert all(rows)
    assert {"memory_bytes", "pulled_rows_per_s", "pushed_rows_per_s"} <= set(found[0][0][0].totals)
    assert list(tmp_path.glob("server.*")) == [], "nobody serves any more"


def test_without_a_page_nothing_is_written(tmp_path: Path) -> None:
    state: Any = None  # it is not looked at
    write_server_page(state, 0, Environment({}))()
