"""The arguments of fleet.integrations.ray.launch: what is taken and what is refused, before Ray is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet.errors import ConfigError, LaunchError, UnsupportedOptionError
from fleet.integrations._ray_request import RayRequest, read_request
from fleet.integrations.ray import launch
from tests.helpers.workers import free_ports

DEFAULTS: dict[str, Any] = {
    "script": "train.py",
    "args": (),
    "nodes": 2,
    "nproc_per_node": None,
    "resources_per_node": None,
    "placement_strategy": "SPREAD",
    "flags": (),
    "env": None,
    "working_dir": None,
    "address": None,
    "timeout_s": 5,
}


def read(**given: Any) -> RayRequest:
    return read_request(**{**DEFAULTS, **given})


def test_what_is_taken() -> None:
    found = read(
        script=Path("my train.py"),
        args=["--nodes=3", "", "-x"],
        nproc_per_node=3,
        flags=["--max-restart", "3", "--log_dir=here", "--preempt_grace=20"],
        env={"NCCL_DEBUG": "INFO", "PADDLE_PG_TIMEOUT": "5", "MINE": ""},
    )
    assert (found.script, found.args) == ("my train.py", ("--nodes=3", "", "-x"))
    assert found.flags == ("--max_restart=3", "--preempt_grace=20")
    assert (found.log_dir, found.ending_s) == ("here", 50.0)
    assert read(env={"PET_SHUTDOWN_TIMEOUT": "2"}).ending_s == 2.0
    assert found.resources == {"CPU": 3.0}
    assert read().resources == {"CPU": 1.0}
    assert read(resources_per_node={"CPU": 2, "GPU": 0, "wheels": 0.5}).resources == {"CPU": 2.0, "wheels": 0.5}
    assert read(script="package.train", flags=["-m"]).flags == ("--module=true",)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"script": ""}, "script is ''"),
        ({"script": 3}, "script is 3; it takes the path"),
        ({"script": b"train.py"}, "script is b'train.py'"),
        ({"args": "--epochs=3"}, r"args is '--epochs=3'; it takes a list of texts"),
        ({"args": [3]}, "args holds 3; .* Write '3'"),
        ({"args": ["a\0b"]}, "zero byte"),
        ({"nodes": 0}, "nodes is 0; it takes a number from 1"),
        ({"nodes": True}, "nodes is True"),
        ({"nodes": 2.0}, "nodes is 2.0"),
        ({"nproc_per_node": "2"}, "nproc_per_node is '2'"),
        ({"resources_per_node": [1]}, r"resources_per_node is \[1\]; it takes a dictionary"),
        ({"resources_per_node": {"gpu": 1}}, "Did you mean 'GPU'"),
        ({"resources_per_node": {"GPU": 0.5}}, "takes whole GPUs"),
        ({"resources_per_node": {"CPU": -1}}, r"resources_per_node\['CPU'\] is -1"),
        ({"resources_per_node": {"CPU": float("nan")}}, r"resources_per_node\['CPU'\] is nan"),
        ({"resources_per_node": {"CPU": 0}}, "by at least one resource"),
        ({"resources_per_node": {3: 1}}, "has the key 3"),
        ({"placement_strategy": "SPRED"}, "placement_strategy is 'SPRED'.*Did you mean 'SPREAD'"),
        ({"placement_strategy": None}, "placement_strategy is None"),
        ({"flags": ["--nnodes=2"]}, "--nnodes is a flag that fleet.integrations.ray sets.*Omit it"),
        ({"flags": ["--node-rank=0"]}, "--rank is a flag"),
        ({"flags": ["--nproc_per_node=2"]}, "--nproc_per_node is a flag.*Write nproc_per_node=N"),
        ({"flags": ["--gpus=0"]}, "--gpus is a flag.*resources_per_node"),
        ({"flags": ["--server_num=1"]}, "--server_num with nodes=2.*Ray chooses the nodes"),
        ({"flags": ["other.py"]}, "flags is .*takes flags of the launcher alone"),
        ({"flags": ["--epochs=3"]}, "unrecognized arguments: --epochs=3"),
        ({"flags": ["--"]}, "flags of the launcher alone"),
        ({"env": ["A=1"]}, "env is .*takes a dictionary"),
        ({"env": {"A": 1}}, r"env\['A'\] is 1; it takes a text. Write '1'"),
        ({"env": {"A=B": "1"}}, "env has the key 'A=B'"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "the GPUs of a bundle are Ray's choice"),
        ({"env": {"RANK": "0"}}, "env has RANK.*the launcher sets that"),
        ({"env": {"PET_NNODES": "3"}}, "env has PET_NNODES.*--nnodes sets that"),
        ({"working_dir": ""}, "working_dir is ''"),
        ({"working_dir": "no/such"}, "working_dir is 'no/such', which does not exist"),
        ({"address": 5}, "address is 5"),
        ({"timeout_s": -1}, "timeout_s is -1"),
        ({"timeout_s": "5"}, "timeout_s is '5'"),
    ],
)  # fmt: skip
def test_what_is_refused(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        read(**given)


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "localhost:99999"])
def test_an_address_where_nothing_answers(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONBREAKPOINT", "RAY_CLIENT_MODE"):  # Ray sets them
        monkeypatch.setenv(name, "0")
    shown = address.format(port=free_ports(1)[0])
    with pytest.raises(LaunchError, match=f"address='{shown}': nothing answers there.*ray status"):
        launch("train.py", address=shown)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.integrations.ray.find_spec", lambda name: None)
    with pytest.raises(UnsupportedOptionError, match=r"pip install '\.\[ray\]'"):
        launch("train.py")
