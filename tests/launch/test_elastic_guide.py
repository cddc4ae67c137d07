"""docs/run/elastic.md: its walk-through does what it says, and the Chinese text has the same code."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import etcd as helper
from tests.helpers.etcd import Etcd
from tests.launch.launcher import ROOT, Launcher, wait_until_gone

GUIDE, CHINESE = (ROOT / "docs" / name for name in ("run/elastic.md", "run/elastic.zh-CN.md"))


def blocks(path: Path, language: str) -> list[str]:
    """The code of one language in a text."""
    return [
        re.sub(r"(?m)^ {3}", "", text) if text.startswith("   ") else text
        for text in re.findall(rf"(?s)```{language}\n(.*?)\n *```", path.read_text(encoding="utf-8"))
    ]


def test_both_languages_have_the_same_code() -> None:
    for language in ("python", "bash"):
        assert blocks(GUIDE, language) == blocks(CHINESE, language)
    assert len(blocks(GUIDE, "bash")) == 5


@pytest.mark.slow
@pytest.mark.skipif(bool(helper.missing()), reason=helper.missing())
def test_the_walk_through(tmp_path: Path, etcd: Etcd) -> None:
    """004-05: a node is lost, another one takes its place, and training goes on from the checkpoint."""
    walk(tmp_path, f"--elastic_server={etcd.endpoint}", "--job_id=try", "--np=2")


@pytest.mark.slow
def test_the_walk_through_without_etcd(tmp_path: Path) -> None:
    """The same where the nodes meet at the first launcher, with the flags of "Without etcd"."""
    walk(
        tmp_path, f"--master=127.0.0.1:{helper.free_port()}", "--host=127.0.0.1", "--nnodes=2:4", "--elastic_timeout=1"
    )


def walk(tmp_path: Path, *flags: str) -> None:
    """Starts two nodes, kills the second one and starts a third."""
    (script,) = blocks(GUIDE, "python")
    script = script.replace("range(checkpoint.epoch, 60)", "range(checkpoint.epoch, 8)").replace(
        "sleep(0.2)", "sleep(0.05)"
    )
    env = {"PADDLE_ELASTIC_TTL": "3", "OMP_NUM_THREADS": "1"}

    def node(name: str) -> Launcher:
        return Launcher(tmp_path, script, *flags, f"--log_dir={name}", env=env)

    with contextlib.ExitStack() as nodes:
        one = nodes.enter_context(node("log1"))
        one.wait_for("Waiting peer start", "stderr")
        two = nodes.enter_context(node("log2"))
        wait(tmp_path, re.compile(r"epoch \d+ with 2 workers"))
        two.signal(signal.SIGKILL)
        with node("log3") as three:
            wait_until_gone([two.process.pid], 2.0)
            assert (one.wait(55), three.wait(5)) == (0, 0)
    epochs = [int(found) for found in re.findall(r"epoch (\d+) with", logs(tmp_path))]
    assert max(epochs) == 7
    assert set(epochs) == set(range(8)), "no epoch was left out"


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("log*/workerlog.0")))


def wait(folder: Path, pattern: re.Pattern[str]) -> None:
    deadline = time.monotonic() + 40
    while not pattern.search(logs(folder)):
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.05)
