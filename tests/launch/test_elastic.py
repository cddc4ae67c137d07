"""What makes a job elastic, and the refusal to run one for now."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.launch._elastic import refuse_elastic
from tests.helpers.launching import notes, read

FLAGS = ("--elastic_server=10.0.0.1:2379", "--np=2", "--job_id=J")
ENV = {
    "PADDLE_ELASTIC_SERVER": "10.0.0.1:2379",
    "PADDLE_ELASTIC_NP": "2:4",
    "PADDLE_ELASTIC_JOB_ID": "J",
    "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "0",
}


def test_the_flags_of_the_older_family() -> None:
    """004-02."""
    config = read(*FLAGS, "--scale=1", "--force", "--elastic_pre_hook=echo hello")
    assert (config.is_elastic, config.elastic_server, config.job_id) == (True, "10.0.0.1:2379", "J")
    assert (config.min_nodes, config.max_nodes, config.elastic_scale, config.elastic_force) == (3, 3, 1, True)
    assert config.elastic_pre_hook == "echo hello"
    assert config.nproc_per_node == 1  # --np is no abbreviation of --nproc_per_node


def test_the_environment_alone() -> None:
    """004-01, 004-17."""
    config = read(env=ENV)
    assert (config.is_elastic, config.min_nodes, config.max_nodes, config.elastic_fault_level) == (True, 2, 4, 0)
    env = {"PADDLE_ELASTIC_ETCD_SERVICE_HOST": "10.0.0.9", "PADDLE_ELASTIC_ETCD_SERVICE_PORT": "2379"}
    assert not read(env=env).is_elastic  # the cluster sets these for every pod
    assert read(env={**env, "PADDLE_ELASTIC_NP": "2"}).elastic_server == "10.0.0.9:2379"


def test_half_of_the_pair_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--np needs --elastic_server"):
        read("--np=2")
    with pytest.raises(ConfigError, match="--elastic_server needs --np"):
        read("--elastic_server=10.0.0.1:2379")
    with pytest.raises(ConfigError, match="belongs to an elastic job"):
        read("--force")
    with pytest.raises(ConfigError, match="--scale is -1"):
        read(*FLAGS, "--scale=-1")
    with pytest.raises(ConfigError, match="N or MIN:MAX"):
        read("--elastic_server=10.0.0.1:2379", "--np=x")


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (("--nnodes=2:4",), ["etcd://", "--job_id", "--elastic_level 1"]),
        (("--nnodes=2:4", "--master=10.0.0.1:80", "--job_id=J", "--elastic_level=1"), ["etcd://"]),
        (("--nnodes=2:4", "--master=etcd://127.0.0.1:80", "--elastic_level=1"), ["--job_id"]),
        (("--nnodes=2", "--master=etcd://127.0.0.1:80", "--job_id=J", "--elastic_level=1"), ["--nnodes MIN:MAX"]),
        (("--nnodes=2:4", "--master=etcd://127.0.0.1:80", "--job_id=J"), ["--elastic_level 1"]),
    ],
)
def test_a_warning_names_what_is_missing(flags: tuple[str, ...], missing: list[str]) -> None:
    """000-20."""
    config = read(*flags)
    assert not config.is_elastic
    assert (config.min_nodes, config.max_nodes) == (2, 2)
    text = notes(config).split("missing: ")[1].split(". It")[0]
    assert len(text.split(", ")) == len(missing)
    assert all(name in text for name in missing)


def test_everything_given_is_elastic_without_a_warning() -> None:
    """000-20."""
    config = read("--nnodes=2:4", "--master=etcd://127.0.0.1:2379", "--job_id=J", "--elastic_level=1")
    assert (config.is_elastic, config.min_nodes, config.max_nodes) == (True, 2, 4)
    assert "not elastic" not in notes(config)


def test_a_range_from_one_starts_one_node() -> None:
    config = read("--nnodes=1:4")
    assert (config.max_nodes, config.is_single_node) == (1, True)


@pytest.mark.parametrize("flags", [FLAGS, ("--nnodes=2", "--master=etcd://me:pw@127.0.0.1:2379")])
def test_jobs_on_etcd_are_refused_in_one_place(flags: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"etcd at .*2379.* elastic jobs yet") as caught:
        refuse_elastic(read(*flags))
    assert "pw" not in str(caught.value)


def test_other_jobs_are_not_refused() -> None:
    refuse_elastic(read("--nnodes=2"))
    refuse_elastic(read())
