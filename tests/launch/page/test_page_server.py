"""Who may read the page, what is answered, how fast with 1,000 ranks, and what a browser makes of it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.errors import LaunchError
from fleet.launch.page import job_view
from fleet.launch.page.job_view import JobView
from fleet.launch.page.page_server import HOST, PageServer
from fleet.launch.processes.worker_file import STEP
from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.paged import ask, bearer, made_process, made_view, served_page, worker_record


@pytest.fixture
def page(tmp_path: Path) -> Iterator[PageServer]:
    """The page of a job with two workers."""
    view = made_view(tmp_path)
    view.begin("h", "node 0 of 1")
    for rank in range(2):
        view.started(*made_process(tmp_path, rank, 3))
    with served_page(view) as made:
        yield made


PATHS = ("/", "/process/worker.0", "/events", "/page.css", "/page.js", "/nothing")


def test_without_the_token_nothing_is_answered(page: PageServer) -> None:
    """Acceptance 2: no request without the token is answered."""
    wrong = {"Authorization": "Bearer wrong", "Cookie": f"{page.cookie}=wrong"}
    for path in PATHS:
        for headers in ({}, wrong, {"Cookie": f"other={page.token}"}, {"Cookie": "\x01=;;"}):
            status, _, text = ask(page, path, headers)
            assert (status, "needs the token" in text) == (403, True)
            assert page.token not in text
        assert ask(page, f"{path}?token=wrong", {})[0] == 403
    assert ask(page, "/process/worker.0/stacks", {}, "POST")[0] == 403
    assert ask(page, "/", {}, "PUT")[0] == 501


def test_the_token_becomes_a_cookie(page: PageServer) -> None:
    status, headers, _ = ask(page, f"/process/worker.1?token={page.token}", {})
    assert (status, headers["location"]) == (303, "/process/worker.1")
    assert ask(page, f"//evil.example/?token={page.token}", {})[1]["location"] == "/"
    cookie = headers["set-cookie"]
    assert cookie.endswith("; Path=/; HttpOnly; SameSite=Lax")
    status, headers, text = ask(page, "/", {"Cookie": f"theme=dark; {cookie.partition(';')[0]}"})
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["cache-control"] == "no-store"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "worker 1" in text
    assert page.token not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", ""])
def test_other_names_are_refused(page: PageServer, host: str) -> None:
    status, _, text = ask(page, "/", {**bearer(page), "Host": host})
    assert (status, text) == (403, "The page is served as 127.0.0.1 or localhost only.\n")


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:9000", "[::1]:9000"])
def test_ends_of_tunnels_are_served(page: PageServer, host: str) -> None:
    assert ask(page, "/", {**bearer(page), "Host": host})[0] == 200


def test_pages(page: PageServer) -> None:
    found = {path: ask(page, path)[0] for path in PATHS if path != "/events"}
    assert found == {"/": 200, "/process/worker.0": 200, "/page.css": 200, "/page.js": 200, "/nothing": 404}
    assert ask(page, "/process/worker.7")[0] == 404
    assert ask(page, "/events?process=worker.7")[0] == 404
    assert ask(page, "/process/../../etc/passwd")[0] == 404


def test_stacks_are_asked_for_from_this_site_only(page: PageServer) -> None:
    path = "/process/worker.0/stacks"
    here = {**bearer(page), "Host": "localhost:1", "Origin": "http://localhost:1"}
    assert ask(page, path, {**here, "Origin": "http://evil.example"}, "POST")[0] == 403
    page.view.requests.ask = lambda name, limit_s=1.0: f"stacks of {name}"  # type: ignore[method-assign]
    status, _, text = ask(page, path, here, "POST")
    assert (status, "<pre>stacks of worker 0</pre>" in text) == (200, True)
    assert ask(page, path)[0] == 404


def events(page: PageServer, query: str = "") -> Iterator[dict[str, str]]:
    """Yields what the page sends."""
    connection = http.client.HTTPConnection(HOST, page.port, timeout=60)
    connection.request("GET", f"/events{query}", headers=bearer(page))
    answer = connection.getresponse()
    assert answer.getheader("Content-Type", "").startswith("text/event-stream")
    while line := answer.readline():
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    connection.close()


def test_changes_are_sent_until_the_job_ends(tmp_path: Path) -> None:
    view = made_view(tmp_path)
    view.begin("h", "node 0 of 1")
    process, file = made_process(tmp_path, 0, 3)
    assert file is not None
    view.started(process, file)
    with served_page(view) as page:
        found = events(page)
        assert {"summary", "processes"} <= set(next(found))
        file.words[STEP] = 4
        rows = next(news for news in found if "row-worker.0" in news)
        assert ">4<" in rows["row-worker.0"]
        view.ended(0)
        closing = threading.Thread(target=page.close)
        closing.start()
        assert "ended with exit code 0" in [news for news in found if "summary" in news][-1]["summary"]
        closing.join(60)
        assert not closing.is_alive()
        page.close = lambda: None  # type: ignore[method-assign]


def test_a_caller_that_says_nothing_keeps_nobody_waiting(page: PageServer) -> None:
    with socket.create_connection((HOST, page.port)):
        assert ask(page)[0] == 200


def test_callers_without_the_token_shut_nobody_out(page: PageServer) -> None:
    silent = [socket.create_connection((HOST, page.port)) for _ in range(100)]  # more than are answered at a time
    assert ask(page)[0] == 200
    assert silent[0].recv(1) == b""  # the oldest made room
    for one in silent:
        one.close()


def test_a_taken_port_is_named(page: PageServer, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=rf"--page={page.port}: .*Address already in use.*--page=0"):
        PageServer(made_view(tmp_path), page.port)


def thousand(folder: Path) -> JobView:
    """The view of a job with 1,000 workers on this node."""
    view = made_view(folder)
    view.begin("h", "node 0 of 1")
    values = {f"time/{name}_ms": 1.5 for name in ("step", "data", "forward", "backward", "exchange", "update")}
    process, file = made_process(folder, 0, 100)
    assert file is not None
    words = list(file.words)  # 1,000 files that are mapped take more descriptors than a process may have
    file.close()
    for rank in range(1000):
        stand_in: Any = SimpleNamespace(words=words[:STEP] + [100 + rank % 7] + words[STEP + 1 :])
        spec = replace(process.spec, index=rank)
        view.started(SimpleNamespace(**{**vars(process), "spec": spec, "name": f"worker {rank}"}), stand_in)  # type: ignore[arg-type]
        worker_record(folder, rank, 100, loss=rank / 7, **values)
    lines = (json.dumps({"step": i, "values": {"loss": 1 / (i + 1), **values}}) for i in range(5000))
    (folder / "curves.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return view


def test_a_thousand_ranks_are_answered_within_100_ms(tmp_path: Path) -> None:
    """Acceptance 2. The median of 5; by processor time, because other tests share the cores."""
    with served_page(thousand(tmp_path)) as page:
        assert ask(page)[2].count("<tr id=") == 1000
        times = []
        for _ in range(5):
            time.sleep(job_view._FRESH_S)  # so that the processes are looked at anew
            began = time.process_time()
            assert ask(page)[0] == 200
            times.append(time.process_time() - began)
    print("answers in ms:", [round(1e3 * one) for one in times])
    assert statistics.median(times) < 0.1 * (2 if os.environ.get("PYTEST_XDIST_WORKER") else 1)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_takes_the_token_and_the_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link, the cookie, the policy, rows that the script replaces, the button, and the end of the launcher."""
    monkeypatch.setattr(job_view, "_FRESH_S", 0.0)
    view = made_view(tmp_path)
    view.begin("h", "node 0 of 1")
    process, file = made_process(tmp_path, 0, 3)
    assert file is not None
    view.started(process, file)
    view.requests.ask = lambda name, limit_s=1.0: f"<stacks of {name}>"  # type: ignore[method-assign]
    with Browser(tmp_path / "browser") as browser:
        with served_page(view) as page:
            browser.open(f"{page.address}?token={page.token}")
            browser.wait_for('document.getElementById("row-worker.0") !== null')
            assert browser.value("location.href") == page.address
            file.words[STEP] = 12345
            browser.wait_for('document.getElementById("row-worker.0").textContent.includes("12345")')
            browser.value('document.querySelector("#processes a").click()')
            browser.wait_for('document.querySelector("#stacks button") !== null')
            browser.value('document.querySelector("#stacks button").click()')
            browser.wait_for('document.querySelector("#stacks pre") !== null')
            assert browser.value('document.querySelector("#stacks pre").textContent') == "<stacks of worker 0>"
            file.words[STEP] = 23456
            browser.wait_for('document.getElementById("summary").textContent.includes("step 23456")')
            assert browser.value('document.querySelector("#stacks pre").textContent') == "<stacks of worker 0>"
            assert not browser.value('document.body.classList.contains("lost")')
            for width, scheme in ((1200, "light"), (390, "dark")):
                browser.set_screen(width, 900, scheme)
                assert browser.value("document.documentElement.scrollWidth") <= width
                browser.screenshot(tmp_path / f"{scheme}.png")
                assert (tmp_path / f"{scheme}.png").stat().st_size > 5000
            assert browser.console == []
        browser.wait_for('document.body.classList.contains("lost")')
