"""The estimate of tables against jobs: memory of a server process, and the ids that its core serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import PSError
from fleet.estimate.measured_server import MEASURED_S, measure_server
from fleet.estimate.planned_tables import table_of
from tests.launch.launcher import Launcher

# One server and one worker that trains every id of its table twice, the second time with an eye on the server.
JOB = """
import json, os, pathlib
import torch
from fleet import fleet
settings = json.loads(os.environ["SETTINGS"])
own = {"accessor": lambda kind: fleet.ps.Accessor(kind), "entry": lambda text: fleet.CountFilterEntry(int(text[-1]))}
made = {key: own.get(key, lambda value: value)(value) for key, value in settings["module"].items()}
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
fleet.init(strategy=strategy)
model = torch.nn.Sequential(fleet.SparseEmbedding(settings["dim"], name="ads", **made))
optimizer = getattr(torch.optim, settings["optimizer"])(model.parameters(), lr=0.1)
optimizer = fleet.distributed_optimizer(optimizer, strategy)
model = fleet.distributed_model(model)
if fleet.is_server():
    pathlib.Path("pid").write_text(str(os.getpid()))
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
fleet.init_worker()
server = pathlib.Path("/proc", pathlib.Path("pid").read_text())
def used():
    user, system = (server / "stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
def train(ids, size):
    for part in ids.split(size):
        model(part * 1_000_003).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.barrier_worker()
ids = torch.arange(settings["ids"])
train(ids, 50_000)
train(ids[: settings["again"]], 50_000)
memory = [1024 * int(line.split()[1]) for line in (server / "status").read_text().splitlines() if "VmRSS" in line]
before = used()
mixed = torch.randperm(settings["again"] or settings["ids"])[:400_000]
train(mixed, 4_000)
rate = len(mixed) / (used() - before)
pathlib.Path("found.json").write_text(json.dumps({"memory": memory[0], "rate": rate}))
fleet.stop_worker()
"""
JOBS: dict[str, dict[str, Any]] = {
    "adagrad": {"dim": 16, "ids": 2_000_000, "again": 0, "optimizer": "Adagrad", "module": {}},
    "counted": {
        "dim": 9,
        "ids": 1_500_000,
        "again": 0,
        "optimizer": "Adam",
        "module": {"accessor": "CtrCommonAccessor"},
    },
    "waiting": {
        "dim": 32,
        "ids": 3_000_000,
        "again": 1_000_000,
        "optimizer": "SGD",
        "module": {"entry": "count_filter_entry:2"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_memory_of_a_job_within_20_percent(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    flags = ("--server_num=1", "--worker_num=1")
    with Launcher(tmp_path, JOB, *flags, env={"SETTINGS": json.dumps(job)}) as launched:
        assert launched.wait(300.0) == 0, launched.stderr + launched.log("workerlog.0")
    found = json.loads((tmp_path / "found.json").read_text())
    settings = {"dim": job["dim"], "ids": job["ids"], "rule": job["optimizer"].lower(), **job["module"]}
    table = table_of({**settings, "admitted": (job["again"] or job["ids"]) / job["ids"]})
    measured = measure_server([table.config], 4_000)
    estimate = measured.process_bytes + table.on_server(1).memory_bytes
    assert measured.ids_per_s is not None
    print(f"{name}: {estimate / 1e6:.0f} MB, measured {found['memory'] / 1e6:.0f} MB", end="; ")
    print(f"{measured.ids_per_s / 1e6:.2f} million ids a second and core, measured {found['rate'] / 1e6:.2f}")
    assert estimate == pytest.approx(found["memory"], rel=0.2)
    assert table.on_server(1).memory_bytes > 0.25 * found["memory"]  # so that the tables matter
    # On a machine of its own within 5 %; the processors of a test are shared.
    assert found["rate"] / 3 < measured.ids_per_s < 3 * found["rate"]


def test_a_server_without_rows_is_measured_and_ends() -> None:
    measured = measure_server([table_of({"dim": 4, "ids": 10}).config])
    assert measured.ids_per_s is None
    assert 1e8 < measured.process_bytes < 1e9
    assert measured.took_s > 0


def test_a_server_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.estimate.measured_server.sys.executable", "/bin/echo")
    with pytest.raises(PSError, match=r"did not start: -m fleet\.estimate"):
        measure_server([table_of({"dim": 4, "ids": 10}).config])
    assert MEASURED_S < 10
