"""Checkpoints in remote folders: memory of this process, and an object store on this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fleet.checkpoint
from fleet.checkpoint.storage import open_folder
from fleet.errors import CheckpointError
from tests.helpers.ready_python import run_python
from tests.helpers.workers import free_ports

if importlib.util.find_spec("s3fs") is None or importlib.util.find_spec("moto") is None:
    pytest.skip("needs s3fs and moto[server]", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def of(number: float) -> nn.Module:
    """Returns a module of 4 MB, all of whose numbers are ``number``."""
    made = nn.Linear(1000, 1000)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(number)
    return made


def check(path: str, epoch: int) -> None:
    made = of(0)
    assert fleet.checkpoint.load(path, {"m": made, "e": 0})["e"] == epoch
    assert {float(value) for parameter in made.parameters() for value in parameter.detach().unique()} == {float(epoch)}


def check_only_named(path: str) -> None:
    """Fails where a save has left more than its file and the index."""
    assert sorted(name.partition("-")[0] for name in open_folder(path).names()) == ["data", "index.json"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_memory(asynchronous: bool) -> None:
    path = f"memory://run/{asynchronous}"
    for epoch in (1, 2):
        fleet.checkpoint.save(path, {"m": of(epoch), "e": epoch}, asynchronous=asynchronous)
        fleet.checkpoint.wait()
        check(path, epoch)
    check_only_named(path)


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """An object store; yields the variables that lead to it."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", f"{port}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    try:
        make = f"""
import boto3, time
for _ in range(150):
    try:
        boto3.client('s3', endpoint_url='http://127.0.0.1:{port}').create_bucket(Bucket='runs'); break
    except Exception: time.sleep(0.2)
else: raise SystemExit(1)
"""
        subprocess.run([sys.executable, "-c", make], env={**os.environ, **variables}, check=True, timeout=60)
        yield variables
    finally:
        server.kill()
        server.wait()


SCRIPT = """
import os, sys, signal
sys.path.insert(0, {root!r})
import fleet.checkpoint
from fleet.errors import CheckpointError
from tests.fleet.checkpoint.test_remote import check, check_only_named, of
path = "s3://runs/" + sys.argv[1]
def save(epoch, asynchronous=False):
    fleet.checkpoint.save(path, {{"m": of(epoch), "e": epoch}}, asynchronous=asynchronous)
"""


def run_script(text: str, name: str, store: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run_python(SCRIPT.format(root=f"{ROOT}") + text, name, env={**os.environ, **store})


@pytest.mark.slow
def test_an_object_store_holds_checkpoints(store: dict[str, str]) -> None:
    text = "save(1); check(path, 1); save(2, True); save(3, True); fleet.checkpoint.wait(); check(path, 3)\n"
    done = run_script(text + "check_only_named(path)", "a", store)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_is_killed_before_its_index_leaves_the_checkpoint_before(
    store: dict[str, str], asynchronous: bool
) -> None:
    name = f"killed{asynchronous}"
    kill = "import fleet.checkpoint.storage as s\nold = s.RemoteFolder.create\n"
    kill += "def create(self, *a):\n    os.kill(os.getpid(), signal.SIGKILL)\n" if not asynchronous else ""
    kill += "s.RemoteFolder.create = create\nsave(2)\n" if not asynchronous else "save(2, True); os._exit(9)\n"
    done = run_script("save(1)\n" + kill, name, store)
    assert done.returncode in (9, -signal.SIGKILL), done.stderr
    time.sleep(1.0)
    after = "found = fleet.checkpoint.load(path)['e']; assert found in (1, 2); check(path, found); save(3)\n"
    done = run_script(after + "check(path, 3); check_only_named(path)", name, store)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_store_that_refuses_is_said(store: dict[str, str]) -> None:
    text = """
path = "s3://no-such-bucket/a"
for asynchronous in (False, True):
    try:
        save(1, asynchronous)
        fleet.checkpoint.wait()
    except CheckpointError as error:
        print(error)
"""
    done = run_script(text, "x", store)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2, done.stdout


def test_a_folder_in_memory_without_an_index_is_no_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="absent or empty"):
        fleet.checkpoint.load("memory://nothing")
