"""Nodes as network namespaces: each has its own address, and its cable can be pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def missing() -> str:
    """Returns why nodes cannot be namespaces here; empty when they can."""
    if shutil.which("ip") is None:
        return "needs the program ip (Debian: iproute2)"
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    name = f"fleet-try-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"network namespaces cannot be made here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return ""


class Network:
    """``count`` nodes 10.77.0.11, .12, ... on a bridge, and a hub 10.77.0.1 for what all of them need.

    Everything lies in namespaces of its own, so nothing of the machine's network changes. With ``named`` the nodes are
    called node1, node2, ..., and each has the /etc/hosts that Debian writes: its own name means 127.0.1.1.
    """

    def __init__(self, count: int, *, named: bool = False) -> None:
        self._named = named
        self._tag = f"fl{os.getpid() % 100000}"
        self._names = [f"{self._tag}hub", *(f"{self._tag}n{i}" for i in range(1, count + 1))]

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        hub = self._names[0]
        for name in self._names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "addr", "add", "10.77.0.1/24", "dev", "br0")
        _ip("-n", hub, "link", "set", "br0", "up")
        for i, name in enumerate(self._names[1:], start=1):
            _ip("-n", hub, "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", hub, "link", "set", f"v{i}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            if self._named:
                folder = Path("/etc/netns") / name
                folder.mkdir(parents=True)
                others = [f"{self.address(n)} node{n}" for n in range(1, len(self._names)) if n != i]
                (folder / "nsswitch.conf").write_text(
                    "hosts: files\n"
                )  # no waiting for a name server that is not there
                (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 node{i}", *others, ""]))

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    @staticmethod
    def address(node: int) -> str:
        """Returns the address of node 1, 2, ...; of the hub for 0."""
        return f"10.77.0.{10 + node}" if node else "10.77.0.1"

    def inside(self, node: int) -> list[str]:
        """Returns the words that run a command on a node; 0 is the hub."""
        words = ["ip", "netns", "exec", self._names[node]]
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"node{node}"]
        return [*words, *named] if self._named and node else words

    def pull_cable(self, node: int) -> None:
        """Cuts a node off silently: no connection is closed, packets just stop."""
        _ip("-n", self._names[0], "link", "set", f"v{node}", "down")

    def lose_route(self, node: int, to: int) -> None:
        """Lets packets from ``node`` to another one go nowhere, while it still reaches everybody else."""
        _ip("-n", self._names[node], "route", "add", "blackhole", f"{self.address(to)}/32")

    def find_route(self, node: int, to: int) -> None:
        """Undoes :meth:`lose_route`."""
        _ip("-n", self._names[node], "route", "del", "blackhole", f"{self.address(to)}/32")

    def plug_in(self, node: int) -> None:
        """Puts the cable back."""
        _ip("-n", self._names[0], "link", "set", f"v{node}", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
