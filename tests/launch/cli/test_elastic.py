"""What makes a job elastic, and what such a job needs."""

from __future__ import annotations

import pytest

from fleet.env import Environment
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.launch.cli.elastic import check_elastic, etcd_server, needs_etcd, split_hook
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
    assert (config.elastic.is_elastic, config.elastic.server, config.job_id) == (True, "10.0.0.1:2379", "J")
    assert (config.nodes.min, config.nodes.max, config.elastic.scale, config.elastic.force) == (3, 3, 1, True)
    assert config.elastic.pre_hook == "echo hello"
    assert config.processes.num_workers == 1  # --np is no abbreviation of --nproc_per_node


def test_the_environment_alone() -> None:
    """004-01, 004-17."""
    config = read(env=ENV)
    assert (config.elastic.is_elastic, config.nodes.min, config.nodes.max, config.elastic.fault_level) == (
        True,
        2,
        4,
        0,
    )
    assert read(env={**ENV, "PADDLE_JOB_ID": "other"}).job_id == "J"  # as `python -m fleet.elastic` reads them
    env = {"PADDLE_ELASTIC_ETCD_SERVICE_HOST": "10.0.0.9", "PADDLE_ELASTIC_ETCD_SERVICE_PORT": "2379"}
    assert not read(env=env).elastic.is_elastic  # the cluster sets these for every pod
    assert read(env={**env, "PADDLE_ELASTIC_NP": "2"}).elastic.server == "10.0.0.9:2379"


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
        (("--nnodes=2:4",), ["--master ip:port or etcd://ip:port"]),
        (("--nnodes=2:4", "--master=10.0.0.1:80", "--elastic_level=0"), ["--elastic_level 1"]),
        (("--nnodes=2:4", "--master=10.0.0.1:80", "--elastic_level=-1"), ["--elastic_level 1"]),
        (("--nnodes=2:4", "--master=etcd://127.0.0.1:80", "--elastic_level=1"), ["--job_id"]),
        (("--nnodes=2", "--master=etcd://127.0.0.1:80", "--job_id=J", "--elastic_level=1"), ["--nnodes MIN:MAX"]),
        (("--nnodes=2:4", "--master=etcd://127.0.0.1:80"), ["--job_id"]),
        (("--nnodes=2:4", "--master=etcd://127.0.0.1:80", "--job_id=J", "--elastic_level=0"), ["--elastic_level 1"]),
    ],
)
def test_a_warning_names_what_is_missing(flags: tuple[str, ...], missing: list[str]) -> None:
    """000-20."""
    config = read(*flags)
    assert not config.elastic.is_elastic
    assert (config.nodes.min, config.nodes.max) == (2, 2)
    text = notes(config).split("missing: ")[1].split(". It")[0]
    assert len(text.split(", ")) == len(missing)
    assert all(name in text for name in missing)


def test_everything_given_is_elastic_without_a_warning() -> None:
    """000-20: a master on etcd, a job id and a range are the conditions."""
    for level in ((), ("--elastic_level=1",)):
        config = read("--nnodes=2:4", "--master=etcd://127.0.0.1:2379", "--job_id=J", *level)
        assert (
            config.elastic.is_elastic,
            config.nodes.min,
            config.nodes.max,
            config.command.arguments["elastic_level"],
        ) == (True, 2, 4, 1)
        assert config.elastic.max_restart == 3
        assert "not elastic" not in notes(config)
    fixed = read("--nnodes=2", "--master=etcd://127.0.0.1:2379", "--job_id=J")
    assert (fixed.elastic.is_elastic, fixed.elastic.max_restart) == (False, 0)
    assert notes(fixed) == notes(read("--nnodes=2", "--master=a:1"))


@pytest.mark.parametrize("more", [(), ("--job_id=J", "--elastic_level=1")])
def test_a_range_and_a_master_are_elastic_without_etcd(more: tuple[str, ...]) -> None:
    """Issue 11, 3: the nodes meet at the launcher of one of them; failed workers restart in place."""
    config = read("--nnodes=2:4", "--master=10.0.0.1:80", *more)
    assert (
        config.elastic.is_elastic,
        config.nodes.min,
        config.nodes.max,
        config.command.arguments["elastic_level"],
    ) == (True, 2, 4, 1)
    assert (config.elastic.server, needs_etcd(config), config.elastic.is_scheduled) == (None, False, False)
    assert (config.elastic.max_restart, config.elastic.ttl_s) == (3, 10)
    assert "not elastic" not in notes(config)
    assert read("--nnodes=2:4", "--master=10.0.0.1:80", env={"PADDLE_ELASTIC_TTL": "3"}).elastic.ttl_s == 3
    assert read("--nnodes=1:2", "--master=10.0.0.1:80", "--max_restart=0").elastic.max_restart == 0


@pytest.mark.parametrize(
    ("flags", "env", "named"),
    [
        (FLAGS, {}, "--np=2 makes"),
        (("--nnodes=2:4", "--master=10.0.0.1:80"), {}, "--nnodes=2:4 makes"),
        ((), ENV, "PADDLE_ELASTIC_NP=2:4 makes"),
        (("--nnodes=2:4", "--master=etcd://127.0.0.1:80", "--job_id=J", "--elastic_level=1"), {}, "--nnodes=2:4 makes"),
    ],
)
def test_an_elastic_job_has_no_servers(flags: tuple[str, ...], env: dict[str, str], named: str) -> None:
    """They would lose their tables when nodes come or go; a fixed number of nodes may meet on etcd."""
    for servers in (("--server_num=1", "--worker_num=1"), ("--run_mode=ps", "--server_num=1", "--worker_num=1")):
        with pytest.raises(UnsupportedOptionError, match=f"{named}.*--max_restart=K"):
            read(*flags, *servers, env=env)
        fixed = read("--nnodes=2", "--master=etcd://127.0.0.1:80", *servers)
        assert (fixed.mode, fixed.elastic.is_elastic) == ("ps", False)


def test_a_range_from_one_starts_one_node() -> None:
    config = read("--nnodes=1:4")
    assert (config.nodes.max, config.nodes.is_single) == (1, True)


def test_family_and_lease() -> None:
    """G13: the older family asks a scheduler, the newer one restarts in place; PADDLE_ELASTIC_TTL is the lease."""
    newer = ("--nnodes=2:4", "--master=etcd://127.0.0.1:2379", "--job_id=J", "--elastic_level=1")
    assert [read(*flags).elastic.is_scheduled for flags in (FLAGS, newer)] == [True, False]
    assert [read(*flags, env={"PADDLE_ELASTIC_TTL": "4"}).elastic.ttl_s for flags in (FLAGS, newer)] == [4, 4]
    assert read(*FLAGS).elastic.ttl_s == 10
    with pytest.raises(ConfigError, match="PADDLE_ELASTIC_TTL is 1 in the environment; it takes seconds from 2"):
        read(*FLAGS, env={"PADDLE_ELASTIC_TTL": "1"})


def test_no_secret_is_made_up_for_an_elastic_job() -> None:
    """Each launcher would make up its own, and no node would know the others'."""
    assert read(*FLAGS).pod.secret == ""


def test_the_password_of_etcd_is_not_printed() -> None:
    config = read("--elastic_server=me:pw@10.0.0.1:2379", "--np=2", "--job_id=J")
    assert config.command.arguments["elastic_server"] == "***@10.0.0.1:2379"
    assert etcd_server(config) == "me:pw@10.0.0.1:2379"


def test_which_jobs_need_etcd() -> None:
    assert needs_etcd(read(*FLAGS))
    assert needs_etcd(read("--nnodes=2", "--master=etcd://127.0.0.1:2379"))
    assert not needs_etcd(read("--nnodes=2", "--master=10.0.0.1:2379"))


def test_missing_client_is_refused_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """004-20."""
    monkeypatch.setattr("fleet.launch.membership.etcd_address.find_spec", lambda name: None)
    check_elastic(read("--nnodes=2"), Environment({}))
    with pytest.raises(ConfigError, match=r"pip install '\.\[elastic\]'"):
        check_elastic(read(*FLAGS), Environment({}))


@pytest.mark.parametrize(
    ("flags", "env", "rank"),
    [
        (("--rank=2",), {}, 2),
        ((), {}, -1),
        ((), {"PADDLE_TRAINER_ID": "2"}, 2),  # the index of a pod
        ((), {"PADDLE_TRAINER_ID": "3"}, -1),  # a pod that is about to be deleted, or a variable left over
        (("--scale=1",), {"PADDLE_TRAINER_ID": "3"}, 3),
    ],
)
def test_the_rank_that_a_node_asks_for(flags: tuple[str, ...], env: dict[str, str], rank: int) -> None:
    """004-05, 004-17: a pod that is made again takes its place again."""
    assert read("--elastic_server=10.0.0.1:2379", "--np=3", "--job_id=J", *flags, env=env).nodes.rank == rank


@pytest.mark.parametrize("rank", ["3", "-2"])
def test_a_rank_that_no_node_has(rank: str) -> None:
    with pytest.raises(ConfigError, match=f"--rank is {rank}, but there are 3 nodes"):
        read("--elastic_server=10.0.0.1:2379", "--np=3", f"--rank={rank}")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--nnodes=3",), "--nnodes=3"),
        (("--master=10.0.0.1:99",), "--master=10.0.0.1:99"),
        (("--ips=127.0.0.1",), "--ips=127.0.0.1"),
        (("--standalone",), "--standalone"),
    ],
)
def test_flags_of_both_families_contradict(flags: tuple[str, ...], named: str) -> None:
    """G13: none of them is silently left out."""
    with pytest.raises(ConfigError, match=f"{named}.* and --np=2 contradict each other"):
        read(*FLAGS, *flags)
    with pytest.raises(ConfigError, match=f"{named}.* and PADDLE_ELASTIC_NP=2:4 contradict each other"):
        read(*flags, env=ENV)


def test_the_same_number_twice_is_no_contradiction() -> None:
    assert read(*FLAGS, "--nnodes=2").nodes.max == 2


def test_both_spellings_of_the_level() -> None:
    """004-06: the misspelt name is Fleet's; who spells it right is heard as well. --elastic_level 0 says the same."""
    wrong, right = "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL", "PADDLE_ELASTIC_FAULT_TOLERANCE_LEVEL"
    for name in (wrong, right):
        assert read(*FLAGS, env={name: "2"}).elastic.fault_level == 2
    assert read(*FLAGS).elastic.fault_level == 1
    assert read(*FLAGS, "--elastic_level=0").elastic.fault_level == 0
    with pytest.raises(ConfigError, match="two spellings"):
        read(*FLAGS, env={wrong: "1", right: "0"})


@pytest.mark.parametrize("hook", ["a | b", "a && b", "a > file", "", "a $(b)"])
def test_hook_is_a_command_and_no_line_of_a_shell(hook: str) -> None:
    with pytest.raises(ConfigError, match=r"Put the lines into a script"):
        split_hook(hook, "--elastic_pre_hook")
    assert split_hook("python 'a b.py' x|y", "--elastic_pre_hook") == ("python", "a b.py", "x|y")
