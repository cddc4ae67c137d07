"""The facts about this machine that the launcher needs, in one record that tests can make up."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleet.launch.plan.interfaces import address_towards, own_address

_NVIDIA_SMI_LIMIT_S = 5.0


@dataclass(frozen=True)
class Card:
    """One visible card: ``index`` among the visible ones, ``name`` as CUDA_VISIBLE_DEVICES writes it."""

    index: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This machine: operating system, GPUs, processors, addresses.

    ``num_gpus`` counts the cards that exist; ``driver_problem`` says why none of them can be used, when that is so.
    ``owns`` answers whether an address or host name belongs to this machine, ``towards`` from which address this
    machine reaches a host and port.
    """

    system: str = "Linux"
    num_gpus: int = 0
    driver_problem: str = ""
    num_cpus: int = 1
    address: str = "127.0.0.1"
    owns: Callable[[str], bool] = lambda host: host in ("127.0.0.1", "localhost")
    towards: Callable[[str, int], str | None] = lambda host, port: None

    def visible_cards(self, visible: str | None) -> list[Card]:
        """Returns the cards CUDA shows: all when ``visible`` is None; else its entries up to the first invalid one."""
        if visible is None:
            return [Card(i, f"{i}") for i in range(self.num_gpus)]
        cards: list[Card] = []
        for entry in (part.strip() for part in visible.split(",")):
            valid = int(entry) < self.num_gpus if entry.isdecimal() else entry.startswith(("GPU-", "MIG-"))
            if not valid:
                break
            cards.append(Card(len(cards), entry))
        return cards if self.num_gpus else []


def read_machine(root: Path = Path("/")) -> Machine:
    """Returns this machine's record; asks the kernel's files and, failing that, nvidia-smi. Never imports torch."""
    num_gpus, problem = count_gpus(root)
    return Machine(
        system=platform.system(),
        num_gpus=num_gpus,
        driver_problem=problem,
        num_cpus=os.cpu_count() or 1,
        address=own_address(),
        owns=owns_address,
        towards=address_towards,
    )


def count_gpus(root: Path = Path("/"), list_gpus: Callable[[], int | None] | None = None) -> tuple[int, str]:
    """Returns the number of NVIDIA cards and, when cards exist and none can be used, the reason.

    A container sees only the ``/dev/nvidiaN`` files it was given, while ``/proc/driver/nvidia/gpus`` lists every card
    of the host, so the device files come first. Without the driver's files nvidia-smi is asked (Windows Subsystem for
    Linux has nothing else), then the PCI bus, which shows a card even when its driver is not loaded.
    """
    nodes = [path for path in _children(root / "dev") if re.fullmatch(r"nvidia[0-9]+", path.name)]
    if nodes:
        return len(nodes), ""
    cards = _children(root / "proc/driver/nvidia/gpus")
    if cards:
        return len(cards), (
            f"the driver lists {len(cards)} GPUs, but none has a device file (/dev/nvidia0); a "
            "container has to be given them, for example with docker run --gpus all"
        )
    found = (list_gpus or _nvidia_smi)()
    if found:
        return found, ""
    silent = sum(1 for device in _children(root / "sys/bus/pci/devices") if _is_nvidia_gpu(device))
    return silent, f"the PCI bus shows {silent} NVIDIA GPUs, but their driver is not loaded here" if silent else ""


def _is_nvidia_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    # 0x10de is NVIDIA, and classes that begin with 0x03 are display controllers.
    return vendor == "0x10de" and kind.startswith("0x03")


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _nvidia_smi() -> int | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return sum(1 for line in done.stdout.splitlines() if line.startswith("GPU "))


def owns_address(host: str) -> bool:
    """Returns whether ``host`` (address or name) belongs to this machine: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        # UnicodeError: the text is no host name, for example because a part of it is too long.
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False
