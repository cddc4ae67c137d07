"""The page as HTML: nothing of the user's is markup, and only what has changed is sent again."""

from __future__ import annotations

import json
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fleet.launch.page import job_view
from fleet.launch.page.page_html import changed, document, job_parts, process_parts
from fleet.launch.processes.worker_file import STEP
from tests.helpers.paged import made_end, made_process, made_view, worker_record

EVIL = "<script>alert(1)</script>\"'&"


class Tags(HTMLParser):
    """Counts tags, and checks that they close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes a tag."""
        self.seen.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in ("meta", "link", "line", "polyline", "polygon"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes a tag that closes itself."""
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Takes away the tag that it closes."""
        assert self.open.pop() == tag


def test_nothing_of_the_users_is_markup(tmp_path: Path) -> None:
    view = made_view(tmp_path, command=EVIL)
    view.begin(EVIL, EVIL)
    process, file = made_process(tmp_path, 0, 3)
    view.started(process, file)
    worker_record(tmp_path, 0, 3, tmp_path / EVIL.replace("/", "_"), **{EVIL: 1.0, "loss": 2.0})
    process.spec.log_path.write_text(f"{EVIL}\x1b[31mred\x00\n")
    view.facts.launcher_log.write_text(EVIL)
    points = "".join(f"{json.dumps({'step': i, 'values': {EVIL: i, 'nan': float('nan')}})}\n" for i in range(900))
    (tmp_path / "curves.jsonl").write_text(points)
    (tmp_path / "server.0.0.json").write_text(json.dumps({"tables": {EVIL: {"table_rows": 1}}, "totals": {}}))
    view.failed(made_end(made_process(tmp_path, 1, 3)[0], 1), EVIL, restarts=True)
    for parts in (job_parts(view), process_parts(view, "worker.0", EVIL)):
        assert parts is not None
        text = document(EVIL, parts, "/events")
        tags = Tags(text)
        assert tags.seen.count("script") == 1
        assert len(tags.ids) == len(set(tags.ids))
        assert text.count(EVIL) == 0
        assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 3
        assert "\x1b" not in text
        assert "red" in text or parts is not process_parts
    assert process_parts(view, "worker.9") is None


def test_a_loss_is_asked_for_where_none_is_logged(tmp_path: Path) -> None:
    view = made_view(tmp_path)
    view.begin("h", "node 0 of 1")
    view.started(*made_process(tmp_path, 0, 5))
    (tmp_path / "curves.jsonl").write_text('{"step": 5, "values": {"lr": 1}}\n')
    assert "No loss yet: <code>fleet.log(" in job_parts(view)["curves"]
    with (tmp_path / "curves.jsonl").open("a") as file:
        file.write('{"step": 6, "values": {"train_loss": 1}}\n')
    assert "No loss yet" not in job_parts(view)["curves"]


def test_only_what_has_changed_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_view, "_FRESH_S", 0.0)
    view = made_view(tmp_path)
    view.begin("h", "node 0 of 1")
    files = []
    for rank in range(3):
        process, file = made_process(tmp_path, rank, 3)
        view.started(process, file)
        files.append(file)
    first = job_parts(view)
    sent = changed({}, first)
    assert {"processes", "summary"} <= set(sent)
    assert not [part for part in sent if part.startswith("row-")]
    assert files[1] is not None
    files[1].words[STEP] = 4
    second = job_parts(view)
    assert "row-worker.1" in changed(first, second)
    assert not {"processes", "launcher", "curves"} & set(changed(first, second))
    view.started(*made_process(tmp_path, 3, 3))
    assert "processes" in changed(second, job_parts(view))


def test_the_summary_names_who_is_behind_and_who_is_in_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_view, "_FRESH_S", 0.0)
    view = made_view(tmp_path)
    view.begin("h", "node 1 of 2")
    processes = []
    for rank, step in enumerate((1009, 4, 1009)):
        process, file = made_process(tmp_path, rank, step)
        view.started(process, file)
        processes.append(process)
    text = job_parts(view)["summary"]
    assert "<dt>Workers</dt><dd>3<small>3 running</small>" in text
    assert "<dt>Step</dt><dd>1,009<small>worker 1 is at 4</small>" in text
    assert "node 1 of 2, h, mode collective" in text
    assert "in trouble" not in text
    made_end(processes[1], 1)
    text = job_parts(view, "/base")["summary"]
    assert "2 running, 1 in trouble" in text
    assert '<p class="state bad"><a href="/base/process/worker.1">worker 1</a>: failed: exit code 1</p>' in text


def test_the_summary_says_how_long_the_job_runs_and_will_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_view, "_FRESH_S", 0.0)
    view = made_view(tmp_path)
    view.begin("h", "node 0 of 1")
    process, file = made_process(tmp_path, 0, 30)
    view.started(process, file)
    view.began_at -= 3700.0
    text = job_parts(view)["summary"]
    assert "<dt>Elapsed</dt><dd>1 h 1 min<small>" in text
    assert "<dt>Left</dt><dd>not known<small>fleet.log(..., total_steps=N) tells</small>" in text
    assert "<progress" not in text
    record = {
        "step": 30,
        "values": {},
        "progress": {"step": 30, "total_steps": 1000, "at": time.time(), "left_s": 300.5},
    }
    (tmp_path / "worker.0.json").write_text(json.dumps(record))
    text = job_parts(view)["summary"]
    assert "<dt>Left</dt><dd>about 5 min<small>" in text
    assert "<dd>30<small>of 1,000</small>" in text
    assert '<progress max="1000" value="30"' in text
    made_end(process, 0)
    view.ended(0)
    text = job_parts(view)["summary"]
    assert "<dt>Left" not in text
    assert view.elapsed_s == view.elapsed_s, "the clock stops with the job"


def test_the_log_of_the_worker_in_trouble_stands_before_that_of_the_launcher(tmp_path: Path) -> None:
    view = made_view(tmp_path)
    view.facts.launcher_log.write_text("settings of the job\n")
    for rank in range(3):
        process, file = made_process(tmp_path, rank, 3)
        process.spec.log_path.write_text(f"first of {rank}\n" + f"worker {rank} says\n" * 1000)
        view.started(process, file)
    parts = job_parts(view, "/base")
    names = list(parts)
    assert names.index("worker_log") < names.index("launcher")
    assert 'Log of <a href="/base/process/worker.0">worker 0</a>' in parts["worker_log"]
    assert '<pre class="tail">worker 0 says' in parts["worker_log"], "no line is cut"
    assert "first of" not in parts["worker_log"]
    assert '<details id="launcher-log">' in parts["launcher"]
    made_end(process, 1)
    view._rows_at = -1.0
    assert "worker 2 says" in job_parts(view)["worker_log"]
    names = list(process_parts(view, "worker.0") or {})
    assert names == ["summary", "log", "stacks", "values"]
    assert list(process_parts(view, "worker.0", "stacks that were asked for") or {})[1] == "stacks"


def test_servers_show_rows_elements_memory_rates_and_lag(tmp_path: Path) -> None:
    users = {"table_rows": 11726.0, "table_bytes": 3 << 20}
    tables = {"users": users, "dense": {"table_elements": 1, "table_bytes": 4}}
    totals = {"memory_bytes": 7 << 20, "changes": 4, "pulled_rows_per_s": 10_000, "pushed_rows_per_s": 20,
              "pushed_elements_per_s": 5.4, "publish_lag_seconds": 1.25}  # fmt: skip
    (tmp_path / "server.2.0.json").write_text(json.dumps({"tables": tables, "totals": totals}))
    text = job_parts(made_view(tmp_path))["servers"]
    for shown in ("server 2", "users", ">11,726 rows<", "3 MiB", ">1 element<", ">4 B<",
                  "process 7 MiB, 4 changes, 10,000 rows/s pulled, 20 rows/s pushed, 5 dense elements/s pushed, "
                  "1.2 s behind the sink"):  # fmt: skip
        assert shown in text
    assert "Evicted" not in text
    users["evicted_rows"] = 2
    (tmp_path / "server.2.0.json").write_text(json.dumps({"tables": tables, "totals": totals}))
    text = job_parts(made_view(tmp_path))["servers"]
    assert "Evicted" in text
    assert ">2 rows<" in text
