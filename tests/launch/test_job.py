"""Whole jobs on one node, with real processes: exit codes, first failure, signals, orphans, logs."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.errors import LaunchError
from fleet.launch import job as _job
from tests.helpers.launching import read
from tests.launch.launcher import ROOT, Launcher, wait_until_gone

SLEEP = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"


def rank_script(bad_rank: int, action: str) -> str:
    return f"""
import os, sys, time, signal
rank = int(os.environ["RANK"])
print("pid", os.getpid(), flush=True)
if rank == {bad_rank}:
    time.sleep(0.2)
    open("failed_at", "w").write(repr(time.time()))
    {action}
time.sleep(60 if {bad_rank} >= 0 else 0)
"""


def worker_pid(job: Launcher, rank: int) -> int:
    found = re.search(r"pid (\d+)", job.log(f"workerlog.{rank}"))
    assert found
    return int(found[1])


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), 9)", 137),
        ("os.kill(os.getpid(), 15)", 143),
        ("raise ValueError('boom')", 1),
        ("os._exit(255)", 255),
    ],
)
def test_exit_code_is_the_workers_own(tmp_path: Path, action: str, code: int) -> None:
    """Decision 10, C.6."""
    script = rank_script(1, action) if code else "import sys; sys.exit(0)"
    with Launcher(tmp_path, script, "--nproc_per_node=2") as job:
        assert job.wait() == code
        assert f"Exit code {code}" in job.stderr
        assert ("Pod completed" if code == 0 else "Pod failed") in job.stderr
        if code:
            assert f"Worker 1 of 2 (host 127.0.0.1, pid {worker_pid(job, 1)}) was the first to fail" in job.stderr


def test_the_first_failure_by_time_is_named(tmp_path: Path) -> None:
    """Study 2.4: rank 2 dies, the others fail right after it because of that."""
    script = """
import os, time, sys
rank = int(os.environ["RANK"])
flag = "gone"
if rank == 2:
    time.sleep(0.3)
    open(flag, "w").close()
    os.kill(os.getpid(), 9)
while not os.path.exists(flag):
    time.sleep(0.001)
time.sleep(0.02)
print("RuntimeError: Connection reset by peer", flush=True)
os.abort() if rank == 0 else sys.exit(1)
"""
    with Launcher(tmp_path, script, "--nproc_per_node=4") as job:
        assert job.wait() == 137
        assert "Worker 2 of 4" in job.stderr
        assert "signal SIGKILL (exit code 137)" in job.stderr
        assert "memory" in job.stderr


def test_a_victim_that_ends_before_its_cause_is_not_named(tmp_path: Path) -> None:
    """Rank 0 aborts on the lost connection while rank 1 still prints its traceback."""
    script = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep(0.3)
    print("[Gloo] Connection closed by peer [127.0.0.1]:1", flush=True)
    os.abort()
try:
    time.sleep(0.3)
    raise ValueError("the cause")
finally:
    time.sleep(0.08)
"""
    with Launcher(tmp_path, script, "--nproc_per_node=2") as job:
        assert job.wait() == 1
        assert "Worker 1 of 2" in job.stderr
        assert "ValueError: the cause" in job.stderr


def test_a_worker_that_ended_well_is_named_beside_the_one_that_waited_for_it(tmp_path: Path) -> None:
    """Uneven batches: worker 1 has none left and takes a while to exit, worker 0 loses its peer first."""
    script = """
import os, sys, time
time.sleep(0.2)
if os.environ["RANK"] == "0":
    print("RuntimeError: Connection closed by peer", flush=True)
    sys.exit(1)
time.sleep(0.8)
"""
    with Launcher(tmp_path, script, "--nproc_per_node=2") as job:
        assert job.wait() == 1
        assert "Worker 0 of 2" in job.stderr
        assert re.search(r"Worker 1 ended normally .* after [\d.]+ s; worker 0 still ran.*equally many", job.stderr)


def test_failure_ends_the_job_quickly_with_a_short_report(tmp_path: Path) -> None:
    """Study 2.4: 0.7 s, at most 30 lines, though a peer ignores SIGTERM and the traceback is long."""
    script = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
time.sleep(0.3)
def deep(n):
    return deep(n - 1) if n else int("x" * 2000)
try:
    deep(60)
except ValueError:
    import traceback
    traceback.print_exc()
    sys.stderr.flush()
    open("failed_at", "w").write(repr(time.time()))
    os._exit(3)
"""
    with Launcher(tmp_path, script, "--nproc_per_node=2") as job:
        assert job.wait() == 3
        took_s = time.time() - float((tmp_path / "failed_at").read_text())
        report = job.stderr[job.stderr.index("Pod failed") :].splitlines()
        assert len(report) <= 29
        assert report[1].endswith("Container failed !!!")
        assert re.match(r"Container rank 1 status failed cmd .* code 3 log log/workerlog.1", report[2])
        assert any("ERROR LOG DETAIL" in line for line in report)
        assert "ValueError" in report[-2]
        assert report[-1].endswith("Exit code 3")
        assert took_s < 1.5, "0.7 s on a quiet machine"


def test_report_shows_this_runs_lines_only(tmp_path: Path) -> None:
    """A process that starts again writes behind the lines of the one before; an old traceback is not the last one's."""
    script = """
import os, sys
if os.environ["FLEET_GENERATION"] == "0":
    raise KeyError("the first time")
sys.exit(4)
"""
    with Launcher(tmp_path, script, "--max_restart=1") as job:
        assert job.wait() == 4
        assert "KeyError: 'the first time'" in job.log()
        assert re.search(r"\nLAUNCH INFO .* worker 0 starts; what stands above is from before\n$", job.log())
        report = job.stderr[job.stderr.index("Pod failed") :]
        assert "KeyError" not in report


ORPHANS = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
q = subprocess.Popen(["sleep", "60"], env={})
print("pids", os.getpid(), p.pid, q.pid, flush=True)
time.sleep(60)
"""


def started_pids(job: Launcher, count: int) -> list[int]:
    pids = [job.process.pid]
    for i in range(count):
        pids += map(int, job.wait_for(r"pids ([\d ]+)\n", f"workerlog.{i}")[1].split())
    return pids


@pytest.mark.parametrize("ending", ["kill the launcher", "SIGTERM", "a worker fails"])
def test_nothing_is_left(tmp_path: Path, ending: str) -> None:
    """Study 2.4: no orphans within 1 s, a grandchild in a session of its own and one without the mark included."""
    with Launcher(tmp_path, ORPHANS, "--nproc_per_node=2") as job:
        pids = started_pids(job, 2)
        if ending == "kill the launcher":
            job.signal(signal.SIGKILL)
        elif ending == "SIGTERM":
            job.signal(signal.SIGTERM)
        else:
            os.kill(pids[1], signal.SIGKILL)
        left = wait_until_gone(pids, 1.0 if ending == "kill the launcher" else 2.0)
        assert left == []


def test_a_process_without_the_mark_survives(tmp_path: Path) -> None:
    """Only what belongs to the job is killed."""
    with Launcher(tmp_path / "a", SLEEP) as one, Launcher(tmp_path / "b", SLEEP) as other:
        first = int(one.wait_for(r"pid (\d+)")[1])
        second = int(other.wait_for(r"pid (\d+)")[1])
        one.signal(signal.SIGKILL)
        assert wait_until_gone([first], 1.0) == []
        time.sleep(0.3)
        os.kill(second, 0)
        other.signal(signal.SIGTERM)
        assert other.wait() == 143


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signal_to_the_launcher(tmp_path: Path, number: int, code: int) -> None:
    """C.6: SIGTERM to the children, 128 + signal, within a second."""
    script = """
import os, signal, sys, time
def stop(number, frame):
    print("asked to stop by", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("pid", os.getpid(), flush=True)
time.sleep(60)
"""
    with Launcher(tmp_path, script, "--nproc_per_node=2") as job:
        job.wait_for("pid", "workerlog.0")
        job.wait_for("pid", "workerlog.1")
        began = time.monotonic()
        job.signal(number)
        assert job.wait() == code
        assert time.monotonic() - began < 2.0
        assert "asked to stop by 15" in job.log("workerlog.1")
        assert f"Terminating with signal {int(number)}" in job.stderr
        assert "asked to stop by 15" in job.stdout, "the last lines are echoed"


STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
time.sleep(60)
"""


def test_worker_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    with Launcher(tmp_path, STUBBORN, "--shutdown_timeout=1") as job:
        pid = int(job.wait_for(r"pid (\d+)")[1])
        began = time.monotonic()
        job.signal(signal.SIGTERM)
        assert job.wait() == 143
        assert 0.9 < time.monotonic() - began < 3.0
        assert wait_until_gone([pid], 0.1) == []


def test_second_signal_cuts_the_grace_short(tmp_path: Path) -> None:
    with Launcher(tmp_path, STUBBORN, "--shutdown_timeout=30") as job:
        job.wait_for("pid")
        job.signal(signal.SIGINT)
        time.sleep(0.3)
        began = time.monotonic()
        job.signal(signal.SIGINT)
        assert job.wait() == 130
        assert time.monotonic() - began < 2.0


def test_sigterm_goes_to_the_worker_not_to_its_children(tmp_path: Path) -> None:
    """Requirement 4: a data-loader child is ended by its parent, in the parent's own order."""
    script = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time\\nsignal.signal(15, lambda *a: print('child got 15', flush=True))\\n"
    "print('child ready', flush=True)\\ntime.sleep(60)"])
def stop(number, frame):
    time.sleep(0.3)
    print("parent ends", flush=True)
    sys.exit(0)
signal.signal(15, stop)
time.sleep(60)
"""
    with Launcher(tmp_path, script) as job:
        job.wait_for("child ready")
        job.signal(signal.SIGTERM)
        assert job.wait() == 143
        assert "parent ends" in job.log()
        assert "child got 15" not in job.log()


def test_rank_0_is_echoed_and_the_rest_only_in_files(tmp_path: Path) -> None:
    """000-16; partial lines and bytes that are no text pass unchanged."""
    script = """
import os, sys, time
rank = os.environ["RANK"]
sys.stdout.buffer.write(b"rank " + rank.encode() + b" \\xff\\x00 bytes, no end of line")
sys.stdout.flush()
print("to stderr", rank, file=sys.stderr, flush=True)
time.sleep(0.2)
sys.stdout.write("last words")
"""
    with Launcher(tmp_path, script, "--nproc_per_node=2") as job:
        assert job.wait() == 0
        expected = (tmp_path / "log" / "workerlog.0").read_bytes()
        assert (tmp_path / "stdout").read_bytes() == expected
        assert expected.startswith(b"rank 0 \xff\x00 bytes, no end of line")
        assert expected.endswith(b"last words")
        assert "rank 1" in job.log("workerlog.1")


def test_echo_is_live(tmp_path: Path) -> None:
    script = "import time; print('first', time.time(), flush=True); time.sleep(30)"
    with Launcher(tmp_path, script) as job:
        printed = float(job.wait_for(r"first ([\d.]+)", "stdout")[1])
        assert time.time() - printed < 1.0
        job.signal(signal.SIGTERM)
        job.wait()


def test_log_files_are_those_of_the_last_job(tmp_path: Path) -> None:
    """000-14, 000-19; nobody else may read them. An earlier job's go to previous/, or with --log_overwrite away."""
    pods = []
    for flags, num_previous in ((), 0), ((), 1), (("--log_overwrite=True",), 1):
        with Launcher(tmp_path, "print('one line')", "--nproc_per_node=2", *flags) as job:
            assert job.wait() == 0
            assert job.log() == "one line\n"
        logs = tmp_path / "log"
        assert len([*(logs / "previous").glob("workerlog.1")]) == num_previous
        pods.append([path for path in logs.iterdir() if re.fullmatch(r"default\.[a-z]{6}\.log", path.name)])
        assert len(pods[-1]) == 1
        assert "127.0.0.1" in pods[-1][0].read_text()
    assert pods[0] != pods[1] != pods[2]
    for path in (tmp_path / "log").rglob("*"):
        assert path.is_dir() or stat.S_IMODE(path.stat().st_mode) & 0o027 == 0, path


def test_lines_of_a_good_job_in_order(tmp_path: Path) -> None:
    """000-10, 000-11."""
    with Launcher(tmp_path, "pass", "--nproc_per_node=2") as job:
        assert job.wait() == 0
    prefix = r"LAUNCH INFO \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
    wanted = [
        r"Job: default, mode collective, replicas 1\[1:1\], elastic False",
        r"Run Pod: ([a-z]{6}), replicas 2, status ready",
        r"Watching Pod: ([a-z]{6}), replicas 2, status running",
        "Pod completed",
        "Exit code 0",
    ]
    assert re.search("".join(f"{prefix}{line}\n" for line in wanted) + r"\Z", job.stderr)


def test_a_planted_secret_reaches_no_file(tmp_path: Path) -> None:
    """Study 5.4; decision 9. The worker does get it."""
    secret, job_secret = "planted-3f9c1d", "ab" * 32
    script = "import os; assert os.environ['MY_API_TOKEN'] and os.environ['FLEET_JOB_SECRET']; raise SystemExit(5)"
    env = {"MY_API_TOKEN": secret, "FLEET_JOB_SECRET": job_secret, "https_proxy": f"http://user:{secret}@127.0.0.1:1"}
    with Launcher(tmp_path, script, "--nproc_per_node=2", "--log_level=DEBUG", env=env) as job:
        assert job.wait() == 5
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert secret.encode() not in content, path
            assert job_secret.encode() not in content, path


def test_a_long_argument_delays_neither_the_start_nor_a_signal(tmp_path: Path) -> None:
    """Issue 10, Medium 8: the launcher looked for secrets in 40,000 characters for 107 s, and heard no SIGTERM."""
    script = "import time; print('runs', flush=True); time.sleep(60)"
    with Launcher(tmp_path, script, "--nproc_per_node=1", args=["a" * 120_000]) as job:
        job.wait_for("runs")
        job.signal(signal.SIGTERM)
        assert job.wait(10) == 143


def test_a_folder_of_another_launcher_with_this_pod_id_is_not_shared(tmp_path: Path) -> None:
    config = read()
    config = replace(config, pod=replace(config.pod, scratch_path=tmp_path))
    taken = pytest.raises(LaunchError, match=f"Another launcher of this job has the pod id {config.pod.id}")
    with taken, _job._scratch_folder(config):
        pass
    assert tmp_path.is_dir()


def test_the_secret_is_printed_on_a_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read("--nnodes=2")
    config = replace(config, pod=replace(config.pod, scratch_path=tmp_path))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert _job._secret_path(config) is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert _job._secret_path(replace(config, pod=replace(config.pod, secret_is_users=True))) is None
    path = _job._secret_path(config)
    assert path is not None
    assert (path.read_text(), path.stat().st_mode & 0o777) == (f"{config.pod.secret}\n", 0o600)


def test_worker_environment(tmp_path: Path) -> None:
    """Requirement 1: inherited, without proxies, marked; standard input is empty."""
    script = """
import os, sys
assert "http_proxy" not in os.environ, "proxy"
assert os.environ["KEPT"] == "yes"
assert len(os.environ["FLEET_POD"]) >= 8
assert sys.stdin.read() == ""
assert os.getpgrp() == os.getpid() == os.getsid(0)
print(os.getcwd())
"""
    with Launcher(tmp_path, script, env={"http_proxy": "http://127.0.0.1:1", "KEPT": "yes"}) as job:
        assert job.wait() == 0, job.log()
        assert job.log().strip() == str(tmp_path)


@pytest.mark.parametrize("one_place", [True, False])
def test_a_traceback_is_printed_once(tmp_path: Path, one_place: bool) -> None:
    """The launcher repeats the last words of worker 0 only where its standard error lacks that worker's output."""
    (tmp_path / "train.py").write_text("raise ValueError('no such data')\n")
    command = [sys.executable, "-m", "fleet.launch", "--nproc_per_node=1", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    errors = subprocess.STDOUT if one_place else subprocess.PIPE
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert done.returncode == 1
    assert done.stdout.count("Traceback") == 1
    assert done.stdout.count("ERROR LOG DETAIL") == 0
    assert (done.stderr or "").count("Traceback") == (0 if one_place else 1)
    assert "was the first to fail: exit code 1" in (done.stdout if one_place else done.stderr)
    assert (tmp_path / "log" / "workerlog.0").read_text().count("Traceback") == 1
