"""Views and pages of made-up jobs, and requests to them."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fleet.launch.page.job_view import JobFacts, JobView
from fleet.launch.page.page_server import HOST, PageServer
from fleet.launch.plan.records import ProcessExit, ProcessSpec
from fleet.launch.processes.worker_file import BEAT_NS, PID, STEP, WorkerFile

__all__ = ["ask", "made_end", "made_process", "made_view", "served_page", "worker_record"]


def made_view(folder: Path, command: str = "train.py") -> JobView:
    """Returns the view of a job whose processes write to ``folder``."""
    folder.mkdir(exist_ok=True)
    return JobView(JobFacts(job_id="toy", mode="collective", command=command, launcher_log=folder / "toy.log"), folder)


def made_process(folder: Path, rank: int, step: int | None = 0, role: str = "worker") -> tuple[Any, WorkerFile | None]:
    """Returns what stands for a process of this test's own number, and its file; without ``step`` it has not begun."""
    spec = ProcessSpec(
        role=role, index=rank, local_index=rank, command=(), environment={}, log_path=folder / f"{role}log.{rank}"
    )
    process = SimpleNamespace(spec=spec, pid=os.getpid(), ended=None, name=f"{role} {rank}")
    if role != "worker":
        return process, None
    file = WorkerFile.create(folder / f"file.{rank}")
    if step is not None:
        file.begin(0)
        file.words[STEP] = step
    assert file.words[PID] == (0 if step is None else os.getpid())
    assert step is None or file.words[BEAT_NS] > 0
    return process, file


def made_end(process: Any, code: int) -> ProcessExit:
    """Ends ``process`` with ``code``."""
    process.ended = ProcessExit(
        spec=process.spec, pid=process.pid, exit_code=code, signal_name=None, lifetime_s=1.0, ended_at=0.0
    )
    return process.ended  # type: ignore[no-any-return]


def worker_record(folder: Path, rank: int, step: int = 0, checkpoints: Path | None = None, **values: float) -> None:
    """Writes what a worker writes."""
    found = {"step": step, "values": values, "checkpoints": None if checkpoints is None else str(checkpoints)}
    (folder / f"worker.{rank}.json").write_text(json.dumps(found))


@contextmanager
def served_page(view: JobView) -> Iterator[PageServer]:
    """Serves ``view``."""
    page = PageServer(view, 0)
    try:
        yield page
    finally:
        page.close()


def ask(
    page: PageServer, path: str = "/", headers: Mapping[str, str] | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], str]:
    """Returns status, headers and body of an answer; ``headers`` None: with the token."""
    connection = http.client.HTTPConnection(HOST, page.port, timeout=60)
    try:
        connection.request(method, path, headers=headers or {} if headers is not None else bearer(page))
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def bearer(page: PageServer) -> dict[str, str]:
    """Returns the header that holds the token."""
    return {"Authorization": f"Bearer {page.token}"}
