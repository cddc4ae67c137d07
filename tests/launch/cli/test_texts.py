"""The launcher's texts: blocks, tables, lines, the copy command, files."""

from __future__ import annotations

import io
import json
import re
import shlex
import stat
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from fleet.launch.cli import texts as _texts
from fleet.launch.cli.texts import write_job_files
from fleet.launch.plan.process_plan import SERVER_ROWS, WORKER_ROWS
from fleet.launch.plan.records import ProcessSpec
from fleet.launch.processes.logs import LaunchLog
from tests.helpers.launching import SCRIPT, peer_of, plan, read

SEED_NAMES = {
    "devices",
    "elastic_level",
    "elastic_timeout",
    "gloo_port",
    "host",
    "job_id",
    "legacy",
    "log_dir",
    "log_level",
    "master",
    "max_restart",
    "nnodes",
    "nproc_per_node",
    "rank",
    "run_mode",
    "server_num",
    "servers",
    "trainer_num",
    "trainers",
    "training_script",
    "training_script_args",
    "with_gloo",
}


def test_the_configuration_block() -> None:
    """000-10: names in alphabetical order, None or an empty text for what was not given."""
    head, *lines, foot = _texts.configuration_lines(read("--devices=0,1", script=(SCRIPT, "--lr", "1"), num_gpus=2))
    assert head == "-----------  Configuration  ----------------------"
    assert foot == "-" * 50
    values = dict(line.split(": ", 1) for line in lines)
    assert list(values) == sorted(values)
    assert set(values) >= SEED_NAMES
    assert (values["host"], values["servers"], values["devices"], values["nnodes"]) == ("None", "", "0,1", "1")
    assert (values["training_script"], values["training_script_args"]) == (SCRIPT, "['--lr', '1']")
    assert (values["rank"], values["with_gloo"], values["run_mode"]) == ("-1", "0", "collective")


def test_fleetruns_block() -> None:
    """002-11."""
    head, *lines, foot = _texts.fleetrun_lines(read("--gpus=0,1"))
    assert (head, foot) == ("-----------  Configuration Arguments -----------", "-" * 48)
    assert [line.split(": ")[0] for line in lines] == [
        "gpus",
        "heter_worker_num",
        "heter_workers",
        "http_port",
        "ips",
        "log_dir",
        "nproc_per_node",
        "server_num",
        "servers",
        "training_script",
        "training_script_args",
        "worker_num",
        "workers",
    ]
    assert "ips: 127.0.0.1" in lines
    assert "gpus: 0,1" in lines
    assert _texts.fleetrun_lines(read("--devices=0")) == []


@pytest.mark.parametrize(
    ("flags", "current", "expected"),
    [
        ((), None, "Job: default, mode collective, replicas 1[1:1], elastic False"),
        (("--nnodes=3", "--job_id=J"), 3, "Job: J, mode collective, replicas 3[3:3], elastic False"),
        (
            ("--nnodes=2:4", "--master=etcd://127.0.0.1:1", "--job_id=J", "--elastic_level=1"),
            3,
            "Job: J, mode collective, replicas 3[2:4], elastic True",
        ),
        (("--server_num=1", "--worker_num=1"), None, "Job: default, mode ps, replicas 1[1:1], elastic False"),
    ],
)
def test_the_job_line(flags: tuple[str, ...], current: int | None, expected: str) -> None:
    """000-11, 000-12, 000-13."""
    assert _texts.job_line(read(*flags), current) == expected


def test_the_pod_lines() -> None:
    """000-11, 000-14, 000-15: replicas of a pod counts its processes."""
    config = read("--nproc_per_node=3")
    specs = plan(config)
    assert re.fullmatch(r"Run Pod: [a-z]{6}, replicas 3, status ready", _texts.run_pod_line(config, specs))
    assert re.fullmatch(r"Watching Pod: [a-z]{6}, replicas 3, status running", _texts.watching_pod_line(config, specs))


def test_the_copy_command_holds_the_original_arguments() -> None:
    """000-05."""
    args = ("--nnodes=2", "--gpus", "1, 3")
    config = read(*args, script=(SCRIPT, "--name", "two words"))
    sentence, rule, command, end = _texts.copy_command_lines(config, "10.0.0.1:6000")
    assert sentence == "Copy the following command to other nodes to run."
    assert rule == end == "-" * 80
    words = shlex.split(command)
    assert words[0] == f"FLEET_JOB_SECRET={config.pod.secret}"
    assert words[1:6] == ["python", "-m", "fleet.launch", "--master", "10.0.0.1:6000"]
    assert words[6:] == [*args, SCRIPT, "--name", "two words"]


def test_the_copy_command_names_the_file_of_the_secret() -> None:
    """Where standard output may end up in a file."""
    config = read("--nnodes=2")
    lines = _texts.copy_command_lines(config, "[fd00::1]:6000", Path("/tmp/x/secret"))
    assert lines[2].startswith(
        'FLEET_JOB_SECRET="$(cat /tmp/x/secret 2>/dev/null || ssh fd00::1 cat /tmp/x/secret)" python'
    )
    assert "reads the job's secret from /tmp/x/secret of this machine, from another one by ssh;" in lines[0]
    assert config.pod.secret not in "".join(lines)


def test_the_copy_command_refers_to_a_secret_of_the_user() -> None:
    config = read("--nnodes=2", "--rank=0", env={"FLEET_JOB_SECRET": "ab" * 16})
    lines = _texts.copy_command_lines(config, "10.0.0.1:6000")
    assert lines[2].startswith('FLEET_JOB_SECRET="$FLEET_JOB_SECRET" python')
    assert lines[0].endswith("run. FLEET_JOB_SECRET has to have there the value that it has here.")
    assert lines[4] == "On each node change what belongs to this one: --rank."


def test_the_collective_table_and_messages() -> None:
    """002-11: five rows, then where to look."""
    config = read("--gpus=0,1")
    start, where = _texts.start_messages(config, plan(config))
    assert start.startswith("Local start 2 processes. First process distributed environment info (Only For Debug): \n")
    rows = [line for line in start.splitlines() if line.startswith("    |")]
    assert rows[0] == "    |                        Distributed Envs                      Value                    |"
    assert len(rows) == 6
    assert rows[1] == "    |                 PADDLE_CURRENT_ENDPOINT                 127.0.0.1:7000                |"
    assert {len(line) for line in start.splitlines() if line.startswith("    ")} == {93}
    assert where == (
        "details abouts PADDLE_TRAINER_ENDPOINTS can be found in log/endpoints.log, and detail running "
        "logs maybe found in log/workerlog.0"
    )
    config = read("--devices=0,1")
    assert _texts.start_messages(config, plan(config)) == []


def test_the_tables_of_a_parameter_server_job() -> None:
    """002-20: 11 and 14 rows, exactly the documented names."""
    config = read("--server_num=1", "--worker_num=2", "--gpus=0,1", num_gpus=2)
    server, worker, _ = _texts.start_messages(config, plan(config))
    for text, role, count, names in ((server, "server", 1, SERVER_ROWS), (worker, "worker", 2, WORKER_ROWS)):
        assert text.startswith(f"Local {role} start {count} processes.")
        rows = [line.strip(" |").split() for line in text.splitlines() if line.startswith("    |")][1:]
        assert [row[0] for row in rows] == list(names)
    assert "..." in worker or "127.0.0.1:7000,127.0.0.1:7001" in worker


def test_long_values_keep_their_end() -> None:
    config = read("--gpus=0,1", "--nproc_per_node=5")
    text = _texts.start_messages(config, plan(config))[0]
    assert "... " in text
    assert "127.0.0.1:7004|" in text


def test_endpoints_log() -> None:
    """002-12."""
    text = _texts.endpoints_log(plan(read("--gpus=0,1")))
    assert text == "PADDLE_TRAINER_ENDPOINTS: \n127.0.0.1:7000\n127.0.0.1:7001\n"


def test_the_files_hold_only_the_launchers_variables() -> None:
    """Decision 9."""
    env = {"MY_OWN": "x", "PADDLE_ENV_LIMIT_LEN": "100"}
    spec = plan(read("--nproc_per_node=9", env=env), env=env)[1]
    lines = _texts.environment_log(spec).splitlines()
    assert lines == sorted(lines)
    assert "PADDLE_TRAINER_ID=1" in lines
    data = json.loads(_texts.backup_environment(spec))
    assert data["PADDLE_TRAINER_ENDPOINTS"].count(":") == 9
    assert data["PADDLE_TRAINER_ID"] == "1"
    assert "MY_OWN" not in data
    assert not any("MY_OWN" in line for line in lines)


PLANTED = "s3cr3tPlantedValue"


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus=0,1",),
        ("--server_num=1", "--worker_num=2"),
        ("--nnodes=2",),
        ("--devices=0", "--backend=gloo"),
        ("--nnodes=2", f"--master=etcd://me:{PLANTED}@127.0.0.1:2379"),
        ("--nnodes=2", f"--master=etcd://me:{PLANTED}/{PLANTED}@127.0.0.1:2379"),
        ("--elastic_server=10.0.0.1:2379", "--np=2", f"--elastic_pre_hook=API_TOKEN={PLANTED} ./hook"),
        (f"--auto_tuner_json=PASSWORD={PLANTED}", "--log_style=fleetrun"),
    ],
)
def test_no_text_and_no_file_holds_a_secret(flags: tuple[str, ...]) -> None:
    """Secrets: planted in the environment, the proxies, the flags and the script's arguments."""
    env = {
        "AWS_SECRET_ACCESS_KEY": PLANTED,
        "WANDB_API_KEY": PLANTED,
        "http_proxy": f"http://me:{PLANTED}@127.0.0.9:80",
    }
    script = (SCRIPT, f"--api_key={PLANTED}", "--hf-token", PLANTED, f"DB_PASSWORD={PLANTED}")
    config = read(*flags, script=script, env=env)
    specs = plan(config, [peer_of(config)], env=env)
    with redirect_stderr(io.StringIO()) as terminal:
        _texts.announce(config, LaunchLog("DEBUG"))
    texts = [
        terminal.getvalue(),
        *_texts.configuration_lines(config),
        *_texts.fleetrun_lines(config),
        *_texts.start_messages(config, specs),
        _texts.job_line(config),
        _texts.run_pod_line(config, specs),
        _texts.watching_pod_line(config, specs),
        _texts.endpoints_log(specs),
        repr(config.pod.secret_is_users),
        _texts.node_line(config, "127.0.0.1", 0),
    ]
    for spec in specs:
        texts += [_texts.environment_log(spec), _texts.backup_environment(spec)]
        texts.append(_texts.environment_table(spec, sorted(spec.environment)))
    for text in texts:
        assert PLANTED not in text
        assert config.pod.secret not in text or not config.pod.secret


def test_the_file_gets_block_and_notes_and_the_terminal_the_warnings(tmp_path: Path) -> None:
    """000-10, 002-11: LAUNCH INFO date time,ms in front of each line, the notes after the block."""
    log = LaunchLog("INFO")
    log.open_file(tmp_path / "pod.log")
    config = read("--gpus=0,1")
    with redirect_stderr(io.StringIO()) as terminal:
        _texts.announce(config, log)
    log.close()
    lines = (tmp_path / "pod.log").read_text().splitlines()
    assert re.fullmatch(r"LAUNCH INFO \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} -{11}  Configuration  -{22}", lines[0])
    assert "-----------  Configuration Arguments -----------" in lines
    assert any("OMP_NUM_THREADS is not set" in line for line in lines)
    (shown,) = terminal.getvalue().splitlines()
    assert shown.startswith("LAUNCH WARNING")
    assert "no GPU" in shown
    with redirect_stderr(io.StringIO()) as terminal:
        _texts.announce(config, LaunchLog("INFO", verbose=True))
    assert len(terminal.getvalue().splitlines()) == len(lines)


def test_of_many_warnings_the_first_are_shown() -> None:
    flags = ("--legacy=1", "--auto_tuner_json=x", "--monitor_interval=1", "--start_method=fork", "--role=trainer")
    with redirect_stderr(io.StringIO()) as terminal:
        _texts.announce(read(*flags), LaunchLog("INFO"))
    lines = terminal.getvalue().splitlines()
    assert len(lines) == 4
    assert re.search(r"2 more warnings are in log/default\.[a-z]{6}\.log", lines[-1])


def test_files_hold_only_the_launchers_variables(tmp_path: Path) -> None:
    spec = ProcessSpec(
        role="worker",
        index=1,
        local_index=0,
        command=("python",),
        log_path=tmp_path / "workerlog.0",
        environment={"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINER_ENDPOINTS": "a:1,b:2", "FLEET_JOB_SECRET": "hidden"},
        overflow={"LONG": "x" * 10},
        backup_path=tmp_path / "backup_env.1.json",
        environment_log_path=tmp_path / "envlog.0",
    )
    write_job_files(tmp_path, [spec])
    assert (tmp_path / "endpoints.log").read_text().split() == ["PADDLE_TRAINER_ENDPOINTS:", "a:1", "b:2"]
    assert "PADDLE_TRAINER_ID=1" in (tmp_path / "envlog.0").read_text()
    assert json.loads((tmp_path / "backup_env.1.json").read_text())["LONG"] == "x" * 10
    for path in tmp_path.iterdir():
        assert "hidden" not in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) & 0o137 == 0


def test_no_process_no_file(tmp_path: Path) -> None:
    write_job_files(tmp_path, [])
    assert list(tmp_path.iterdir()) == []
