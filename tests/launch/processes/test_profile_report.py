"""The report of --profile: one trace, a table, stragglers; and what becomes of files that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import ConfigError
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.profile_report import (
    PARTS,
    read_range,
    show_profile,
    straggler_lines,
    table_lines,
    write_report,
)
from tests.helpers.launching import plan, read

MS = 1_000_000
BASE = 1_790_000_000_000_000_000


def worker(rank: int, **parts_ms: float) -> dict[str, Any]:
    """Returns what a worker writes that did one step, number 10, with ``parts_ms``."""
    parts = {part: int(parts_ms.get(part, 0) * MS) for part in PARTS}
    begin = BASE + 5 * MS
    steps = [{"step": 10, "begin_ns": begin, "end_ns": begin + sum(parts.values()), "parts_ns": parts}]
    spans = [["forward", begin, begin + parts["forward"]]]
    return {"rank": rank, "host": "node", "pid": 40 + rank, "steps": steps, "spans": spans}


def write(folder: Path, made: dict[str, Any], base: int = BASE) -> None:
    """Writes the files of a worker: its steps, and a trace with an operation 1 ms after they begin."""
    folder.mkdir(exist_ok=True)
    rank, pid = made["rank"], made["pid"]
    ts = (made["steps"][0]["begin_ns"] + MS - base) / 1000
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": ts, "args": {"name": "python"}},
        {"ph": "X", "name": "aten::mm", "pid": pid, "tid": 77, "ts": ts, "dur": 5},
        {"ph": "X", "name": "gemm", "pid": 0, "tid": 7, "ts": ts, "dur": 5},
        {"ph": "s", "name": "fwdbwd", "id": 2, "pid": pid, "tid": 77, "ts": ts},
        {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "ts": ts, "dur": 9},
    ]
    (folder / f"rank{rank}.trace.json").write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}))
    (folder / f"rank{rank}.steps.json").write_text(json.dumps(made))


def test_one_trace_has_a_process_for_each_rank_on_one_clock(tmp_path: Path) -> None:
    write(tmp_path, worker(0, forward=4))
    write(tmp_path, worker(1, forward=4), base=BASE - 3_000_000 * MS)  # torch may count from elsewhere
    write_report(tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {"rank 0 (node)", "rank 1 (node)"}
    assert {event["pid"] for event in events} == {0, 1}
    products = [event for event in events if event["name"] == "aten::mm"]
    assert [(event["pid"], event["ts"]) for event in products] == [(0, pytest.approx(1000)), (1, pytest.approx(1000))]
    rows = {event["name"]: event["tid"] for event in events if event["pid"] == 0 and event["ph"] == "X"}
    assert len(set(rows.values())) == len(rows) == 4  # a step, its parts, a thread, a stream of the device
    assert {event["id"] for event in events if event["ph"] == "s"} == {"0.2", "1.2"}
    steps = [event for event in events if event["name"] == "step 10"]
    assert [(event["ts"], event["dur"]) for event in steps] == [(0, 4000), (0, 4000)]
    assert not list(tmp_path.glob("rank*.trace.json"))


def test_the_table_has_means_of_each_part() -> None:
    made = worker(0, data=1, forward=2, backward=3, exchange=4, update=5)
    second = {"step": 11, "begin_ns": 0, "end_ns": 0, "parts_ns": dict.fromkeys(PARTS, 0)}
    made["steps"].append(second)
    title, head, row = table_lines([made])
    assert title.startswith("Where steps 10 to 11 went")
    assert head.split() == ["rank", "step", "data", "forward", "backward", "exchange", "update", "other"]
    assert [float(cell) for cell in row.split()] == [0, 7.5, 0.5, 1, 1.5, 2, 2.5, 0]


def test_a_rank_that_needs_more_than_the_others_is_named_with_the_part() -> None:
    quick = [worker(rank, data=1, forward=10, exchange=41) for rank in (0, 1, 3)]
    (line,) = straggler_lines([*quick, worker(2, data=42, forward=9)])
    assert line.startswith("Straggler: rank 2 needs 51.00 ms for a step without the exchange, 4.6 times the median")
    assert "most of that in data, 42.00 against 1.00 ms" in line
    assert straggler_lines([*quick, worker(2, data=1, forward=12)]) == []
    assert len(straggler_lines([worker(0, forward=10), worker(1, forward=13)])) == 1  # the median of two is the lower


def test_a_job_that_did_not_reach_the_steps_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = read("--profile=10:13", f"--log_dir={tmp_path}")
    show_profile(config, LaunchLog())
    assert "no worker of this node has finished one of these steps" in capsys.readouterr().err


STEPS = '{"rank": 1, "host": "h", "steps": [{"step": 1, "begin_ns": 1%s, "end_ns": 2}], "spans": []}' % ("0" * 400)
BROKEN = ('{"rank"', "[]", "7", "[" * 200_000, '{"rank": 1, "steps": 3}', STEPS)


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:24])
def test_a_broken_file_costs_the_report_alone(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "profile"
    write(folder, worker(0, forward=1))
    (folder / "rank1.steps.json").write_text(text)
    show_profile(read("--profile=10:13", f"--log_dir={tmp_path}"), LaunchLog())
    assert "no report was made" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "found"), [("10:13", (10, 13)), (" 0:1 ", (0, 1)), ("5:1005", (5, 1005))])
def test_steps_from_the_first_up_to_the_last(text: str, found: tuple[int, int]) -> None:
    assert read_range(text, "--profile") == found


@pytest.mark.parametrize("text", ["13:10", "10:10", "0:1001"])
def test_an_empty_or_huge_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--profile is .*LAST is greater than FIRST, by 1000 at most"):
        read_range(text, "--profile")


@pytest.mark.parametrize("text", ["10", "a:b", "-1:3", "10:", "1:2:3", "", "1.5:2", "9" * 700 + ":1"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="takes FIRST:LAST, numbers of steps counted from 0, as in 10:13"):
        read_range(text, "--profile")


def test_the_workers_get_the_range_from_the_flag_or_the_environment() -> None:
    assert plan(read("--profile=10:13", "--nproc_per_node=2"))[1].environment["FLEET_PROFILE"] == "10:13"
    assert plan(read(env={"FLEET_PROFILE": "1:2"}))[0].environment["FLEET_PROFILE"] == "1:2"
    assert "FLEET_PROFILE" not in plan(read())[0].environment


def test_a_bad_range_is_refused_before_the_job_starts() -> None:
    with pytest.raises(ConfigError, match="--profile is '13:10'"):
        read("--profile=13:10")
    with pytest.raises(ConfigError, match="FLEET_PROFILE is 'x'"):
        read(env={"FLEET_PROFILE": "x"})
