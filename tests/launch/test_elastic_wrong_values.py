"""Every flag and variable of elastic jobs set to a wrong value: an error that names it, before anything is opened."""

from __future__ import annotations

import pytest

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.launch.cli.elastic import check_elastic
from fleet.launch.cli.elastic_command import main
from tests.helpers import etcd
from tests.helpers.launching import read

SERVER = "10.0.0.1:2379"
OLDER = {"elastic_server": SERVER, "np": "2", "job_id": "J"}
NEWER = {"nnodes": "2:4", "master": f"etcd://{SERVER}", "job_id": "J", "elastic_level": "1"}


def flags(given: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in given.items()]


@pytest.mark.parametrize(
    ("family", "name", "value", "rule"),
    [
        (OLDER, "elastic_server", "", "takes ip:port"),
        (OLDER, "elastic_server", "10.0.0.1", "a port from 1 to 65535"),
        (OLDER, "elastic_server", "10.0.0.1:99999", "a port from 1 to 65535"),
        (OLDER, "np", "0", "MIN <= MAX"),
        (OLDER, "np", "4:2", "MIN <= MAX"),
        (OLDER, "np", "2.5", "integer"),
        (OLDER, "job_id", "a/b", "takes letters, digits"),
        (OLDER, "job_id", "a" * 201, "takes 200 at most"),
        (OLDER, "scale", "x", "integer"),
        (OLDER, "scale", "-1", "from 0"),
        (OLDER, "force", "maybe", "true or false"),
        (OLDER, "elastic_pre_hook", "a | b", "into a script"),
        (OLDER, "elastic_pre_hook", "'", "quotes do not match"),
        (OLDER, "elastic_timeout", "-1", "seconds, 0 or more"),
        (NEWER, "nnodes", "4:2", "MIN <= MAX"),
        (NEWER, "master", "etc://10.0.0.1:1", "etcd://ip:port"),
        (NEWER, "elastic_level", "2", "one of -1, 0, 1"),
        (NEWER, "elastic_timeout", "nan", "seconds, 0 or more"),
        (NEWER, "max_restart", "-1", "from 0"),
        ({}, "heartbeat_timeout", "-1", "seconds, 0 or more"),
        ({}, "heartbeat_timeout", "inf", "seconds, 0 or more"),
        ({}, "preempt_grace", "x", "seconds, 0 or more"),
        ({}, "preempt_grace", "-1", "seconds, 0 or more"),
        ({"server_num": "1", "worker_num": "1"}, "preempt_grace", "5", "Omit it"),
    ],
)
def test_a_flag(family: dict[str, str], name: str, value: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*flags({**family, name: value}))
    assert all(part in f"{caught.value}" for part in (f"--{name}", value, rule)), caught.value


FILE = __file__  # any file that exists
HOST, PORT = "PADDLE_ELASTIC_ETCD_SERVICE_HOST", "PADDLE_ELASTIC_ETCD_SERVICE_PORT"
NP = {"PADDLE_ELASTIC_NP": "2"}


@pytest.mark.parametrize(
    ("family", "env", "said"),
    [
        ({}, {"PADDLE_ELASTIC_SERVER": "nonsense", **NP}, "PADDLE_ELASTIC_SERVER has 'nonsense'"),
        ({}, {"PADDLE_ELASTIC_SERVER": SERVER, "PADDLE_ELASTIC_NP": "x"}, "PADDLE_ELASTIC_NP is 'x'"),
        ({}, {"PADDLE_ELASTIC_SERVER": SERVER}, "PADDLE_ELASTIC_SERVER needs --np"),
        ({}, NP, "PADDLE_ELASTIC_NP needs --elastic_server"),
        ({}, {HOST: "10.0.0.1", **NP}, f"{HOST} is '10.0.0.1' and {PORT} None"),
        ({}, {HOST: "10.0.0.1", PORT: "x", **NP}, f"{PORT} is 'x'"),
        ({}, {HOST: "10.0.0.1", PORT: "99999", **NP}, f"{PORT} has '10.0.0.1:99999'"),
        (OLDER, {"PADDLE_ELASTIC_SCALE": "-3"}, "PADDLE_ELASTIC_SCALE is -3"),
        (OLDER, {"PADDLE_ELASTIC_FORCE": "perhaps"}, "PADDLE_ELASTIC_FORCE is 'perhaps'"),
        (OLDER, {"PADDLE_ELASTIC_TIMEOUT": "x"}, "PADDLE_ELASTIC_TIMEOUT is 'x'"),
        (OLDER, {"PADDLE_ELASTIC_TTL": "x"}, "PADDLE_ELASTIC_TTL is 'x'"),
        (OLDER, {"PADDLE_ELASTIC_TTL": "1"}, "PADDLE_ELASTIC_TTL is 1"),
        (OLDER, {"PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "x"}, "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL is 'x'"),
        (OLDER, {"FLEET_JOB_SECRET": "zz"}, "FLEET_JOB_SECRET"),
        (OLDER, {"FLEET_ETCD_USER": "u"}, "FLEET_ETCD_USER and FLEET_ETCD_PASSWORD"),
        (OLDER, {"FLEET_ETCD_CA": "/no/such"}, "FLEET_ETCD_CA is '/no/such'"),
        (OLDER, {"FLEET_ETCD_CERT": FILE}, "FLEET_ETCD_CERT and FLEET_ETCD_KEY belong together"),
        (OLDER, {"FLEET_ETCD_CERT": FILE, "FLEET_ETCD_KEY": FILE}, "FLEET_ETCD_CA is not"),
        ({"elastic_server": SERVER, "np": "2"}, {"PADDLE_ELASTIC_JOB_ID": "a b"}, "PADDLE_ELASTIC_JOB_ID is 'a b'"),
        ({}, {"FLEET_HEARTBEAT_TIMEOUT": "-2"}, "FLEET_HEARTBEAT_TIMEOUT is '-2'"),
        ({}, {"FLEET_PREEMPT_GRACE": "x"}, "FLEET_PREEMPT_GRACE is 'x'"),
    ],
)
def test_a_variable(family: dict[str, str], env: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.launch.membership.etcd_address.find_spec", lambda name: True)
    with pytest.raises(ConfigError) as caught:
        check_elastic(read(*flags(family), env=env), Environment(env))
    assert said in f"{caught.value}"


@pytest.mark.skipif(bool(etcd.missing()), reason=etcd.missing())
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explode", "--job_id=J"), "invalid choice: 'explode'"),
        (("scale", "--job_id=J", "--np=x"), "--np is 'x'"),
        (("scale", "--job_id=J"), "scale needs the number of nodes"),
        (("status", "--job_id=a/b"), "--job_id is 'a/b'"),
        (("status",), "--job_id=NAME"),
        (("status", "--job_id=J", "--elastic_server=nonsense"), "--elastic_server has 'nonsense'"),
        (("status", "--job_id=J", "--elastic_server="), "--elastic_server=ip:port"),
    ],
)
def test_an_argument_of_the_command(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("etcd was asked")

    monkeypatch.setattr("fleet.launch.membership.etcd.EtcdStore._call", opened)
    given = (
        words if any(word.startswith("--elastic_server") for word in words) else (*words, f"--elastic_server={SERVER}")
    )
    assert main(given, {}) == 2
    assert said in capsys.readouterr().err
