"""The launcher's lines, log files, echo and tails (000-10, 000-16, 000-18)."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet.errors import LaunchError
from fleet.launch.processes.logs import LaunchLog, LogEcho, mark_start, open_log, own_log_folder, read_tail, write_all
from tests.launch.launcher import Launcher


def test_line_format_and_levels(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """000-10: prefix with date and milliseconds; 000-18: DEBUG shows more."""
    log = LaunchLog("INFO")
    log.info("one")
    log.debug("hidden")
    log.open_file(tmp_path / "default.abcdef.log")
    log.warning("two")
    log.file_only("three")
    log.plain("four")
    log.close()
    log.error("five")
    prefix = r"LAUNCH %s \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} %s\n"
    err = capfd.readouterr().err
    expected = prefix % ("INFO", "one") + prefix % ("WARNING", "two") + "four\n" + prefix % ("ERROR", "five")
    assert re.fullmatch(expected, err)
    text = (tmp_path / "default.abcdef.log").read_text()
    expected = prefix % ("INFO", "one") + prefix % ("WARNING", "two") + prefix % ("INFO", "three") + "four\n"
    assert re.fullmatch(expected, text), "what was said before the file was open is in it too"
    LaunchLog("DEBUG").debug("shown")
    assert "shown" in capfd.readouterr().err


def test_a_start_is_marked_behind_other_output_only(tmp_path: Path) -> None:
    path = tmp_path / "workerlog.0"
    for _ in range(2):
        fd = open_log(path)
        mark_start(fd, "worker 3")
        write_all(fd, b"said")
        os.close(fd)
    assert re.fullmatch(
        r"said\nLAUNCH INFO [\d :,-]+ worker 3 starts; what stands above is from before\nsaid", path.read_text()
    )


def test_the_opening_takes_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LaunchLog()
    log.open_file(tmp_path / "pod.log")
    log.detail("detail")
    log.count_shown(2)
    log.warning("first")
    for text in ("second", "third", "fourth"):
        log.opening(text, room=2 if text == "third" else 1)
    log.close()
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["first", "second", "fourth"]
    everything = ["detail", "first", "second", "third", "fourth"]
    assert [line.split()[-1] for line in (tmp_path / "pod.log").read_text().splitlines()] == everything
    for verbose in (LaunchLog("DEBUG"), LaunchLog(verbose=True)):
        verbose.count_shown(9)
        verbose.detail("detail")
        verbose.opening("line")
        assert len(capsys.readouterr().err.splitlines()) == 2
    LaunchLog("WARNING", verbose=True).opening("line")
    assert capsys.readouterr().err == ""


def test_open_log(tmp_path: Path) -> None:
    path = tmp_path / "new" / "workerlog.0"
    for text in "ab":
        fd = open_log(path)
        write_all(fd, text.encode())
        os.close(fd)
    assert path.read_text() == "ab"
    assert stat.S_IMODE(path.stat().st_mode) & 0o137 == 0


def test_read_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old run\n" + b"x" * 100 + b"\xff end")
    assert read_tail(path, limit_bytes=5) == "\\xff end"
    assert read_tail(path, from_bytes=8).startswith("xxx")
    assert read_tail(path, from_bytes=10_000) == ""
    assert read_tail(tmp_path / "missing") == ""


def drained(fd: int) -> bytes:
    os.set_blocking(fd, False)
    data = b""
    while True:
        try:
            block = os.read(fd, 1 << 20)
        except BlockingIOError:
            return data
        if not block:
            return data
        data += block


def test_echo_copies_every_byte_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old")
    read_fd, write_fd = os.pipe()
    with path.open("ab", buffering=0) as file, LogEcho(path, from_bytes=3, output_fd=write_fd):
        file.write(b"partial")
        deadline = time.monotonic() + 2
        seen = b""
        while not seen and time.monotonic() < deadline:
            seen += drained(read_fd)
        assert seen == b"partial"
        file.write(b"\x00\xff last")
    assert drained(read_fd) == b"\x00\xff last"
    os.close(read_fd)
    os.close(write_fd)


def test_echo_survives_a_reader_that_leaves(tmp_path: Path) -> None:
    """``| head``: the job goes on."""
    path = tmp_path / "log"
    path.write_bytes(b"x" * 1000)
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with LogEcho(path, from_bytes=0, output_fd=write_fd):
        pass
    os.close(write_fd)


def test_echo_does_not_wait_for_ever_for_a_stuck_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.launch.processes.logs._STUCK_READER_S", 0.3)
    path = tmp_path / "log"
    path.write_bytes(b"x" * (1 << 20))
    read_fd, write_fd = os.pipe()
    began = time.monotonic()
    echo = LogEcho(path, from_bytes=0, output_fd=write_fd)
    echo.finish()
    assert 0.2 < time.monotonic() - began < 3
    os.close(read_fd)  # the thread ends with a broken pipe
    echo._thread.join(5)
    os.close(write_fd)


OLD = {
    "workerlog.0": "w",
    "serverlog.12": "s",
    "envlog.0": "e",
    "backup_env.server.0.json": "b",
    "endpoints.log": "e",
    "job.gpu.log": "g",
    "job.abcdef.log": "LAUNCH INFO x",
}
USERS = {"mine.output.log": "mine", "workerlog.txt": "mine", "notes.log": "mine"}


def fill(folder: Path, text: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {**OLD, **USERS}.items():
        (folder / name).write_text(content + text)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}


@pytest.mark.parametrize("keep", [True, False])
def test_the_profile_of_an_earlier_job_goes_where_its_logs_go(tmp_path: Path, keep: bool) -> None:
    own = {"trace.json", "table.txt", "rank0.steps.json", "rank3.trace.json"}
    for folder in (tmp_path, tmp_path / "profile"):
        folder.mkdir(exist_ok=True)
        for name in ("trace.json", "table.txt", "mine.txt"):
            (folder / name).touch()
    for name in own:
        (tmp_path / "profile" / name).touch()
    with own_log_folder(tmp_path, keep=keep):
        assert names(tmp_path) == {"trace.json", "table.txt", "mine.txt"}, "these are the user's"
        assert names(tmp_path / "profile") == {"mine.txt"}
    if keep:
        assert names(tmp_path / "previous" / "profile") == own
        (tmp_path / "workerlog.1").touch()
        with own_log_folder(tmp_path, keep=True):
            assert names(tmp_path / "previous" / "profile") == set(), "the job before had none"


@pytest.mark.parametrize("keep", [True, False])
def test_what_an_earlier_job_left_is_moved_or_removed(tmp_path: Path, keep: bool) -> None:
    fill(tmp_path)
    (tmp_path / "workerlog.7").symlink_to(tmp_path / "notes.log")
    with own_log_folder(tmp_path, keep=keep):
        assert names(tmp_path) == {*USERS, "workerlog.7"}
    assert (tmp_path / "previous").exists() == keep
    if keep:
        assert names(tmp_path / "previous") == {*OLD}
        (tmp_path / "previous" / "kept.txt").touch()
        (tmp_path / "workerlog.1").touch()
        with own_log_folder(tmp_path, keep=True):
            assert names(tmp_path / "previous") == {"workerlog.1", "kept.txt"}, "one job, and what is not a job's"


def test_a_folder_that_another_launcher_uses_is_left_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with own_log_folder(log, keep=True) as first:
        fill(log)
        for keep in (True, False):
            with own_log_folder(log, keep=keep) as second, own_log_folder(log, keep=keep) as third:
                assert (first, second, third) == (log, log / "launcher-2", log / "launcher-3")
                assert names(log) == {*OLD, *USERS}
                fill(second)
        assert names(log / "launcher-2") == {*OLD, *USERS}
        with own_log_folder(log, keep=True) as second:
            assert names(second) == {*USERS}
        (log / "launcher-3").rename(log / "launcher-2" / "away")
        (log / "launcher-2").rename(log / "mine")
        (log / "launcher-2").symlink_to(log / "mine")
        with pytest.raises(LaunchError, match="launcher-2: a symbolic link"), own_log_folder(log, keep=True):
            pass
    with own_log_folder(log, keep=True) as alone:
        assert alone == log
        assert names(log) == {*USERS}


def test_two_jobs_in_one_folder_do_not_write_into_each_others_logs(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nprint('job', sys.argv[1], flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)"
    )
    with Launcher(tmp_path, script, args=["one"]) as one:
        one.wait_for("job one")
        alone = subprocess.Popen(
            [sys.executable, "-m", "fleet.launch", "train.py", "two"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert alone.stdout is not None
        assert alone.stdout.readline() == "job two\n"
        (tmp_path / "go").touch()
        _, stderr = alone.communicate(timeout=60)
        assert (alone.returncode, one.wait()) == (0, 0)
    assert "Another launcher writes its logs in log, so those of this one are in log/launcher-2." in stderr
    assert "Another launcher" not in one.stderr
    assert (tmp_path / "log" / "workerlog.0").read_text() == "job one\n"
    assert (tmp_path / "log" / "launcher-2" / "workerlog.0").read_text() == "job two\n"


def test_without_locks_nothing_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with own_log_folder(tmp_path, keep=True):
        assert names(tmp_path) == {*OLD, *USERS}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(".launchers", "link"), ("endpoints.log", "link"), ("workerlog.1", "fifo"), ("workerlog.1", "fifo that is read")],
)
def test_what_others_have_put_there_is_neither_written_nor_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / "log" / name
    victim.write_text("precious")
    path.parent.mkdir()
    path.symlink_to(victim) if kind == "link" else os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind == "fifo that is read" else -1
    script = "open('started', 'w')"
    with Launcher(tmp_path, script, "--nproc_per_node=2", "--log_dir=log") as launcher:
        assert launcher.wait() == 1
        found = "a symbolic link" if kind == "link" else "not a regular file"
        assert f"{path.name}: {found}" in launcher.stderr
        assert "Traceback" not in launcher.stderr
        assert not (tmp_path / "started").exists()
    if reader >= 0:
        os.close(reader)
    assert victim.read_text() == "precious"


def test_a_link_named_previous_is_refused_and_one_that_is_the_folder_is_not(tmp_path: Path) -> None:
    elsewhere, log = tmp_path / "elsewhere", tmp_path / "log"
    fill(elsewhere)
    fill(tmp_path / "real")
    log.symlink_to(tmp_path / "real")
    (log / "previous").symlink_to(elsewhere)
    with pytest.raises(LaunchError, match="previous: a symbolic link"), own_log_folder(log, keep=True):
        pass
    assert names(elsewhere) == {*OLD, *USERS}
    (log / "previous").unlink()
    with own_log_folder(log, keep=True):
        assert names(log / "previous") == {*OLD}
