"""Which card each worker gets."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.launch.plan.local_machine import Machine
from fleet.launch.plan.records import LaunchConfig
from tests.helpers.launching import notes, read

VISIBLE = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def selected(config: LaunchConfig) -> tuple[str, ...]:
    return config.processes.worker_devices


def test_devices_are_absolute_and_handed_on_relative_to_the_visible_ones() -> None:
    """000-17."""
    config = read("--devices=6,7", env=VISIBLE, num_gpus=8)
    assert (config.processes.device_names, selected(config), config.processes.num_workers) == (
        ("6", "7"),
        ("2", "3"),
        2,
    )
    assert (config.processes.device_type, config.processes.process_group_backend) == ("gpu", "nccl")
    assert selected(read("--devices=6,7", num_gpus=8)) == ("6", "7")


@pytest.mark.parametrize(
    ("flag", "visible", "message"),
    [
        ("--devices=0", "4,5", "card 0 is hidden by CUDA_VISIBLE_DEVICES='4,5'"),
        ("--gpus=9", None, "card 9 does not exist; this machine has 8"),
        ("--gpus=0", "", "card 0 is hidden"),
        ("--gpus=0", "GPU-aa,GPU-bb", "names them by identifier"),
        ("--gpus=0,0", None, "twice"),
        ("--gpus=a", None, "card numbers"),
        ("--gpus=-1", None, "card numbers"),
        ("--gpus=", None, "card numbers"),
        ("--gpus=0,,1", None, "card numbers"),
    ],
)
def test_cards_that_are_hidden_or_absent_are_errors(flag: str, visible: str | None, message: str) -> None:
    """000-17, decision 6: a GPU that exists and cannot be used is an error."""
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(ConfigError, match=message):
        read(flag, env=env, num_gpus=8)


def test_spaces_in_the_list_are_tolerated() -> None:
    """003-01."""
    assert selected(read("--gpus=1, 3", num_gpus=4)) == ("1", "3")
    assert selected(read("--gpus", " 1 ,3 ", num_gpus=4)) == ("1", "3")


def test_every_visible_card_is_the_default() -> None:
    """003-02, 000-15: one process per card."""
    config = read(num_gpus=4)
    assert (config.processes.num_workers, selected(config)) == (4, ("0", "1", "2", "3"))
    assert selected(read(env=VISIBLE, num_gpus=8)) == ("0", "1", "2", "3")
    assert read(env=VISIBLE, num_gpus=8).processes.device_names == ("4", "5", "6", "7")
    assert selected(read(env={"CUDA_VISIBLE_DEVICES": "GPU-aa"}, num_gpus=8)) == ("0",)
    hidden = read(env={"CUDA_VISIBLE_DEVICES": ""}, num_gpus=8)
    assert (hidden.processes.device_type, hidden.processes.num_workers) == ("cpu", 1)


def test_gpus_on_a_machine_without_any_start_cpu_processes_with_a_warning() -> None:
    """Decision 6, 002-10: the quick start runs on a laptop, with every variable of the contract."""
    config = read("--gpus=0,1")
    assert (config.processes.num_workers, config.processes.device_type, config.processes.process_group_backend) == (
        2,
        "cpu",
        "gloo",
    )
    assert "this machine has no GPU; the workers run on the CPU" in notes(config)
    assert selected(config) == ("0", "1")


def test_a_broken_driver_is_an_error_when_gpus_are_asked_for() -> None:
    """Decision 6."""
    for flag in ("--gpus=0", "--nproc_per_node=gpu"):
        with pytest.raises(ConfigError, match="driver is not loaded"):
            read(flag, num_gpus=2, driver_problem="their driver is not loaded")
    config = read(num_gpus=2, driver_problem="their driver is not loaded")
    assert (config.processes.device_type, config.processes.num_workers) == ("cpu", 1)
    assert "their driver is not loaded" in notes(config)


@pytest.mark.parametrize(
    ("text", "num_gpus", "workers"),
    [("auto", 4, 4), ("auto", 0, 6), ("gpu", 4, 4), ("cpu", 4, 6), ("3", 4, 3), ("3", 0, 3)],
)
def test_processes_per_node_as_torchrun_counts_them(text: str, num_gpus: int, workers: int) -> None:
    config = read(f"--nproc-per-node={text}", num_gpus=num_gpus, num_cpus=6)
    assert config.processes.num_workers == workers
    assert config.processes.device_type == ("gpu" if num_gpus and text != "cpu" else "cpu")


@pytest.mark.parametrize("text", ["0", "-1", "gpus", "1.5", ""])
def test_other_numbers_of_processes_are_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="number from 1, auto, gpu or cpu"):
        read(f"--nproc_per_node={text}")


def test_more_processes_than_cards_share_them_with_gloo() -> None:
    config = read("--devices=2,3", "--nproc_per_node=5", num_gpus=4)
    assert selected(config) == ("2", "3", "2", "3", "2")
    assert config.processes.process_group_backend == "gloo"
    assert "share them in turn, with gloo" in notes(config)
    with pytest.raises(ConfigError, match="nccl needs a GPU for each"):
        read("--devices=2,3", "--nproc_per_node=5", "--backend=nccl", num_gpus=4)


def test_one_process_may_have_several_cards() -> None:
    """C.4: the list is joined when one process has all."""
    assert selected(read("--devices=0,1", "--nproc_per_node=1", num_gpus=4)) == ("0,1",)
    assert selected(read("--nproc_per_node=1", num_gpus=4)) == ("0",)
    config = read("--devices=0,1,2", "--nproc_per_node=2", num_gpus=4)
    assert selected(config) == ("0", "1")
    assert "only the first 2" in notes(config)


def test_backends() -> None:
    assert read("--backend=gloo", num_gpus=2).processes.process_group_backend == "gloo"
    with pytest.raises(ConfigError, match="nccl needs GPUs"):
        read("--backend=nccl")
    with pytest.raises(UnsupportedOptionError, match="bkcl"):
        read("--backend=bkcl")
    with pytest.raises(ConfigError, match="Did you mean 'nccl'"):
        read("--backend=ncl")


def test_other_devices_and_contradictions_are_refused() -> None:
    for flag in ("--npus=0", "--xpus=0"):
        with pytest.raises(UnsupportedOptionError, match="no such backend"):
            read(flag)
    with pytest.raises(ConfigError, match="different cards"):
        read("--gpus=0", "--devices=1", num_gpus=2)
    with pytest.raises(ConfigError, match="exclude each other"):
        read("--gpus=0", "--nproc_per_node=cpu", num_gpus=2)
    config = read("--gpus=0", env={"PADDLE_DEVICES": "1"}, num_gpus=2)
    assert selected(config) == ("0",)
    assert "PADDLE_DEVICES=1 is ignored" in notes(config)


def test_visible_cards_end_at_the_first_invalid_entry() -> None:
    """As CUDA reads the variable."""
    assert [card.name for card in Machine(num_gpus=4).visible_cards("2, 0,9,1")] == ["2", "0"]
    assert Machine(num_gpus=4).visible_cards("-1") == []
    assert Machine(num_gpus=0).visible_cards("0") == []


@pytest.mark.parametrize("flag", ["gpus", "devices"])
def test_a_number_of_cards_is_noticed(flag: str) -> None:
    """Users of --nproc write a count; here it is the number of one card."""
    hint = f"--{flag} takes card numbers, not how many: for 2 workers write --nproc_per_node=2, or --{flag}=0,1."
    with pytest.raises(ConfigError, match=f"card 2 does not exist.*{hint}"):
        read(f"--{flag}=2", num_gpus=2)
    assert hint in notes(read(f"--{flag}=2", num_gpus=4))
    assert hint in notes(read(f"--{flag}=2"))
    for flags in ((f"--{flag}=1",), (f"--{flag}=2,3",), (f"--{flag}=2", "--nproc_per_node=1")):
        assert "not how many" not in notes(read(*flags, num_gpus=4))
