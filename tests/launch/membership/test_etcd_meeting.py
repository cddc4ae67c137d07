"""What a launcher does around its membership on etcd: settings of its family, its address."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleet.launch.membership.engine import read_settings
from fleet.launch.membership.etcd_address import EtcdAddress
from fleet.launch.restarts import END, IN_PLACE, SCHEDULER
from tests.helpers import etcd as helper
from tests.helpers.etcd import Etcd
from tests.helpers.launching import read
from tests.launch.launcher import Launcher

pytestmark = pytest.mark.skipif(bool(helper.missing()), reason=helper.missing())
if not helper.missing():
    from fleet.launch.membership.etcd_meeting import own_host

OLDER = ("--elastic_server=127.0.0.1:2379", "--np=2:3", "--job_id=J")
NEWER = ("--nnodes=2:4", "--master=etcd://127.0.0.1:2379", "--job_id=J", "--elastic_level=1", "--elastic_timeout=7")
FIXED = ("--nnodes=2", "--master=etcd://127.0.0.1:2379")


@pytest.mark.parametrize(
    ("flags", "env", "fault", "limit_s"),
    [
        (OLDER, {}, SCHEDULER, None),
        (OLDER, {"PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "0"}, END, None),
        ((*OLDER, "--max_restart=5"), {}, IN_PLACE, None),
        (NEWER, {}, IN_PLACE, None),
        (FIXED, {}, IN_PLACE, 300.0),
    ],
)
def test_what_a_failure_means_in_each_family(
    flags: tuple[str, ...], env: dict[str, str], fault: str, limit_s: float | None
) -> None:
    """G13, G14; 004-01: PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL, spelled as it is."""
    settings = read_settings(read(*flags, env=env))
    assert (settings.rules.restarts.fault, settings.wait_limit_s) == (fault, limit_s)


def test_numbers_that_reach_the_rules() -> None:
    settings = read_settings(read(*NEWER))
    assert (settings.rules.min_nodes, settings.rules.max_nodes, settings.rules.quiet_s) == (2, 4, 7.0)
    assert (settings.rules.restarts.limit, settings.changes_np, settings.rules.is_elastic) == (3, False, True)
    assert read_settings(read(*OLDER, "--force")).changes_np
    scaled = read_settings(read(*OLDER, "--scale=2"))
    assert (scaled.changes_np, scaled.rules.min_nodes, scaled.rules.max_nodes) == (True, 4, 5)
    assert not read_settings(read(*FIXED)).rules.is_elastic


def test_own_address_is_the_one_towards_etcd() -> None:
    assert own_host(EtcdAddress(endpoints=("127.0.0.1:2379",))) == "127.0.0.1"


SAYS = """
import os
for name in ("FLEET_GENERATION", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "FLEET_ETCD_PASSWORD"):
    print(name, os.environ.get(name))
"""


@pytest.mark.slow
def test_variables_alone_start_an_elastic_job(tmp_path: Path, etcd: Etcd) -> None:
    """004-01, 004-17: what an operator sets for ``elastic: 1``; the hook runs, the password stays with the launcher."""
    env = {
        "PADDLE_ELASTIC_SERVER": etcd.endpoint,
        "PADDLE_ELASTIC_NP": "2",
        "PADDLE_ELASTIC_JOB_ID": "default-job",
        "PADDLE_ELASTIC_TIMEOUT": "60",
        "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "1",
        "POD_IP": "127.0.0.1",
    }
    flag = f"--elastic_pre_hook={sys.executable} -c \"print('before the start')\""
    with (
        Launcher(tmp_path / "a", SAYS, flag, env=env) as one,
        Launcher(tmp_path / "b", SAYS, env=env) as two,
    ):
        assert (one.wait(), two.wait()) == (0, 0)
        logs = sorted((one.log().split(), two.log().split()))
        assert [log[3] for log in logs] == ["0", "1"]
        assert [log[5] for log in logs] == ["2", "2"]
        (own_log,) = (tmp_path / "a").glob("**/default-job.*.log")
        assert own_log.read_text().count("elastic_pre_hook: before the start") == 1
        assert "elastic True" in one.stderr


@pytest.mark.slow
def test_fixed_job_on_etcd(tmp_path: Path, etcd: Etcd) -> None:
    """--nnodes=2 --master etcd://: it may be run again at once, under the same name."""
    flags = ("--nnodes=2", f"--master=etcd://{etcd.endpoint}", "--job_id=fixed")
    for run in ("1", "2"):
        with Launcher(tmp_path / run / "a", SAYS, *flags) as one, Launcher(tmp_path / run / "b", SAYS, *flags) as two:
            assert (one.wait(), two.wait()) == (0, 0)
            assert "elastic False" in one.stderr
            assert sorted((one.log().split()[3], two.log().split()[3])) == ["0", "1"]


@pytest.mark.slow
def test_no_etcd_at_the_address(tmp_path: Path) -> None:
    flags = (f"--elastic_server=127.0.0.1:{helper.free_port()}", "--np=1", "--job_id=J", "--elastic_timeout=0")
    with Launcher(tmp_path, SAYS, *flags) as job:
        assert job.wait() == 1
        assert "nothing listens there" in job.stderr
        assert job.log() == ""


@pytest.mark.slow
def test_launchers_with_different_secrets_form_no_job(tmp_path: Path, etcd: Etcd) -> None:
    """Issue 10, Medium 9: the second one joined, and became rank 0 with --rank=0."""
    flags = (
        "--nnodes=2",
        "--nproc_per_node=1",
        f"--master=etcd://{etcd.endpoint}",
        "--job_id=secrets",
        "--host=127.0.0.1",
    )
    keys = [{"FLEET_JOB_SECRET": text * 32, "PADDLE_ELASTIC_TTL": "2"} for text in ("ab", "cd")]
    script = "print('runs')"
    with Launcher(tmp_path / "a", script, *flags, "--elastic_timeout=1", env=keys[0]) as one:
        one.wait_for("Waiting peer start", "stderr")
        with Launcher(tmp_path / "b", script, *flags, "--rank=0", env=keys[1]) as two:
            assert (one.wait(), two.wait()) == (1, 1)
    assert "belongs to launchers with another secret, on 127.0.0.1" in two.stderr
    assert "from 127.0.0.1, is ignored: it is not sealed with this job's secret" in one.stderr
    assert "runs" not in one.log() + two.log()
