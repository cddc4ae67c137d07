"""python -m fleet env: what to paste into a bug report."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

import fleet
from fleet.env import Environment
from fleet.utils._env_report import report, run, shown_variables
from tests.fleet.role_maker.test_fleet_contract import LAUNCHED

SECRETS = {
    "FLEET_JOB_SECRET": "hunter2", "PADDLE_GLOO_FS_UGI": "user,hunter2", "FLEET_API_KEY": "hunter2",
    "PADDLE_access_token": "hunter2", "TORCH_PASSWORD": "hunter2",
    "PADDLE_ELASTIC_SERVER": "http://user:hunter2@etcd:2379", "https_proxy": "http://me:hunter2@proxy:80",
}  # fmt: skip


def test_versions_and_machine() -> None:
    text = report(Environment({}))
    assert f"fleet   {fleet.__version__}" in text
    for part in (torch.__version__, platform.python_version(), "numpy", "CPUs", "GPUs"):
        assert part in text
    assert text.endswith("variables\n  none")
    assert "worker 0 of 1, started by single process" in text


def test_secrets_are_not_shown() -> None:
    text = report(Environment(SECRETS))
    assert "hunter2" not in text
    for name in SECRETS:
        assert name in text
    assert "http://***@etcd:2379" in text


@pytest.mark.parametrize(
    "value", ["me:{}@10.0.0.1:2379", "me:{0}/{0}@10.0.0.1:2379", "etcd://me:{0}/{0} {0}@10.0.0.1:2379"]
)
def test_the_password_in_the_address_of_etcd_is_not_shown(value: str) -> None:
    """Issue 10, Medium 8."""
    text = report(Environment({"PADDLE_ELASTIC_SERVER": value.format("hunter2")}))
    assert "hunter2" not in text
    assert "***@10.0.0.1:2379" in text


def test_variables_of_fleet_and_torch_only() -> None:
    values = {**LAUNCHED, "HOME": "x", "PATH": "y", "AWS_ACCESS_KEY_ID": "z", "PADDLE_NNODES": "", "NCCL_DEBUG": "INFO"}
    shown = dict(shown_variables(values))
    assert shown["RANK"] == "1"
    assert shown["NCCL_DEBUG"] == "INFO"
    assert not {"HOME", "PATH", "AWS_ACCESS_KEY_ID", "PADDLE_NNODES"} & shown.keys()


def test_long_values_are_cut() -> None:
    """One screen."""
    endpoints = ",".join(f"10.0.0.{i}:6170" for i in range(200))
    text = report(Environment({"PADDLE_TRAINER_ENDPOINTS": endpoints, "PADDLE_TRAINER_ID": "0", "NCCL_X": "a\nb"}))
    assert max(map(len, text.splitlines())) < 140
    assert f"({len(endpoints)} characters)" in text
    assert "NCCL_X=a\\nb" in text


def test_the_role_and_what_is_wrong_with_it() -> None:
    assert "worker 1 of 2, started by fleet launcher" in report(Environment(LAUNCHED))
    assert "contradictory: RANK is '0'" in report(Environment({**LAUNCHED, "RANK": "0"}))


def test_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "fleet", "env"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "python" in done.stdout
    assert len(done.stdout.splitlines()) < 40


def test_it_takes_no_arguments() -> None:
    with pytest.raises(SystemExit):
        run(["--all"])
