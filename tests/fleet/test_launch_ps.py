"""``python -m fleet.launch_ps`` is a command; its flags as the launcher's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fleet.errors import ConfigError
from fleet.launch_ps import main, translate
from tests.helpers.launching import SCRIPT, plan, read
from tests.helpers.sources import ROOT


def test_the_module_runs() -> None:
    """003-17, 003-25."""
    done = subprocess.run(
        [sys.executable, "-m", "fleet.launch_ps", "--node_ip=1", "t.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "use --host" in done.stderr


def test_the_documented_command() -> None:
    """003-17: two servers and two workers at consecutive ports from 6170, logs in ``logs``."""
    argv = translate(["--worker_num", "2", "--server_num", "2", SCRIPT, "--worker_num", "9"])
    assert argv == [
        "--run_mode=ps",
        "--servers=127.0.0.1:6170,127.0.0.1:6171",
        "--workers=127.0.0.1:6172,127.0.0.1:6173",
        "--log_dir=logs",
        SCRIPT,
        "--worker_num",
        "9",
    ]
    config = read(*argv[:-3])
    assert [spec.role for spec in plan(config)] == ["server", "server", "worker", "worker"]
    assert config.nodes.is_single


def test_its_other_flags() -> None:
    argv = translate(
        [
            "--start-port=7000",
            "--endpoints=127.0.0.1:7000",
            "--worker_num=1",
            "--log_dir",
            "l",
            "--with_gloo",
            "1",
            "-m",
            "train",
        ]
    )
    assert argv == [
        "--run_mode=ps",
        "--servers=127.0.0.1:7000",
        "--workers=127.0.0.1:7002",
        "--log_dir=l",
        "--with_gloo=1",
        "--module=true",
        "train",
    ]
    assert translate(["t.py"])[1].count(":") == 2


def test_wrong_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--worker_num is 'x'"):
        translate(["--worker_num=x", "t.py"])
    with pytest.raises(ConfigError, match="value is missing"):
        translate(["--worker_num"])
    assert main(["--server_num=0", "t.py"], {}) == 2
    assert "--server_num is '0'" in capsys.readouterr().err
    assert main(["--print_config=1", "t.py"], {}) == 2  # 003-25
    assert "unrecognized" in capsys.readouterr().err
