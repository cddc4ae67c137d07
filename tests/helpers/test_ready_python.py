"""ready_python: a script finds what ``python script`` gives it, and ends as it would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ready_python
from tests.helpers.ready_python import Script, run_python, start_python


def test_a_script_finds_its_place(tmp_path: Path) -> None:
    script = tmp_path / "of" / "script.py"
    script.parent.mkdir()
    script.with_name("beside.py").write_text("HERE = 1")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "on_the_path.py").write_text("THERE = 2")
    script.write_text(
        "import os, sys, beside, on_the_path\n"
        "if __name__ == '__main__': print(sys.argv, os.getcwd(), dict(os.environ), __file__, beside.HERE)\n"
        "print('error', file=sys.stderr)"
    )
    env = {"PYTHONPATH": f"{tmp_path / 'path'}"}
    done = run_python(script, "a b", cwd=tmp_path, env=env)
    assert done.stdout == f"{[f'{script}', 'a b']} {tmp_path} {env} {script} 1\n", done.stderr
    assert (done.returncode, done.stderr) == (0, "error\n")


def test_torch_is_there_and_the_library_is_not() -> None:
    code = "import sys; print('torch._dynamo' in sys.modules, [m for m in sys.modules if m.startswith('fleet')])"
    assert run_python(code).stdout == "True []\n"


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('x')", 1),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_a_script_ends_as_python_ends_it(end: str, status: int) -> None:
    done = run_python(f"import atexit, os, signal, sys\natexit.register(print, 'at exit')\n{end}")
    assert done.returncode == status
    assert done.stdout == ("" if "_exit" in end or "KILL" in end else "at exit\n")
    assert done.stderr.rstrip().endswith("ValueError: x") == ("raise" in end)


def test_a_script_may_end_before_anyone_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Script):
        def __init__(self, words: socket.socket, name: str) -> None:
            monkeypatch.undo()
            assert run_python("").returncode == 0  # the first script has ended and was collected before this one
            super().__init__(words, name)

    monkeypatch.setattr(ready_python, "Script", Late)
    assert run_python("import os; os._exit(4)").returncode == 4


def test_warnings_count_as_behind_the_option() -> None:
    code = "import warnings; warnings.warn('old', FutureWarning)"
    assert run_python(code).returncode == 0
    assert "FutureWarning: old" in run_python(code, warnings=["error"]).stderr
    assert run_python(code, warnings=["error", "ignore::FutureWarning"]).returncode == 0
    leak = "open('/dev/null')"
    assert "unclosed" in run_python(leak, warnings=["error::ResourceWarning"]).stderr


def test_a_script_that_does_not_end_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("import time; time.sleep(60)", timeout_s=0.2)


def test_scripts_run_beside_each_other(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        code = "import sys; open(sys.argv[1]).read(); print(sys.argv[1])"
        both = []
        for name in ("one", "two"):
            os.mkfifo(tmp_path / name)
            both.append(start_python(code, f"{tmp_path / name}", out=file.fileno(), err=file.fileno()))
        assert [script.poll() for script in both] == [None, None]
        for script, name in ((both[1], "two"), (both[0], "one")):
            (tmp_path / name).write_text("")
            assert script.wait(20.0) == 0
    assert (tmp_path / "out").read_text() == f"{tmp_path / 'two'}\n{tmp_path / 'one'}\n"
