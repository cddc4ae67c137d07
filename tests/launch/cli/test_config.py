"""Flags and environment -> configuration: precedence, names, restarts, secrets, platforms."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from fleet.errors import ConfigError, UnsupportedOptionError
from tests.helpers.launching import SCRIPT, notes, read

KEY = "ab" * 16


def test_one_node_without_flags() -> None:
    """000-08, 000-13: the default is one node, job id ``default``."""
    config = read()
    assert (config.mode, config.nodes.min, config.nodes.max, config.nodes.is_single) == ("collective", 1, 1, True)
    assert (config.job_id, config.processes.num_workers, config.processes.device_type) == ("default", 1, "cpu")
    assert config.servers.with_gloo == 0  # G3


@pytest.mark.parametrize("system", ["Windows", "Java"])
def test_windows_is_refused_with_the_way_to_run_one_process(system: str) -> None:
    """000-04, 000-30."""
    with pytest.raises(UnsupportedOptionError, match=f"does not run on {system}.*single process.*python .*launching"):
        read("--gpus=0,1", system=system)


def test_linux_and_macos_are_taken() -> None:
    assert read(system="Linux").nodes.interface == "lo"
    assert read(system="Darwin").nodes.interface == "lo0"


def test_the_command_line_wins_over_the_environment_and_says_so() -> None:
    config = read("--nproc_per_node=2", env={"PADDLE_NPROC_PER_NODE": "3", "PADDLE_LOG_DIR": "logs"})
    assert config.processes.num_workers == 2
    assert "--nproc_per_node=2 on the command line wins over PADDLE_NPROC_PER_NODE=3" in notes(config)
    assert f"{config.logs.folder}" == "logs"


def test_equal_values_in_both_places_are_no_news() -> None:
    assert notes(read("--nproc_per_node=2", env={"PADDLE_NPROC_PER_NODE": "2"})) == ""


@pytest.mark.parametrize(
    ("env", "field", "value"),
    [
        ({"PADDLE_JOB_ID": "a"}, "job_id", "a"),
        ({"PET_RDZV_ID": "a"}, "job_id", "a"),
        ({"PET_NPROC_PER_NODE": "4"}, "processes.num_workers", 4),
        ({"PADDLE_LOG_LEVEL": "debug"}, "logs.level", "DEBUG"),
        ({"PADDLE_LOG_OVERWRITE": "1"}, "logs.overwrites", True),
        ({"PET_MAX_RESTARTS": "2"}, "elastic.max_restart", 2),
        ({"PET_LOG_DIR": "there"}, "command.given", ()),
        ({"PORT_RANGE": "40000:40010"}, "nodes.port_range", (40000, 40010)),
        ({"FLAGS_START_PORT": "7100"}, "nodes.first_port", 7100),
        ({"PADDLE_START_PORT": "7100"}, "nodes.first_port", 7100),
        ({"PADDLE_ENV_LIMIT_LEN": "100"}, "processes.environment_limit", 100),
    ],
)
def test_the_environment_decides_where_no_flag_is_given(env: dict[str, str], field: str, value: object) -> None:
    assert attrgetter(field)(read(env=env)) == value


def test_a_launcher_inside_a_worker_ignores_what_the_outer_one_set() -> None:
    env = {
        "FLEET_POD": "x",
        "PADDLE_MASTER": "10.0.0.1:80",
        "PADDLE_NNODES": "4",
        "PADDLE_TRAINER_ID": "3",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:1,10.0.0.2:1",
        "PADDLE_NPROC_PER_NODE": "2",
    }
    config = read(env=env)
    assert (config.nodes.max, config.processes.num_workers, config.nodes.static_peers) == (1, 2, ())


@pytest.mark.parametrize("name", ["../up", "a b", "a/b", "..", "\u00e9"])
def test_job_ids_that_could_leave_the_log_folder_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        read(f"--job_id={name}")


def test_pod_names_are_six_random_letters() -> None:
    """000-14."""
    names = {read().pod.name for _ in range(20)}
    assert len(names) > 15
    assert all(len(name) == 6 and name.isascii() and name.islower() and name.isalpha() for name in names)


@pytest.mark.parametrize(
    ("flags", "restarts"),
    [
        ((), 0),
        (("--max_restart=2",), 2),
        (("--max-restarts=2",), 2),
        (("--elastic_level=1",), 3),
        (("--elastic_level=1", "--max_restart=5"), 5),
        (("--elastic_level=0", "--max_restart=5"), 0),
    ],
)
def test_restarts_happen_when_they_were_asked_for(flags: tuple[str, ...], restarts: int) -> None:
    """G13: the newer family restarts in place; the block still prints 3 by default."""
    config = read(*flags)
    assert config.elastic.max_restart == restarts
    assert config.command.arguments["max_restart"] == restarts  # what the configuration block prints
    assert ("is ignored" in notes(config)) == ("--elastic_level=0" in flags)


def test_log_level_is_valid() -> None:
    """000-18, 003-26, G2: --log_level is a flag, although fleetrun's documentation removed it."""
    assert read("--log_level=DEBUG").logs.level == "DEBUG"
    with pytest.raises(ConfigError, match="Did you mean 'DEBUG'"):
        read("--log_level=DEBUGG")
    guide = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    assert "`--log_level` is a flag of the launcher in both families" in guide


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        ("--with_gloo=3", "0, 1, 2"),
        ("--elastic_level=2", "-1, 0, 1"),
        ("--gloo_port=70000", "1 to 65535"),
        ("--max_restart=-1", "from 0"),
        ("--elastic_timeout=nan", "seconds"),
        ("--log_style=paddle", "launch or fleetrun"),
        ("--start_port=x", "integer"),
        ("--start_port=0", "1 to 65535"),
        ("--sort_ip=maybe", "true or false"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_flag_and_rule(flag: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        read(flag)
    assert flag.split("=")[0] in str(caught.value)


def test_a_wrong_value_in_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="PADDLE_MAX_RESTART is 'x'"):
        read(env={"PADDLE_MAX_RESTART": "x"})


def test_flags_without_meaning_are_accepted_with_one_warning() -> None:
    config = read("--auto_tuner_json=a.json", "--legacy")
    assert notes(config).count("has no effect") == 2
    assert "auto tuner is not part" in notes(config)
    assert notes(read("--auto_cluster_config=0")) == ""  # the default changes nothing


@pytest.mark.parametrize(
    "flag", ["--heter_worker_num=1", "--heter_workers=a:1", "--coordinator_num=1", "--tee=3", "--cluster_topo_path=x"]
)
def test_flags_of_absent_features_are_refused_with_the_reason(flag: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"cannot be honoured: .*Omit it"):
        read(flag)


def test_the_secret_is_new_for_each_job_and_hidden() -> None:
    first, second = read(), read()
    assert len(first.pod.secret) == 64
    assert first.pod.secret != second.pod.secret
    assert first.pod.secret not in repr(first)


def test_the_users_secret_is_taken_and_checked() -> None:
    config = read(env={"FLEET_JOB_SECRET": KEY})
    assert (config.pod.secret, config.pod.secret_is_users) == (KEY, True)
    with pytest.raises(ConfigError, match="32 hexadecimal digits") as caught:
        read(env={"FLEET_JOB_SECRET": "hunter2hunter2hunter2"})
    assert "hunter2" not in str(caught.value)


def test_nodes_that_cannot_agree_on_a_secret_get_none_and_a_warning() -> None:
    config = read("--nnodes=2", "--master=10.0.0.1:6000")
    assert config.pod.secret == ""
    assert "FLEET_JOB_SECRET is not set" in notes(config)
    assert read("--nnodes=2").pod.secret != ""  # this node prints it in the command for the others
    assert read("--nnodes=2", "--master=10.0.0.1:6000", env={"FLEET_JOB_SECRET": KEY}).pod.secret == KEY


def test_thread_count_is_set_for_several_workers_as_torchrun_does() -> None:
    config = read("--nproc_per_node=2")
    assert config.processes.sets_thread_count
    assert notes(config, "INFO").count("OMP_NUM_THREADS") == 1
    assert not read("--nproc_per_node=2", env={"OMP_NUM_THREADS": "4"}).processes.sets_thread_count
    assert not read().processes.sets_thread_count


def test_script_arguments_pass_through_untouched() -> None:
    """001-11: what stands behind the script is the script's, even when it looks like a flag of the launcher."""
    args = ["--is_cloud=1", "--servers=a:1", "--server_num=2", "--gpus", "9", "--", "-h", "--nnodes=5"]
    config = read("--gpus=0", script=(SCRIPT, *args))
    assert config.script.args == tuple(args)
    assert (config.mode, config.nodes.max, config.processes.num_workers) == ("collective", 1, 1)
    assert config.command.argv == ("--gpus=0", SCRIPT, *args)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ((), "collective"),
        (("--gpus=0",), "collective"),
        (("--server_num=1", "--worker_num=2"), "ps"),
        (("--server_num=1", "--worker_num=2", "--gpus=0,1"), "ps"),
        (("--run_mode=ps", "--server_num=1", "--trainer_num=2"), "ps"),
        (("--servers=127.0.0.1:7000", "--workers=127.0.0.1"), "ps"),
        (("--server-num=1", "--worker-num=2", "--ips=127.0.0.1"), "ps"),
        (("--run_mode=collective",), "collective"),
    ],
)
def test_mode_by_parsed_values(flags: tuple[str, ...], mode: str) -> None:
    assert read(*flags).mode == mode


def test_script_arguments_do_not_choose_the_mode() -> None:
    """001-11: Paddle searched the joined command line for the names."""
    assert read("--gpus=0", script=(SCRIPT, "--servers=1", "--server_num=2")).mode == "collective"


def test_an_empty_list_is_not_given() -> None:
    assert read("--servers=", "--workers=").mode == "collective"


def test_both_modes_at_once_are_an_error() -> None:
    with pytest.raises(ConfigError, match="Only one mode"):
        read("--ips=10.0.0.1,10.0.0.2", "--server_num=1")
    with pytest.raises(ConfigError, match="exclude each other"):
        read("--run_mode=collective", "--server_num=1")


@pytest.mark.parametrize("mode", ["ps-heter", "rpc"])
def test_modes_of_paddle_that_are_not_here(mode: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=mode):
        read(f"--run_mode={mode}")


def test_unknown_modes() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'collective'"):
        read("--run_mode=colective")


def test_the_flags_found_are_reported_in_fleetruns_words() -> None:
    """002-20."""
    text = notes(read("--server_num=1", "--worker_num=2", "--gpus=0,1", num_gpus=8), "INFO")
    assert "Run parameter-sever mode. pserver arguments:['--worker_num', '--server_num'], cuda count:8" in text


def test_fleetruns_words_for_collective_jobs() -> None:
    """002-11."""
    expected = "Not found distinct arguments and compiled with cuda. Default use collective mode"
    assert expected in notes(read("--gpus=0,1", num_gpus=2))
    assert expected not in notes(read("--gpus=0,1"))
    text = notes(read("--ips=127.0.0.1", num_gpus=2), "INFO")
    assert "Run collective mode. gpu arguments:['--ips'], cuda count:2" in text


@pytest.mark.parametrize(
    ("flags", "style"),
    [
        ((), "launch"),
        (("--devices=0",), "launch"),
        (("--nnodes=1",), "launch"),
        (("--gpus=0",), "fleetrun"),
        (("--gpus=0", "--nnodes=1"), "launch"),
        (("--server_num=1", "--worker_num=1"), "fleetrun"),
        (("--server_num=1", "--trainer_num=1"), "launch"),
        (("--gpus=0", "--log_style=launch"), "launch"),
        (("--log_style=fleetrun",), "fleetrun"),
        (("--nproc_per_node=2",), "launch"),
    ],
)
def test_the_family_of_the_flags_chooses_the_style(flags: tuple[str, ...], style: str) -> None:
    """G1."""
    assert read(*flags).logs.style == style


def test_the_environment_does_not_choose_the_style() -> None:
    assert read(env={"PADDLE_IPS": "127.0.0.1"}).logs.style == "launch"


def test_a_tracker_with_a_wrong_name_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"^--tracker names 'tensorbord'.*Did you mean 'tensorboard'"):
        read("--tracker=csv, tensorbord")
    with pytest.raises(ConfigError, match=r"^FLEET_TRACKERS names 'jsn'.*Did you mean 'json'"):
        read(env={"FLEET_TRACKERS": "jsn"})
    assert read("--tracker=csv,json").logs.trackers == "csv,json"
    assert read("--tracker=other", "--no_python", script=("/bin/true",)).logs.trackers == "other"


def test_many_workers_on_few_processors_are_warned_of() -> None:
    text = notes(read("--nproc_per_node=100", num_cpus=2))
    assert text.startswith("100 workers on 2 processors: they take turns")
    assert notes(read("--nproc_per_node=8", num_cpus=2)) == ""
