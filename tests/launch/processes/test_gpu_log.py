"""--enable_gpu_log: the file is written, or one line says why not (C.6, C.8)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fleet.launch.plan.records import LaunchConfig, Logs, Processes, Script
from fleet.launch.processes.gpu_log import HEADER, write_gpu_log
from fleet.launch.processes.logs import LaunchLog


def fake_smi(folder: Path, text: str, code: int = 0) -> None:
    """Puts a program called nvidia-smi into ``folder`` that notes its arguments and prints ``text``."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho \"$@\" >> {folder}/asked\nprintf '{text}'\nexit {code}\n")
    program.chmod(0o755)


def config_for(folder: Path, device_type: str = "gpu", enable_gpu_log: bool = True) -> LaunchConfig:
    return LaunchConfig(
        mode="collective",
        script=Script(name="train.py"),
        job_id="job",
        processes=Processes(device_type=device_type, device_names=("0", "2")),
        logs=Logs(folder=folder / "log", has_gpu_log=enable_gpu_log),
    )


def test_one_line_for_each_card_and_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, "0, 97, 40000, 81559, 60, 500.10\\n2, 0, 4, 81559, 30, 70.00\\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    path = tmp_path / "log" / "job.gpu.log"
    for _ in range(2):  # the second job appends
        with write_gpu_log(config_for(tmp_path), LaunchLog(), period_s=60):
            deadline = time.monotonic() + 5
            while (not path.exists() or path.read_text().count("\n") % 2 == 0) and time.monotonic() < deadline:
                time.sleep(0.01)
    lines = path.read_text().splitlines(keepends=True)
    assert lines[0] == HEADER
    assert [line.split(",")[1:3] for line in lines[1:]] == [["0", "97"], ["2", "0"]] * 2
    assert "--id=0,2" in (tmp_path / "asked").read_text()


def test_without_the_program_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with write_gpu_log(config_for(tmp_path), LaunchLog()):
        pass
    assert "nvidia-smi is not on the PATH" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()


def test_a_failing_program_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_smi(tmp_path, "no devices were found", 6)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with write_gpu_log(config_for(tmp_path), LaunchLog(), period_s=0.01):
        time.sleep(0.3)
    assert capsys.readouterr().err.count("nvidia-smi ended with 6: no devices were found") == 1


@pytest.mark.parametrize("fields", [{"device_type": "cpu"}, {"enable_gpu_log": False}])
def test_nothing_is_written_where_there_is_nothing_to_write(
    fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with write_gpu_log(config_for(tmp_path, **fields), LaunchLog()):
        pass
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "log").exists()
