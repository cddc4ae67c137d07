"""Looking at a machine through files that a test makes up."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from fleet.launch.plan.local_machine import count_gpus, owns_address, read_machine


def touch(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def none() -> None:
    return None


def test_device_files_count(tmp_path: Path) -> None:
    """000-15: a container given two of four cards has two."""
    touch(tmp_path, "dev/nvidia0", "dev/nvidia3", "dev/nvidiactl", "dev/nvidia-uvm")
    touch(tmp_path, *(f"proc/driver/nvidia/gpus/0000:0{i}/information" for i in range(4)))
    assert count_gpus(tmp_path, none) == (2, "")


def test_cards_without_device_files_are_a_problem(tmp_path: Path) -> None:
    touch(tmp_path, "proc/driver/nvidia/gpus/0000:01/information")
    count, problem = count_gpus(tmp_path, none)
    assert count == 1
    assert "has a device file" in problem


def test_a_card_without_its_driver_is_a_problem(tmp_path: Path) -> None:
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x8086", "0x030000")):
        folder = touch(tmp_path, f"sys/bus/pci/devices/{name}/vendor") / f"sys/bus/pci/devices/{name}"
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    count, problem = count_gpus(tmp_path, none)
    assert count == 1
    assert "driver is not loaded" in problem


def test_nothing_is_nothing_and_nvidia_smi_is_asked_last(tmp_path: Path) -> None:
    assert count_gpus(tmp_path, none) == (0, "")
    assert count_gpus(tmp_path, lambda: 3) == (3, "")


def test_this_machine_is_read_without_torch() -> None:
    machine = read_machine()
    assert machine.num_cpus >= 1
    assert machine.owns(machine.address)
    assert machine.system in ("Linux", "Darwin", "Windows")
    assert sys.version_info >= (3, 10)


def test_an_address_is_own_when_a_socket_can_be_bound_to_it() -> None:
    assert owns_address("127.0.0.1")
    assert owns_address("localhost")
    assert not owns_address("192.0.2.77")
    assert not owns_address("no-such-host.example")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert owns_address("127.0.0.1")
