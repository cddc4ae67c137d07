"""endpoints.log, envlog.N, backup_env.N.json (002-12, decision 9)."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from fleet.launch.plan.records import ProcessSpec
from fleet.launch.processes.job_files import write_job_files


def test_files_hold_only_the_launchers_variables(tmp_path: Path) -> None:
    spec = ProcessSpec(
        role="worker",
        index=1,
        local_index=0,
        command=("python",),
        log_path=tmp_path / "workerlog.0",
        environment={"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINER_ENDPOINTS": "a:1,b:2", "FLEET_JOB_SECRET": "hidden"},
        overflow={"LONG": "x" * 10},
        backup_path=tmp_path / "backup_env.1.json",
        environment_log_path=tmp_path / "envlog.0",
    )
    write_job_files(tmp_path, [spec])
    assert (tmp_path / "endpoints.log").read_text().split() == ["PADDLE_TRAINER_ENDPOINTS:", "a:1", "b:2"]
    assert "PADDLE_TRAINER_ID=1" in (tmp_path / "envlog.0").read_text()
    assert json.loads((tmp_path / "backup_env.1.json").read_text())["LONG"] == "x" * 10
    for path in tmp_path.iterdir():
        assert "hidden" not in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) & 0o137 == 0


def test_no_process_no_file(tmp_path: Path) -> None:
    write_job_files(tmp_path, [])
    assert list(tmp_path.iterdir()) == []
