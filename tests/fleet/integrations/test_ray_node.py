"""LauncherActor without a cluster: it starts, follows and stops a launcher."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from fleet.integrations._ray_job import LauncherActor

FLAGS = ["--job_id=ray-1", "--standalone", "--nproc_per_node=1"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Returns what Ray says about the accelerators of an actor."""
    found: dict[str, list[str]] = {}
    context = SimpleNamespace(get_accelerator_ids=lambda: found)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    return found


def follow(actor: LauncherActor, until: str = "") -> tuple[str, int | None]:
    """Returns all output and the exit code, or what came until a text did."""
    text, deadline = "", time.monotonic() + 60
    while time.monotonic() < deadline:
        more, code = actor.follow(0.2)
        text += more
        if code is not None or (until and until in text):
            return text, code
    raise AssertionError(text)


def test_workers_get_the_gpus_of_the_bundle_and_nothing_of_another_job(
    gpus: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus["GPU"] = ["3", "1"]
    for name, value in {"PADDLE_TRAINERS_NUM": "7", "PADDLE_NPROC_PER_NODE": "5", "RANK": "3", "KEPT": "here"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "a b.py").write_text(
        "import os, sys\nprint([os.environ.get(n) for n in sys.argv[1:]], '\\u0436' * 9000)\nsys.exit(6)\n"
    )
    actor = LauncherActor()
    names = ["CUDA_VISIBLE_DEVICES", "PADDLE_TRAINERS_NUM", "PADDLE_NPROC_PER_NODE", "KEPT", "MINE"]
    assert actor.start(FLAGS, "logs", ["a b.py", *names], str(tmp_path), {"MINE": "x y"}) == ""
    text, code = follow(actor)
    assert code == 6
    assert "['3,1', '1', None, 'here', 'x y'] " + "\u0436" * 9000 in text
    assert (tmp_path / "logs" / "workerlog.0").exists()
    actor.stop(1)


def test_a_launcher_that_does_not_end_is_killed(gpus: dict[str, list[str]], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf now')\ntime.sleep(60)\n"
    )
    actor = LauncherActor()
    actor.start(FLAGS, "logs", ["train.py"], str(tmp_path), {})
    follow(actor, "deaf now")
    began = time.monotonic()
    actor.stop(0.2)
    assert time.monotonic() - began < 20
    assert actor._process is not None
    assert actor._process.returncode == -9


def test_a_folder_that_is_not_there(gpus: dict[str, list[str]], tmp_path: Path) -> None:
    actor = LauncherActor()
    problem = actor.start(FLAGS, "logs", ["train.py"], str(tmp_path / "absent"), {})
    assert problem == f"the launcher cannot start in {str(tmp_path / 'absent')!r} there: No such file or directory"
    actor.stop(1)
