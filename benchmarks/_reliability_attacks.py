"""Attacks of people who do not know a job's secret, and of files that somebody has forged: how many are held off.

Run from the repository root, alone or as a row of ``benchmarks/reliability.py``::

    python benchmarks/_reliability_attacks.py --tries 20      # two minutes
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _table import markdown  # noqa: E402

from fleet.errors import CheckpointError  # noqa: E402
from fleet.launch.membership.kv_client import KeyValueClient  # noqa: E402
from fleet.launch.membership.kv_service import KeyValueService  # noqa: E402
from fleet.ps.server.measures import Measure  # noqa: E402
from fleet.ps.wire.messages import Header, Op, encode_header  # noqa: E402
from fleet.ps.wire.transport import SocketTransport  # noqa: E402
from fleet.ps_job.server_metrics import serve_measures  # noqa: E402
from tests.fleet.ps.service import gradient, rows, serving  # noqa: E402
from tests.fleet.ps.test_forged_files import forge, load_table, save, table  # noqa: E402
from tests.fleet.ps.wire.test_auth import OnThePath  # noqa: E402
from tests.helpers.crowd import Crowd  # noqa: E402
from tests.helpers.relay import Relay  # noqa: E402

SECRET = b"0123456789abcdef"


def relayed(tries: int) -> Iterator[bool]:
    """A handshake passed on, then words of one's own: the server goes on and each push counts once."""
    for _ in range(tries):
        relay = Relay()
        with serving(transport=OnThePath(relay), num_workers=1, transfer_timeout_s=0.5) as service:
            client = service.client(0, deadline_s=20.0)
            relay.targets[-1].sendall(encode_header(Header(Op.STOP, client_id=5)) + bytes(32))
            client.wait(client.push({0: gradient([1])}))
            yield rows(client, [1]).tolist() == [[-1, -1]] and not service.servers[0]._stopping.is_set()
        relay.close()


def flipped(tries: int) -> Iterator[bool]:
    """One bit of a message changed on the path, in either direction: each push counts once."""
    rng, relay, due = random.Random(0), Relay(), [0]

    def change(data: bytes) -> bytes:
        if not due[0]:
            return data
        due[0] -= 1
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]

    with serving(transport=OnThePath(relay), num_workers=1) as service:
        client = service.client(0, deadline_s=30.0)
        for number in range(tries):
            setattr(relay, "down" if number % 2 else "up", change)
            due[0] = 1
            client.wait(client.push({0: gradient(range(50))}))
            relay.up = relay.down = lambda data: data
            yield bool((rows(client, range(50)) == -(number + 1)).all())
    relay.close()


def noise(tries: int) -> Iterator[bool]:
    """Random bytes, half of them behind a real header: the server answers its worker, and nothing was applied."""
    rng = random.Random(1)
    with serving(transport=SocketTransport(), num_workers=1, transfer_timeout_s=0.2) as service:
        client = service.client(0, deadline_s=20.0)
        host, port = service.servers[0].endpoint.split(":")
        for number in range(tries):
            with socket.create_connection((host, int(port)), 5) as sock:
                head = encode_header(Header(Op.STOP, client_id=number)) if number % 2 else b""
                sock.sendall(head + rng.randbytes(rng.randrange(200)))
            yield rows(client, [1]).tolist() == [[0, 0]]


def crowded_servers(tries: int) -> Iterator[bool]:
    """128 connections that come back at once after each cut: a new worker is served within five seconds."""
    with serving(transport=SocketTransport(), num_workers=tries) as service:
        host, port = service.servers[0].endpoint.split(":")
        with Crowd((host, int(port)), 128):
            for rank in range(tries):
                began = time.monotonic()
                service.client(rank, deadline_s=20.0)
                yield time.monotonic() - began < 5


def crowded_launchers(tries: int) -> Iterator[bool]:
    """The same at the place where nodes meet: a member's request is answered within two seconds."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    service = KeyValueService(listener, SECRET, lambda *about: None)
    try:
        with Crowd(address, 300):
            for number in range(tries):
                began = time.monotonic()
                client = KeyValueClient(address, SECRET, ttl_s=5.0)
                try:
                    client.put(f"/job/k{number}", '"v"')
                    yield time.monotonic() - began < 2
                finally:
                    client.close()
    finally:
        service.close()


def crowded_metrics(tries: int) -> Iterator[bool]:
    """200 slow readers at the metrics port: a scrape is answered within two seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stop = serve_measures(lambda: [Measure("rows", "rows", 7.0)], {"server": "0"}, "127.0.0.1", port)
    idle = []
    try:
        for _ in range(200):
            idle.append(socket.create_connection(("127.0.0.1", port), 5))
            idle[-1].sendall(b"GET /me")
        for _ in range(tries):
            began = time.monotonic()
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                yield b"fleet_ps_rows" in answer.read() and time.monotonic() - began < 2
    finally:
        for sock in idle:
            sock.close()
        stop()


def forged(tries: int) -> Iterator[bool]:
    """A manifest that names a file elsewhere: it is not read by a load and not deleted by a save."""
    rng = random.Random(2)
    for number in range(tries):
        with tempfile.TemporaryDirectory() as name:
            folder, outside = Path(name) / "c", Path(name) / "secret.txt"
            outside.write_text("mine")
            save(table(), folder, save_id="one")
            ways = (str(outside), "../../secret.txt", f"part-000-{rng.randbytes(3).hex()}/../../../secret.txt", "..")
            forge(folder / "t" / "part-000.json", folder / "t" / "part-007.json", server=7, data=ways[number % 4])
            save(table(), folder, save_id="two")
            forge(folder / "t" / "part-000.json", data=ways[number % 4])
            try:
                load_table(table(0), folder)
                held = False
            except CheckpointError:
                held = outside.read_text() == "mine"
            yield held


ATTACKS: dict[str, tuple[str, int, Callable[[int], Iterator[bool]]]] = {
    "relay": ("a relayed handshake, then a STOP of the stranger's own", 1, relayed),
    "flip": ("one bit changed between worker and server", 10, flipped),
    "noise": ("random messages to a server's port", 50, noise),
    "servers": ("a new worker while 128 strangers return to a server's port", 1, crowded_servers),
    "launchers": ("a node's request while 300 strangers return to the launcher's port", 1, crowded_launchers),
    "metrics": ("a scrape while 200 slow readers hold the metrics port", 1, crowded_metrics),
    "manifests": ("forged names in a checkpoint's manifest", 5, forged),
}


def attack(tries: int) -> str:
    """Returns the table: what was tried how often, and held off how often."""
    found = []
    for text, times, run in ATTACKS.values():
        outcomes = list(run(tries * times))
        found.append([text, f"{len(outcomes)}", f"{sum(outcomes)}"])
        print(" | ".join(found[-1]), file=sys.stderr, flush=True)
    return markdown(["attack", "tried", "held off"], found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(attack(parser.parse_args().tries))
