"""``python -m fleet explain FILE``: exit status 0, 1 when refused, 2 when the file is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.options.explain_command import run


def write(folder: Path, text: str, name: str = "strategy.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0, the explanation on standard output, and no warning beside it."""
    assert run([write(tmp_path, "fp16_allreduce: true\nnccl_comm_num: 2\n"), "--world-size", "4"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("4 workers: data_parallel -> fp16_allreduce\n")
    assert "- nccl_comm_num: " in shown.out
    assert shown.err == ""


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1, and the reason."""
    assert run([write(tmp_path, "lars: true\nlamb: true\n")]) == 1
    assert "cannot both be on" in capsys.readouterr().out
    assert run([write(tmp_path, "hybrid_configs: {dp_degree: 4}"), "--world-size=4"]) == 0
    assert run([write(tmp_path, "hybrid_configs: {dp_degree: 4}"), "--world-size=2"]) == 1


@pytest.mark.parametrize("text", ["larss: true", "amp: 3", "amp: [", "- amp"])
def test_wrong_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """2, and the line on standard error."""
    assert run([write(tmp_path, text)]) == 2
    shown = capsys.readouterr()
    assert "strategy.yaml, line 1: " in shown.err
    assert shown.out == ""


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2 for arguments too; --help is 0."""
    assert run([]) == 2
    assert run([str(tmp_path / "absent.yaml")]) == 2
    assert run([write(tmp_path, ""), "--world-size", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
    assert run([write(tmp_path, ""), "--world-size", "two"]) == 2
    assert "'two' is no number of workers" in capsys.readouterr().err


def test_a_file_without_options_is_not_called_no_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([write(tmp_path, "- amp\n")]) == 2
    told = capsys.readouterr()
    assert re.fullmatch(r"\S+, line 1: expected a mapping of option to value\.\n", told.out + told.err)
    assert run(["--help"]) == 0


def test_prototxt_and_ps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Protobuf text by the name's ending, and the other kind of job."""
    file = write(tmp_path, "amp_configs { incr_ratio: 4 }", "s.prototxt")
    assert run([file]) == 0
    assert "amp_configs was set and changes nothing: 'amp' is off" in capsys.readouterr().out
    run([file, "--ps"])
    assert "a_sync" in capsys.readouterr().out.splitlines()[0]


def test_a_file_with_options_of_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a flag, a_sync or an option of servers makes it a job with servers; --collective overrides that."""
    file = write(tmp_path, "a_sync: true\na_sync_configs: {use_ps_gpu: 1}\n")
    assert run([file]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("Explained for a parameter-server job, since the file sets a_sync, a_sync_configs; ")
    assert "a_sync_configs['use_ps_gpu'] = 1 cannot be honoured" in shown
    assert "changes nothing" not in shown
    assert run([file, "--collective"]) == 0
    assert "- a_sync was set and changes nothing" in capsys.readouterr().out
    assert run([file, "--ps"]) == 1
    assert capsys.readouterr().out.startswith("2 workers: a_sync")
    assert run([file, "--ps", "--collective"]) == 2
    assert run([write(tmp_path, "sparse_table_configs: {words: {}}\n")]) == 0
    assert "since the file sets sparse_table_configs; " in capsys.readouterr().out


def test_as_a_command(tmp_path: Path) -> None:
    """The whole way through ``python -m fleet``."""
    command = [sys.executable, "-m", "fleet", "explain", write(tmp_path, "sync_batch_norm: true\n")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 workers: sync_batch_norm -> data_parallel\n")
