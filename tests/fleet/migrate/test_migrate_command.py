"""python -m fleet migrate: diffs, exit codes, files; and moved scripts that train as they did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fleet.__main__ import main
from fleet.errors import ConfigError
from fleet.migrate import migrate_command
from fleet.migrate.migrate_command import migrate
from tests.fleet.migrate.cases import NAMES, text_of

ROOT = Path(__file__).parents[3]
# Scripts of which a part is left to the user, and why.
PARTLY = {"accelerate": "once for each process"}


@pytest.mark.parametrize("name", NAMES)
def test_a_script_becomes_what_is_written_beside_it(name: str) -> None:
    made = migrate(text_of(f"{name}_before"))
    assert made.text == text_of(f"{name}_after")
    assert [found.why for found in made.by_hand if PARTLY.get(name, "-") not in found.why] == []
    assert bool(made.by_hand) == (name in PARTLY)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_that_is_moved_is_left_alone(name: str) -> None:
    moved = text_of(f"{name}_after")
    again = migrate(moved)
    assert (again.text, again.kind, again.by_hand) == (moved, "fleet", [])


@pytest.mark.parametrize("name", ["ddp", "accelerate", "top"])
def test_other_lines_stay_byte_for_byte(name: str) -> None:
    """Line ends, a byte order mark and characters outside ASCII are kept."""
    old = text_of(f"{name}_before").replace("\n", "  # \u4e00\n", 1) if name != "top" else text_of("top_before")
    plain = migrate(old).text
    windows = migrate("\ufeff" + old.replace("\n", "\r\n")).text
    assert windows.startswith("\ufeff")
    assert windows[1:].replace("\r\n", "\n") == plain
    assert windows.count("\n") == windows.count("\r\n")


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, part, broken = tmp_path / "whole.py", tmp_path / "part.py", tmp_path / "broken.py"
    whole.write_text(text_of("single_before"))
    part.write_text(text_of("accelerate_before"))
    broken.write_text("def f(:\n")
    arguments = ["--", "--batch-size", "8", "--out", str(tmp_path / "out")]
    assert main(["migrate", str(whole), *arguments]) == 0
    assert "+from fleet import fleet\n" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert main(["migrate", str(whole), "--no-run"]) == 1
    assert "it was not run" in capsys.readouterr().out
    assert main(["migrate", str(part), "--json", "--no-run"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["kind"], shown["status"], shown["by_hand"][0]["line"]) == ("accelerate", 1, 37)
    assert whole.read_text() == text_of("single_before")
    assert main(["migrate", str(broken)]) == 2
    assert f"is not Python 3: invalid syntax ({broken.name}, line 1)" in capsys.readouterr().err
    assert main(["migrate", str(tmp_path / "absent.py")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_what_is_left_is_named_with_file_line_reason_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "part.py"
    path.write_text(text_of("accelerate_before"))
    main(["migrate", "--no-run", str(path)])
    assert f"{path}:37: scheduler\n    Accelerate stepped this scheduler" in capsys.readouterr().out


def test_write_keeps_the_old_script_and_refuses_to_replace_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, kept = tmp_path / "train.py", tmp_path / "train.py.orig"
    path.write_text(text_of("ddp_before"))
    assert main(["migrate", "--no-run", "--write", str(path)]) == 1
    assert (path.read_text(), kept.read_text()) == (text_of("ddp_after"), text_of("ddp_before"))
    assert main(["migrate", "--no-run", "--write", str(path)]) == 1  # nothing to change, so nothing to keep
    path.write_text(text_of("single_before"))
    assert main(["migrate", "--no-run", "--write", str(path)]) == 2
    assert "train.py.orig exists" in capsys.readouterr().err
    assert (path.read_text(), kept.read_text()) == (text_of("single_before"), text_of("ddp_before"))


def test_a_missing_package_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate_command, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[migrate\]'"):
        migrate("import torch\n")


def test_a_file_that_trains_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="imports none of torch, accelerate and paddle"):
        migrate("print(1)\n")


@pytest.mark.parametrize(
    "line", ["x = " + " + ".join(["1"] * 20_000), "x = y" + ".a" * 5000, "x = " + "-" * 3000 + "1"]
)
def test_what_is_nested_too_deeply_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="nested too deeply to be read"):
        migrate(f"import torch\n{line}\n")


def test_a_sum_of_many_terms_is_read() -> None:
    assert migrate("import torch\nx = " + " + ".join(["1"] * 100)).kind == "single"


def test_a_file_that_is_not_regular_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    for path in (tmp_path / "pipe.py", tmp_path):
        assert main(["migrate", str(path)]) == 2
        assert f"{path} is no regular file" in capsys.readouterr().err


_PADDLE = """\
import numpy as np
import paddle
from paddle.distributed import fleet
fleet.init(is_collective=True)
net = paddle.nn.Linear(4, 3)
optimizer = paddle.optimizer.Momentum(0.1, 0.9, parameters=net.parameters())
optimizer = fleet.distributed_optimizer(optimizer)
net = fleet.distributed_model(net)
label = paddle.to_tensor(np.zeros((2, 1), "int64"))
for step in range(3):
    loss = paddle.nn.NLLLoss()(net(paddle.ones([2, 4], "float32")), label)
    loss.backward()
    optimizer.step()
    net.clear_gradients()
"""


def test_what_the_new_script_stumbles_over_is_named_at_its_old_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(_PADDLE)
    assert main(["migrate", str(path)]) == 1
    shown = capsys.readouterr()
    assert f"{path}:11: loss = torch.nn.NLLLoss" in shown.out
    assert "label.flatten()" in shown.out
    assert "runs the new train.py until its second update" in shown.err


def test_a_script_on_fleet_with_rests_of_another_kind_is_named_and_not_changed() -> None:
    rest = text_of("single_after") + "\nfrom accelerate import Accelerator\nAccelerator().save_state('x')\n"
    made = migrate(rest)
    assert made.text == rest


_RUN_ALL = """\
import runpy, sys
for name, *arguments in {jobs!r}:
    sys.argv = [name, *arguments]
    runpy.run_path(name, run_name="__main__")
"""


def _arguments(name: str, size: int, path: Path) -> list[str]:
    return ["--batch-size", str(size), "--out", str(path)] if name in ("single", "ddp") else [str(size), str(path)]


def _run(folder: Path, command: list[str], **variables: str) -> None:
    known = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    variables = {**known, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)
    logs = "".join(path.read_text() for path in folder.glob("log/*log*"))
    assert done.returncode == 0, done.stdout + done.stderr + logs


@pytest.mark.slow
def test_moved_scripts_train_on_two_workers_as_the_old_ones_in_one_process(tmp_path: Path) -> None:
    """Half the batch size on each of two workers; weights, averages and predictions agree to 1e-6.

    The old script for Paddle cannot run without Paddle; its new one runs in one process in its place.
    """
    for name in NAMES:
        (tmp_path / f"{name}_new.py").write_text(text_of(f"{name}_after"))
        (tmp_path / f"{name}_old.py").write_text(text_of(f"{name}_{'after' if name == 'paddle' else 'before'}"))
    old = [(f"{name}_old.py", *_arguments(name, 32, tmp_path / f"{name}.1")) for name in NAMES]
    new = [(f"{name}_new.py", *_arguments(name, 16, tmp_path / f"{name}.2")) for name in NAMES]
    alone = [job for job in old if job[0] != "spawn_old.py"]  # mp.spawn imports the main module
    (tmp_path / "old.py").write_text(_RUN_ALL.format(jobs=alone))
    (tmp_path / "new.py").write_text(_RUN_ALL.format(jobs=new))
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    _run(tmp_path, [sys.executable, "old.py"], ACCELERATE_USE_CPU="1", **rank)
    spawn = (tmp_path / "spawn_old.py").read_text().replace('"12355"', '"0"')
    (tmp_path / "spawn_old.py").write_text(spawn)
    _run(tmp_path, [sys.executable, *next(job for job in old if job not in alone)])
    launcher = [sys.executable, "-m", "fleet.launch", "--nproc_per_node=2", "--log_dir", "log"]
    _run(tmp_path, [*launcher, "new.py"])
    for name in NAMES:
        before = tree_leaves(torch.load(tmp_path / f"{name}.1"))
        after = tree_leaves(torch.load(tmp_path / f"{name}.2"))
        assert len(before) == len(after) > 1
        for a, b in zip(before, after, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=1e-6)
