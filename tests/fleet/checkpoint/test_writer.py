"""The process that writes: what it is asked, how it ends, and what its trainer hears of it."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fleet
from fleet.checkpoint.commit import Share
from fleet.checkpoint.data_files import FileBlock
from fleet.checkpoint.writer import Writer
from fleet.errors import CheckpointError
from tests.helpers.ready_python import run_python

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = [FileBlock("m/a", "float32", (2, 2), (0, 0), (2, 2)), FileBlock("m/b", "uint8", (3,), (0,), (3,))]
BYTES = bytes(range(19))


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.close()


def share(token: str = "0a", rank: int = 0, world_size: int = 1) -> Share:
    values = {"#objects": {"m": ["module", ""]}}
    return Share(token, rank, world_size, BLOCKS, values)


def begin(writer: Writer, path: Path, what: Share) -> None:
    writer.buffer(len(BYTES))[: len(BYTES)] = BYTES
    writer.start(f"{path}", what)


def process_of(writer: Writer) -> int:
    assert writer._process is not None
    return writer._process.pid


BEGINNING = """
import os, sys, signal, time, torch
import fleet, fleet.checkpoint.writer
from fleet.checkpoint import save, load, wait

state = {"m": torch.nn.Linear(600, 600), "e": 1}
path = sys.argv[1]
"""


def run_script(text: str, path: str) -> subprocess.CompletedProcess[str]:
    """Runs a script that saves; every one of them must end by itself."""
    return run_python(BEGINNING + textwrap.dedent(text), path, cwd=ROOT, warnings=["error::ResourceWarning"])


def test_what_lies_in_the_buffer_is_written(tmp_path: Path, writer: Writer) -> None:
    begin(writer, tmp_path / "c", share())
    assert writer.is_busy
    assert writer.finish() == ""
    found = fleet.checkpoint.load(tmp_path / "c")["m"]
    assert found["a"].tolist() == torch.frombuffer(bytearray(BYTES[:16]), dtype=torch.float32).view(2, 2).tolist()
    assert found["b"].tolist() == [16, 17, 18]


def test_a_second_save_uses_the_same_process_and_the_buffer_grows(tmp_path: Path, writer: Writer) -> None:
    begin(writer, tmp_path / "c", share())
    pid = process_of(writer)
    assert writer.finish() == ""
    assert len(writer.buffer(3 << 20)) == 3 << 20
    begin(writer, tmp_path / "c", share("0b"))
    assert (writer.finish(), process_of(writer)) == ("", pid)
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_the_buffer_belongs_to_the_save_under_way(tmp_path: Path, writer: Writer) -> None:
    begin(writer, tmp_path / "c", share())
    with pytest.raises(AssertionError, match="under way"):
        writer.buffer(4)


def test_an_error_comes_back_once(tmp_path: Path, writer: Writer) -> None:
    (tmp_path / "c").write_text("a file")
    begin(writer, tmp_path / "c", share())
    assert "was not written" in writer.finish()
    assert writer.finish() == ""
    begin(writer, tmp_path / "d", share())
    assert writer.finish() == ""


def test_failed_does_not_wait(tmp_path: Path, writer: Writer) -> None:
    begin(writer, tmp_path / "c", share(world_size=2))  # whose second worker never comes
    began = time.monotonic()
    assert writer.failed() == ""
    assert time.monotonic() - began < 5.0
    assert writer.is_busy
    os.kill(process_of(writer), signal.SIGKILL)
    assert "killed by signal 9" in writer.finish()


def test_a_killed_writer_is_said_and_replaced(tmp_path: Path, writer: Writer) -> None:
    begin(writer, tmp_path / "c", share(world_size=2))
    os.kill(process_of(writer), signal.SIGKILL)
    assert "killed by signal 9. The checkpoint before it is whole" in writer.finish()
    begin(writer, tmp_path / "c", share("0b"))
    assert writer.finish() == ""


def test_a_writer_that_died_between_two_saves_is_replaced(tmp_path: Path, writer: Writer) -> None:
    begin(writer, tmp_path / "c", share())
    assert writer.finish() == ""
    os.kill(process_of(writer), signal.SIGKILL)
    os.waitid(os.P_PID, process_of(writer), os.WEXITED | os.WNOWAIT)
    begin(writer, tmp_path / "c", share("0b"))
    assert writer.finish() == ""


def test_worker_0_hears_that_the_writer_of_another_worker_was_killed(tmp_path: Path, writer: Writer) -> None:
    other = Writer()
    (tmp_path / "c").mkdir()
    begin(other, tmp_path / "c", share(rank=1, world_size=2))
    os.kill(process_of(other), signal.SIGKILL)
    first = other.finish()
    if not first:  # it was done before
        pytest.skip("the writer was faster than the signal")
    begin(writer, tmp_path / "c", share(world_size=2))
    assert "worker 1: the process that writes it was killed by signal 9" in writer.finish()


def test_a_disk_that_is_full_is_said(tmp_path: Path) -> None:
    done = run_script(
        """
        import resource
        save(path, state, asynchronous=True)
        wait()
        for pid in (os.getpid(), fleet.checkpoint.writer.own_writer()._process.pid):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        save(path, {**state, 'e': 2}, asynchronous=True)
        try:
            wait()
        except fleet.errors.CheckpointError as error:
            print(error)
        try:
            save(path, {**state, 'e': 3})
        except fleet.errors.CheckpointError as error:
            print(error)
        print(load(path)['e'], len(os.listdir(path)))
        """,
        f"{tmp_path}/c",
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [("ulimit -f" in line, "is whole" in line) for line in lines[:2]] == [(True, True)] * 2
    assert lines[2].startswith("1 ")


@pytest.mark.parametrize(
    ("end", "status", "saved"),
    [
        ("", 0, True),
        ("sys.exit(3)", 3, True),
        ("raise ValueError('the script')", 1, True),
        ("os._exit(4)", 4, False),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, False),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, True),
    ],
)
def test_what_becomes_of_a_save_when_the_script_ends(tmp_path: Path, end: str, status: int, saved: bool) -> None:
    """A script that ends in Python waits for its save; one that is gone at once leaves the checkpoint before."""
    script = "save(path, state)\nstate['m'] = torch.nn.Linear(3000, 3000)\n"
    script += f"save(path, {{**state, 'e': 2}}, asynchronous=True)\n{end}\n"
    done = run_script(script, f"{tmp_path}/c")
    assert done.returncode == status, done.stderr
    time.sleep(1.0)
    epoch = fleet.checkpoint.load(tmp_path / "c")["e"]
    assert epoch == 2 if saved else epoch in (1, 2)


def test_a_failed_save_makes_the_exit_status_1(tmp_path: Path) -> None:
    script = "save(path, state, asynchronous=True); wait()\nos.rename(path, path + '2'); open(path, 'w').close()\n"
    script += "fleet.checkpoint.writer.own_writer().start(path, fleet.checkpoint.commit.Share('0a', 0, 1, []))\n"
    done = run_script(script, f"{tmp_path}/c")
    assert done.returncode == 1
    assert "CheckpointError: " in done.stderr
    assert "was not written" in done.stderr


def test_two_saves_in_a_row_and_a_load(tmp_path: Path) -> None:
    script = "for e in (1, 2, 3): save(path, {**state, 'e': e}, asynchronous=True)\nprint(load(path)['e'])\n"
    done = run_script(script, f"{tmp_path}/c")
    assert (done.stdout.strip(), done.returncode) == ("3", 0), done.stderr


def test_workers_of_a_data_loader_live_through_saves(tmp_path: Path) -> None:
    """They are forked while a save is under way, and outlive the script's last line."""
    done = run_script(
        """
        save(path, state, asynchronous=True)
        loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2, persistent_workers=True)
        rows = iter(loader)
        next(rows)
        for epoch in (2, 3):
            save(path, {**state, 'e': epoch}, asynchronous=True)
            next(rows)
        """,
        f"{tmp_path}/c",
    )
    assert done.returncode == 0, done.stderr
    assert fleet.checkpoint.load(tmp_path / "c")["e"] == 3


def test_a_process_that_was_forked_has_a_writer_of_its_own(tmp_path: Path) -> None:
    done = run_script(
        """
        torch.set_num_threads(1)  # after a fork, OpenMP waits for threads that are not there
        save(path, {**state, 'e': 1}, asynchronous=True)
        pid = os.fork()
        save(path + ('a' if pid else 'b'), {**state, 'e': 2}, asynchronous=True)
        wait()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        print([load(path + end)['e'] for end in ('', 'a', 'b')])
        """,
        f"{tmp_path}/c",
    )
    assert (done.stdout.strip(), done.returncode) == ("[1, 2, 2]", 0), done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_of_multiprocessing_finishes_its_save(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys, torch\nsys.path.insert(0, {f'{ROOT}'!r})\nimport fleet.checkpoint\n"
        "def work(rank, path):\n"
        "    fleet.checkpoint.save(f'{path}{rank}', {'m': torch.nn.Linear(600, 600), 'e': rank}, asynchronous=True)\n"
        "if __name__ == '__main__':\n"
        f"    torch.multiprocessing.start_processes(work, (sys.argv[1],), 2, start_method={method!r})\n"
    )
    done = run_python(script, f"{tmp_path}/c", timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert [fleet.checkpoint.load(f"{tmp_path}/c{rank}")["e"] for rank in (0, 1)] == [0, 1]


def test_the_writer_ends_with_its_trainer(tmp_path: Path) -> None:
    script = "save(path, state, asynchronous=True); wait()\nprint(fleet.checkpoint.writer.own_writer()._process.pid)\n"
    done = run_script(script + "sys.stdout.flush(); os._exit(0)", f"{tmp_path}/c")
    pid, deadline = int(done.stdout), time.monotonic() + 10.0
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_folder_that_is_removed_while_a_part_is_awaited_is_said(tmp_path: Path, writer: Writer) -> None:
    import shutil

    begin(writer, tmp_path / "c", share(world_size=2))
    deadline = time.monotonic() + 10.0
    while not list(tmp_path.glob("c/data-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    shutil.rmtree(tmp_path / "c")
    assert "is gone from the folder" in writer.finish()
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        fleet.checkpoint.load(tmp_path / "c")
