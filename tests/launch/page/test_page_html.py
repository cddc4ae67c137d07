"""The page as HTML: nothing of the user's is markup, and only what has changed is sent again."""

from __future__ import annotations

import json
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
        if tag not in ("meta", "link", "line", "polyline"):
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


def test_a_curve_keeps_its_ends_in_240_points(tmp_path: Path) -> None:
    view = made_view(tmp_path)
    lines = [f"{json.dumps({'step': i, 'values': {'loss': -i, 'a/b': 1}})}\n" for i in range(5000)]
    (tmp_path / "curves.jsonl").write_text("".join(lines))
    text = job_parts(view)["curves"]
    first, second = text.split("<figure>")[1:]
    assert first.index("loss") > 0
    assert second.index("a/b") > 0
    points = first.split('points="')[1].split('"')[0].split()
    assert (len(points), points[0], points[-1]) == (240, "0.0,4.0", "240.0,86.0")
    assert "steps 0 to 4999, -4999 to 0" in first


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


def test_the_summary_names_who_is_furthest_behind(tmp_path: Path) -> None:
    view = made_view(tmp_path)
    view.begin("h", "node 1 of 2")
    for rank, step in enumerate((9, 4, 9)):
        view.started(*made_process(tmp_path, rank, step))
    text = job_parts(view)["summary"]
    assert "3 workers: 3 running. Step 9; furthest behind: worker 1 at 4" in text
    assert "node 1 of 2, h, mode collective" in text


def test_servers_show_rows_memory_rates_and_lag(tmp_path: Path) -> None:
    table = {"table_rows": 5.0, "table_bytes": 3 << 20, "evicted_rows": 2}
    totals = {"memory_bytes": 7 << 20, "changes": 4, "pulled_rows_per_s": 10, "pushed_rows_per_s": 20,
              "publish_lag_seconds": 1.25}  # fmt: skip
    (tmp_path / "server.2.0.json").write_text(json.dumps({"tables": {"users": table}, "totals": totals}))
    text = job_parts(made_view(tmp_path))["servers"]
    for shown in ("server 2", "users", ">5<", "3 MiB", ">2<", "7 MiB, 4 changes, 10 rows/s pulled, 20 rows/s pushed, "
                  "1.2 s behind the sink"):  # fmt: skip
        assert shown in text
