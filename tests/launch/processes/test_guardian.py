"""The guardian kills what carries the mark, and nothing else (study 2.4: 0 orphans)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.launch.processes.guardian import MARK_VARIABLE, Guardian, kill_marked, make_mark, marked_processes
from tests.launch.launcher import is_running, wait_until_gone


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for child in started:
        child.kill()
        child.wait()


def sleeper(mark: str | None, *, group: bool = False) -> subprocess.Popen[bytes]:
    env = {} if mark is None else {MARK_VARIABLE: mark}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env, start_new_session=group)
    deadline = time.monotonic() + 5
    while b"sleep" not in Path(f"/proc/{child.pid}/cmdline").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.005)
    return child


def test_make_mark() -> None:
    assert make_mark("abc", None) == "abc"
    assert make_mark("abc", "outer") == "outer,abc"
    assert len(make_mark("", None)) == 16


def test_only_marked_processes_are_found_and_killed(children: list[subprocess.Popen[bytes]]) -> None:
    own, inner, other, longer, none = (sleeper(mark) for mark in ("job1", "job1,in", "job2", "job11", None))
    children += [own, inner, other, longer, none]
    assert sorted(marked_processes("job1")) == sorted([own.pid, inner.pid])
    assert marked_processes("job1,in") == [inner.pid]
    assert kill_marked("job1")
    assert own.wait(2) == inner.wait(2) == -9
    assert other.poll() is longer.poll() is none.poll() is None


def test_kill_marked_catches_processes_that_keep_forking(children: list[subprocess.Popen[bytes]]) -> None:
    """One scan of /proc can miss a child that is forked while it reads; the sweep looks again."""
    script = """
import os, time
while True:
    if not os.fork():
        os.setsid()
        time.sleep(20)
    time.sleep(0.004)
"""
    children.append(subprocess.Popen([sys.executable, "-c", script], env={MARK_VARIABLE: "forker"}))
    deadline = time.monotonic() + 5
    while len(marked_processes("forker")) < 20 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert kill_marked("forker", limit_s=5)
    time.sleep(0.1)
    assert marked_processes("forker") == []


def launcher_child(mark: str, group_pid: int, *, dismiss: bool) -> int:
    """Forks a stand-in for the launcher, which starts a guardian and is killed; returns the guardian's id."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        guardian = Guardian.start(mark)
        guardian.add_group(group_pid)
        os.write(write_fd, str(guardian._pid).encode())
        if dismiss:
            guardian.dismiss()
        os.kill(os.getpid(), 9)
    os.close(write_fd)
    guardian_pid = int(os.read(read_fd, 32))
    os.close(read_fd)
    os.waitpid(pid, 0)
    return guardian_pid


def test_launcher_killed(children: list[subprocess.Popen[bytes]]) -> None:
    marked, grouped, stranger = sleeper("job3", group=True), sleeper(None, group=True), sleeper("job4", group=True)
    children += [marked, grouped, stranger]
    guardian = launcher_child("job3", grouped.pid, dismiss=False)
    assert marked.wait(1.0) == -9
    assert grouped.wait(1.0) == -9
    assert stranger.poll() is None
    assert wait_until_gone([guardian], 1.0) == []


def test_dismissed_guardian_kills_nothing(children: list[subprocess.Popen[bytes]]) -> None:
    marked = sleeper("job5", group=True)
    children.append(marked)
    guardian = launcher_child("job5", marked.pid, dismiss=True)
    assert wait_until_gone([guardian], 1.0) == []
    assert is_running(marked.pid)


def test_guardian_holds_no_descriptor_of_the_launcher() -> None:
    """A reader of the launcher's output must see its end when the launcher is gone."""
    read_fd, write_fd = os.pipe()
    guardian = Guardian.start("job6")
    try:
        deadline = time.monotonic() + 2
        fds: list[str] = []
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):  # one that is closed between the two looks
                fds = [os.readlink(f"/proc/{guardian._pid}/fd/{n}") for n in os.listdir(f"/proc/{guardian._pid}/fd")]
                if len(fds) == 4:
                    break
            time.sleep(0.01)
        assert sorted(fds)[:3] == ["/dev/null"] * 3
        assert len(fds) == 4
    finally:
        guardian.dismiss()
        os.close(read_fd)
        os.close(write_fd)
