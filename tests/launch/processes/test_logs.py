"""The launcher's lines, log files, echo and tails (000-10, 000-16, 000-18)."""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path

import pytest

from fleet.launch.processes.logs import LaunchLog, LogEcho, mark_start, open_log, read_tail, write_all


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
