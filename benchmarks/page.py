"""What the page of the job (``--page``) takes: answers, the launcher's processor time, and the workers' steps.

    python benchmarks/page.py          # a minute

Pages of 2 and of 1,000 made-up workers, whose numbers move and whose files are as workers write them: the time of an
answer, and the processor time of the launcher's process while a browser follows the changes. A worker's part: the
processor time of writing 12 values a step, 20 steps a second.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _table import markdown  # noqa: E402

from fleet.launch.page.job_view import JobFacts, JobView  # noqa: E402
from fleet.launch.page.page_server import HOST, PageServer  # noqa: E402
from fleet.launch.plan.records import ProcessSpec  # noqa: E402
from fleet.launch.processes.worker_file import BEAT_NS, PID, STEP  # noqa: E402
from fleet.trackers.page_trackers import CurvePage, RankPage, write_record  # noqa: E402
from fleet.trackers.tracker import RunInfo  # noqa: E402

NAMES = ("loss", "lr", *(f"time/{part}_ms" for part in ("step", "data", "forward", "backward", "exchange", "update")),
         "rate/steps_per_s", "rate/samples_per_s", "memory/host_mib", "memory/device_peak_mib")  # fmt: skip
FOLLOW_S, STEPS, STEP_S = 15.0, 300, 0.05


def made_view(folder: Path, workers: int) -> tuple[JobView, list[Any]]:
    """Returns the view of a job, and the numbers that its workers share with the launcher."""
    view = JobView(JobFacts(job_id="bench", mode="collective", command="train.py", launcher_log=folder / "log"), folder)
    view.begin("127.0.0.1", "node 0 of 1")
    words = []
    for rank in range(workers):
        shared = [0] * 16
        shared[PID], shared[STEP], shared[BEAT_NS] = os.getpid(), 100, time.monotonic_ns()
        words.append(shared)
        write_record(folder / f"worker.{rank}.json", {"step": 100, "values": dict.fromkeys(NAMES, rank / 7)})
        spec = ProcessSpec(
            role="worker", index=rank, local_index=rank, command=(), environment={}, log_path=folder / "l"
        )
        process: Any = SimpleNamespace(name=f"worker {rank}", spec=spec, pid=os.getpid(), ended=None)
        file: Any = SimpleNamespace(words=shared)
        view.started(process, file)
    points = (json.dumps({"step": step, "values": dict.fromkeys(NAMES, 1 / (step + 1))}) for step in range(5000))
    (folder / "curves.jsonl").write_text("".join(f"{line}\n" for line in points))
    return view, words


def ask(page: PageServer, path: str) -> http.client.HTTPResponse:
    """Returns the answer to a request with the token."""
    connection = http.client.HTTPConnection(HOST, page.port)
    connection.request("GET", path, headers={"Authorization": f"Bearer {page.token}"})
    return connection.getresponse()


def measured(workers: int) -> tuple[list[float], int, float]:
    """Returns the milliseconds of answers, their bytes, and the share of a core that following changes takes."""
    with tempfile.TemporaryDirectory() as name:
        view, words = made_view(Path(name), workers)
        page = PageServer(view, 0)
        times, size = [], 0
        for _ in range(12):
            time.sleep(1.0)  # the processes are looked at anew
            began = time.perf_counter()
            size = len(ask(page, "/").read())
            times.append((time.perf_counter() - began) * 1e3)
        following = threading.Thread(target=lambda: ask(page, "/events").read())
        following.start()
        began, used = time.monotonic(), time.process_time()
        while time.monotonic() - began < FOLLOW_S:
            time.sleep(0.5)
            for shared in words:
                shared[STEP] += 10
                shared[BEAT_NS] = time.monotonic_ns()
        share = (time.process_time() - used) / FOLLOW_S
        page.close()
        following.join()
        return times, size, share


def worker_ms() -> float:
    """Returns the milliseconds of processor time that worker 0 spends on the page for each step."""
    with tempfile.TemporaryDirectory() as name:
        trackers = RankPage(Path(name)), CurvePage(Path(name))
        for tracker in trackers:
            tracker.start(RunInfo(name="run", project="bench", folder=Path(name)))
        used = 0.0
        for step in range(STEPS):
            time.sleep(STEP_S)
            began = time.process_time()
            for tracker in trackers:
                tracker.log(dict.fromkeys(NAMES, 1 / (step + 1)), step)
            used += time.process_time() - began
        return used / STEPS * 1e3


def main() -> None:
    """Prints the table."""
    rows = []
    for workers in (2, 1000):
        times, size, share = measured(workers)
        rows.append(
            [
                f"an answer, {workers} workers",
                f"{median(times):.1f} ms ({min(times):.1f}-{max(times):.1f}), {size >> 10} KiB",
            ]
        )
        rows.append([f"a browser that follows {workers} workers", f"{share * 100:.1f} % of a core"])
    spent = worker_ms()
    rows.append(["worker 0 for each step of 50 ms, 12 values", f"{spent:.3f} ms, {spent / STEP_S / 10:.2f} %"])
    print(markdown(["what", "takes"], rows))


if __name__ == "__main__":
    main()
