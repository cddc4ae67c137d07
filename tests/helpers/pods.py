"""A small kubelet for tests: pods as local processes, with addresses and names of their own.

Each container's command runs with exactly the variables of its pod, and is started again as its restartPolicy says.
Names are resolved in one of two ways. On loopback every pod has an address of 127.0.0.0/8, and Python processes read
a file of names. In network namespaces (root and ``ip netns`` needed) every pod has an interface and an /etc/hosts of
its own, so that libraries in C++ resolve the names as well.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.helpers.sources import ROOT

LIMIT_S = 57.0
# Read by every Python that a loopback pod starts: names of the file win over those of the machine.
RESOLVER = """
import json, os, socket
_names = os.environ.get("TEST_HOSTS_FILE")
if _names:
    _getaddrinfo = socket.getaddrinfo
    def getaddrinfo(host, *args, **kwargs):
        with open(_names) as file:
            known = json.load(file)
        return _getaddrinfo(known.get(host, host), *args, **kwargs)
    socket.getaddrinfo = getaddrinfo
    _resolve = lambda address: (json.load(open(_names)).get(address[0], address[0]), *address[1:])
    class Socket(socket.socket):
        def bind(self, address): return super().bind(_resolve(address) if isinstance(address, tuple) else address)
        def connect(self, address): return super().connect(_resolve(address) if isinstance(address, tuple) else address)
    socket.socket = Socket
"""


class Loopback:
    """Addresses 127.0.77.N and a file of names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._hosts = folder / "hosts.json"
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(RESOLVER)
        self._write()

    def add(self, pod: str) -> str:
        """Gives a pod an address."""
        return self._addresses.setdefault(pod, f"127.0.77.{len(self._addresses) + 1}")

    def name(self, name: str, address: str) -> None:
        """Makes a name known to every pod."""
        self._names[name] = address
        self._write()

    def _write(self) -> None:
        temporary = self._hosts.with_suffix(".new")
        temporary.write_text(json.dumps(self._names))
        temporary.replace(self._hosts)

    def command(self, pod: str, command: list[str]) -> list[str]:
        """Returns the command that runs ``command`` in the pod."""
        return command

    def variables(self) -> dict[str, str]:
        """Returns what processes need to find the names."""
        return {"TEST_HOSTS_FILE": str(self._hosts), "PYTHONPATH": f"{self._folder / 'site'}:{ROOT}"}

    def close(self) -> None:
        """Has nothing to remove."""


def namespaces_work() -> str:
    """Returns why pods cannot have network namespaces here; empty when they can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the command ip"
    name = f"fleet{os.getpid() % 100000}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=10)
    if made.returncode:
        return f"ip netns add failed: {made.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)
    return ""


class Namespaces:
    """A network namespace for each pod, all on one bridge that lies in a namespace too; 10.77.0.N.

    What all pods need (etcd) runs in the bridge's namespace: words that enter it are ``inside_hub``, at ``HUB``.
    """

    HUB = "10.77.0.250"

    def __init__(self, folder: Path) -> None:
        self._mark = f"fl{os.getpid() % 100000}"
        self._hub = f"{self._mark}-hub"
        self._addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._made: list[str] = []
        self._add_namespace(self._hub)
        self._ip("-n", self._hub, "link", "add", "br0", "type", "bridge")
        self._ip("-n", self._hub, "addr", "add", f"{self.HUB}/24", "dev", "br0")
        self._ip("-n", self._hub, "link", "set", "br0", "up")

    @property
    def inside_hub(self) -> tuple[str, ...]:
        """The words that run a command beside the pods."""
        return ("ip", "netns", "exec", self._hub)

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)

    def _add_namespace(self, name: str) -> None:
        self._ip("netns", "add", name)
        self._made.append(name)
        self._ip("-n", name, "link", "set", "lo", "up")

    def _namespace(self, pod: str) -> str:
        return f"{self._mark}-{list(self._addresses).index(pod)}"

    def add(self, pod: str) -> str:
        """Gives a pod a namespace, an interface and an address."""
        if pod in self._addresses:
            return self._addresses[pod]
        index = len(self._addresses)
        address = self._addresses[pod] = f"10.77.0.{index + 1}"
        space, inside, outside = self._namespace(pod), f"i{index}", f"o{index}"
        self._add_namespace(space)
        self._ip("-n", self._hub, "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", space)
        self._ip("-n", self._hub, "link", "set", outside, "master", "br0", "up")
        self._ip("-n", space, "link", "set", inside, "name", "eth0")
        self._ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        self._ip("-n", space, "link", "set", "eth0", "up")
        self._ip("-n", space, "route", "add", "default", "via", self.HUB)
        (Path("/etc/netns") / space).mkdir(parents=True, exist_ok=True)
        self._write()
        return address

    def name(self, name: str, address: str) -> None:
        """Makes a name known to every pod."""
        self._names[name] = address
        self._write()

    def _write(self) -> None:
        for pod, own in self._addresses.items():
            # As in a cluster, a pod's own name is in its file. Written in place: a running pod has the file mounted.
            names = {pod: own, **self._names}
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
            (Path("/etc/netns") / self._namespace(pod) / "hosts").write_text("\n".join(lines) + "\n")

    def command(self, pod: str, command: list[str]) -> list[str]:
        """Returns the command that runs ``command`` in the pod."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', pod]
        return ["ip", "netns", "exec", self._namespace(pod), *named, *command]

    def variables(self) -> dict[str, str]:
        """Returns what processes need."""
        return {"PYTHONPATH": str(ROOT)}

    def close(self) -> None:
        """Removes every namespace."""
        for name in reversed(self._made):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


Network = Loopback | Namespaces


def container_variables(
    pod: Mapping[str, Any], address: str, config_maps: Mapping[str, Mapping[str, str]]
) -> dict[str, str] | None:
    """Returns the variables of a pod's first container as a kubelet makes them; None while one's source is absent.

    ``config_maps`` holds the Secrets too, under ``secret/NAME``.
    """
    container = pod["spec"]["containers"][0]
    values: dict[str, str] = {}
    for source in container.get("envFrom", []):
        data = config_maps.get(source["configMapRef"]["name"])
        if data is None:
            return None
        values |= data
    for item in container.get("env", []):
        source = item.get("valueFrom", {})
        if "fieldRef" in source:
            values[item["name"]] = _field(pod, source["fieldRef"]["fieldPath"], address)
        elif source:
            ((kind, wanted),) = source.items()
            data = config_maps.get(("secret/" if kind == "secretKeyRef" else "") + wanted["name"])
            if data is None and wanted.get("optional"):
                continue
            if data is None:
                return None
            values[item["name"]] = data[wanted["key"]]
        else:
            values[item["name"]] = re.sub(r"\$\((\w+)\)", lambda m: values[m.group(1)], item["value"])
    return values


def _field(pod: Mapping[str, Any], path: str, address: str) -> str:
    if path in ("status.podIP", "status.hostIP"):
        return address
    found = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)
    assert found is not None, path
    return str(pod["metadata"]["annotations"][found.group(1)])


class Container:
    """The first container of one pod."""

    def __init__(self, pod: dict[str, Any], folder: Path, network: Network, services: Mapping[str, str]) -> None:
        self.pod, self.folder, self.network, self.services = pod, folder, network, services
        self.name: str = pod["metadata"]["name"]
        self.address = network.add(self.name)
        self.process: subprocess.Popen[bytes] | None = None
        self.phase, self.restarts, self.exit_codes = "Pending", 0, list[int]()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def output(self) -> str:
        """What the container wrote so far, all starts together."""
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def step(self, config_maps: Mapping[str, Mapping[str, str]]) -> None:
        """Starts the container when it can start, and follows its end."""
        if self.process is None and self.phase in ("Pending", "Running"):
            self._start(config_maps)
        elif self.process is not None and (code := self.process.poll()) is not None:
            self.process = None
            self.exit_codes.append(code)
            policy = self.pod["spec"].get("restartPolicy", "Always")
            if policy == "Always" or (code and policy == "OnFailure"):
                self.restarts += 1
            else:
                self.phase = "Failed" if code else "Succeeded"

    def _start(self, config_maps: Mapping[str, Mapping[str, str]]) -> None:
        values = container_variables(self.pod, self.address, config_maps)
        if values is None:
            return
        container = self.pod["spec"]["containers"][0]
        command = [*container.get("command", []), *container.get("args", [])]
        command = [sys.executable if word == "python" else word for word in command]
        basic = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        if coverage := os.environ.get("COVERAGE_PROCESS_START"):
            basic["COVERAGE_PROCESS_START"] = coverage
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                self.network.command(self.name, command),
                cwd=self.folder,
                env={**basic, **self.network.variables(), **self.services, **values},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.phase = "Running"

    def kill(self) -> None:
        """Ends the container's processes."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(3)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(5)
        self.process = None


class Node:
    """Runs pods; use it as a context, so that nothing is left."""

    def __init__(self, folder: Path, network: Network, services: Mapping[str, str] | None = None) -> None:
        self.folder, self.network = folder, network
        self.services = dict(services or {})
        self.containers: dict[str, Container] = {}
        self.config_maps: dict[str, dict[str, str]] = {}

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        for container in self.containers.values():
            container.kill()
        self.network.close()

    def apply(self, documents: list[dict[str, Any]]) -> None:
        """Takes pods, services and ConfigMaps, as ``kubectl apply`` would."""
        for document in documents:
            name = document["metadata"]["name"]
            if document["kind"] == "ConfigMap":
                self.config_maps[name] = document["data"]
            elif document["kind"] == "Pod":
                self.add(document)
        for document in documents:
            if document["kind"] == "Service":
                selected = document["spec"]["selector"].items()
                for container in self.containers.values():
                    if selected <= container.pod["metadata"]["labels"].items():
                        self.network.name(document["metadata"]["name"], container.address)

    def add(self, pod: dict[str, Any], *names: str) -> Container:
        """Takes one pod; ``names`` are those that resolve to it."""
        name = pod["metadata"]["name"]
        container = Container(pod, self.folder / name, self.network, self.services)
        self.containers[name] = container
        for known in names:
            self.network.name(known, container.address)
        return container

    def remove(self, name: str) -> None:
        """Ends a pod and forgets it."""
        self.containers.pop(name).kill()

    def step(self) -> None:
        """Lets each pod go one step on."""
        for container in list(self.containers.values()):
            container.step(self.config_maps)

    def run(self, limit_s: float = LIMIT_S) -> dict[str, str]:
        """Runs until every pod has ended; returns the phase of each."""
        deadline = time.monotonic() + limit_s
        while any(c.phase in ("Pending", "Running") for c in self.containers.values()):
            self.step()
            if time.monotonic() > deadline:
                raise AssertionError(f"pods still run after {limit_s} s:\n{self.report()}")
            time.sleep(0.02)
        return {name: container.phase for name, container in self.containers.items()}

    def report(self) -> str:
        """Returns what each pod wrote."""
        return "\n".join(f"== {c.name} {c.phase} {c.exit_codes}\n{c.output[-2500:]}" for c in self.containers.values())


def pods_of_jobset(jobset: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the pods that JobSet makes, servers first, with the name each has in the headless service."""
    name = jobset["metadata"]["name"]
    subdomain = jobset["spec"].get("network", {}).get("subdomain") or name
    for replicated in jobset["spec"]["replicatedJobs"]:
        for job_index in range(replicated.get("replicas", 1)):
            spec = replicated["template"]["spec"]
            for index in range(spec["completions"]):
                host = f"{name}-{replicated['name']}-{job_index}-{index}"
                template = json.loads(json.dumps(spec["template"]))
                metadata = template.setdefault("metadata", {})
                metadata.setdefault("annotations", {})["batch.kubernetes.io/job-completion-index"] = str(index)
                yield {**template, "kind": "Pod", "metadata": {**metadata, "name": host}}, f"{host}.{subdomain}"


def pods_of_trainjob(runtime: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the pods that Kubeflow's torch runtime makes, with the name of each."""
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    nodes, name = job["spec"]["trainer"]["numNodes"], job["metadata"]["name"]
    replicated = json.loads(json.dumps(replicated))
    replicated["template"]["spec"] |= {"completions": nodes}
    container = replicated["template"]["spec"]["template"]["spec"]["containers"][0]
    assert (replicated["name"], container["name"]) == ("node", "node")
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container["env"] = [
        *container.get("env", []),
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(job["spec"]["trainer"]["numProcPerNode"])},
        {"name": "PET_NODE_RANK", "valueFrom": index},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": "29500"},
    ]
    yield from pods_of_jobset({"metadata": {"name": name}, "spec": {"replicatedJobs": [replicated]}})
