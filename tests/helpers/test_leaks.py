"""The rule of tests/conftest.py: a test that leaves something behind fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

_LEAKY = """
import os, subprocess, sys, pytest

def test_variable():
    os.environ["LEAKED"] = "1"

def test_variable_is_gone_again():
    assert "LEAKED" not in os.environ

def test_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(8)"])

def test_group(tmp_path):
    import torch.distributed as distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

def test_clean():
    pass

@pytest.mark.gpu
def test_gpu():
    raise AssertionError
"""


def test_each_leak_is_named(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_leaky.py").write_text(_LEAKY)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", str(tmp_path)]
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "environment variables ['LEAKED']" in done.stdout
    assert "child processes [" in done.stdout
    assert "an initialised process group" in done.stdout
    assert "5 passed, 1 skipped, 3 errors" in done.stdout, done.stdout
