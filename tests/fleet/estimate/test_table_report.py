"""What the command prints of tables, from a measurement that is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fleet.errors import ConfigError
from fleet.estimate.estimate_command import run
from fleet.estimate.measured_server import MeasuredServer
from fleet.estimate.planned_tables import tables_of
from fleet.estimate.table_report import Demand, report, servers_for_memory

ADS = ["--table", "name=ads,dim=16,rule=adagrad,ids=20e6"]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Returns the sizes of messages that were measured: a million ids a second and core, a process of 400 MB."""
    found: list[int | None] = []

    def measure(configs: Sequence[Any], ids_in_message: int | None = None) -> MeasuredServer:
        found.append(ids_in_message)
        return MeasuredServer(400_000_000, None if ids_in_message is None else 1e6, 4.0)

    monkeypatch.setattr("fleet.estimate.table_report.measure_server", measure)
    return found


def test_memory_of_one_of_two_servers(capsys: pytest.CaptureFixture[str], asked: list[int | None]) -> None:
    assert run([*ADS, "--servers", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Tables on one of 2 servers, in MB of a million bytes"
    name, rows, row_bytes, of_rows, index, memory, disk, save = lines[3].split()
    assert (name, rows, row_bytes, disk) == ("ads", "10,000,000", "128", "0")
    assert int(of_rows) == pytest.approx(1280, abs=10)
    assert 213 <= int(index) <= 320
    assert int(memory) == pytest.approx(int(of_rows) + int(index), abs=1)
    assert int(save) == 1430
    assert lines[5].split() == ["server", str(int(memory) + 400)]
    assert asked == [None]


def test_servers_for_memory_are_the_fewest_that_hold_the_tables() -> None:
    tables = tables_of(["dim=16,rule=adagrad,ids=1e9"])
    demand = Demand(server_memory=32 * 10**9)
    found = servers_for_memory(tables, demand, 400_000_000)
    assert found is not None

    def taken(servers: int) -> float:
        return 4e8 + tables[0].on_server(servers).memory_bytes

    assert taken(found) <= 0.8 * 32e9 < taken(found - 1)
    assert servers_for_memory(tables, Demand(), 400_000_000) is None


def test_servers_for_a_rate(asked: list[int | None]) -> None:
    """Ten million ids a second are ten cores; four of two cores each are busy to 70 %: eight."""
    tables = tables_of(["dim=16,rule=adagrad,ids=20e6"])
    text = report(tables, Demand(rate=5e5, ids_per_sample=20, server_cores=2, samples_per_step=100))
    assert "10.00 million: 10.00 cores, so 8 servers of 2 cores" in text
    assert "Network of all servers: 800 MB/s in, 640 MB/s out" in text
    assert text.startswith("Tables on one of 8 servers")
    report(tables, Demand(servers=4, rate=5e5, ids_per_sample=20, samples_per_step=100))
    assert asked == [2000, 500]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "1000"], "--rate and --ids-per-sample belong together"),
        (["--servers", "0"], "--servers 0: it takes a number above 0"),
        (["--server-memory", "0.3"], "takes 0.40 GB"),
        (["model.py:Net"], "estimate one at a time"),
        (["--table", "dim=3"], "has no ids"),
    ],
)
def test_wrong_arguments(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ADS, *words]) == 2
    assert said in capsys.readouterr().err


def test_without_a_model_and_without_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "give FILE:NAME and --batch" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="above 0"):
        Demand(rate=-1.0, ids_per_sample=2.0)
