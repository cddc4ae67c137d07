"""A script that is only tried: what it finds, and what it may not do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fleet.migrate.trial_run import Trial
from tests.helpers.trials import Try, train


def test_the_script_finds_what_is_beside_it(attempt: Try, tmp_path: Path) -> None:
    (tmp_path / "work" / "helper.py").write_text("SIZE = 4\n")
    (tmp_path / "work" / "data.txt").write_text("1\n")
    lines = [
        "from pathlib import Path; from helper import SIZE",
        "assert open('data.txt').read() == Path(__file__).with_name('data.txt').read_text() == '1\\n'",
        "import __main__; assert __name__ == '__main__' and __main__.model is model",
    ]
    assert attempt(train(before="\n".join(lines))) == Trial(2)


def test_no_file_is_changed(attempt: Try, tmp_path: Path) -> None:
    """Not in the current folder, not in a folder in it, nor elsewhere; neither before training nor in it."""
    (tmp_path / "work" / "runs").mkdir()
    (tmp_path / "work" / "runs" / "log").write_text("old")
    (tmp_path / "kept").write_text("old")
    (tmp_path / "gone").write_text("old")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    lines = [
        "import os; open('new.txt', 'w').write('x'); os.makedirs('made/deep')",
        f"open('runs/log', 'w').write('x'); open({str(tmp_path / 'kept')!r}, 'a').write('x')",
        f"os.remove({str(tmp_path / 'gone')!r})",
        f"torch.save(model.state_dict(), {str(tmp_path / 'state.pt')!r})",
    ]
    made = attempt(train(before="\n".join(lines), after="torch.save({}, 'runs/state.pt')"))
    assert made == Trial(2)
    after = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and "trial" not in p.parts}
    assert after == before
    assert not (tmp_path / "work" / "made").exists()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_it_has_no_network(attempt: Try, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = f"import socket; socket.create_connection(({name!r}, {server.getsockname()[1]}))"
        made = attempt(train(before=line))
    assert "PermissionError: the trial run has no network" in made.why
    assert "Download what it needs" in made.todo


@pytest.mark.parametrize("call", ["subprocess.run(['touch', PATH])", "os.system('touch ' + PATH)"])
def test_it_starts_no_other_program(attempt: Try, tmp_path: Path, call: str) -> None:
    path = tmp_path / "touched"
    made = attempt(train(before=f"import os, subprocess; PATH = {str(path)!r}; {call}"))
    assert "the trial run starts no other program" in made.why
    assert not path.exists()


def test_workers_of_a_loader_are_no_other_program(attempt: Try) -> None:
    line = "import torch.utils.data as d; list(d.DataLoader(torch.ones(8, 4), num_workers=2))"
    assert attempt(train(before=line)) == Trial(2)


@pytest.mark.parametrize("call", ["os.popen('stty size').read()", "subprocess.run(['git', 'rev-parse', 'HEAD'])"])
def test_it_may_ask_programs(attempt: Try, call: str) -> None:
    assert attempt(train(before=f"import os, subprocess; {call}")) == Trial(2)


def test_it_starts_no_process_that_would_be_free(attempt: Try) -> None:
    line = "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()"
    assert "starts no other program" in attempt(train(before=line)).why


def test_workers_that_it_would_spawn_run_in_it(attempt: Try) -> None:
    body = "\n".join(f"    {line}" for line in train().splitlines()[3:])
    text = f"import torch\nfrom fleet import fleet\ndef main(size):\n{body}\nfleet.spawn(main, args=(4,), nprocs=4)\n"
    assert attempt(text) == Trial(2)


def test_paths_out_of_the_folder_are_found(attempt: Try, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").write_text("1")
    line = f"import os; assert open('../data/rows').read() == '1'; assert {tmp_path.name!r} in os.listdir('../..')"
    assert attempt(train(before=f"{line}; open('../new', 'w').write('x')")) == Trial(2)
    assert not (tmp_path / "new").exists()
