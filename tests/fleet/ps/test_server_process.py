"""Servers as processes of their own: kill -9, SIGTERM, clean ends (F.2; PS design 3)."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

from fleet.errors import PSError
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.rules import Rule
from tests.fleet.ps.service import SECRET, SPARSE, Gradient, gradient, rows, silent
from tests.helpers.ps_server_process import ServerProcess


def process_client(endpoints, rank=0, num_workers=1, **config):
    settings = {"deadline_s": 30.0, "start_timeout_s": 20.0, "heartbeat": False, "secret": SECRET, **config}
    client = Client(ClientConfig(endpoints=endpoints, rank=rank, num_workers=num_workers, **settings), notify=silent)
    client.open()
    client.create_tables({0: SPARSE, 1: DenseTableConfig("mlp", 7, Rule("sgd", {"learning_rate": 1.0}))})
    return client


@pytest.mark.slow
def test_kill_9_in_mid_push_and_restart_gives_the_exact_sum(tmp_path):
    """3 workers push integers while one of 2 servers is killed three times: the sum is exact, nothing hangs."""
    configs = [
        {
            "endpoint": "127.0.0.1:0",
            "num_workers": 3,
            "folder": str(tmp_path / str(n)),
            "index": n,
            "snapshot_bytes": 3_000_000,
        }
        for n in range(2)
    ]
    servers = [ServerProcess(config) for config in configs]
    try:
        endpoints = [server.endpoint for server in servers]
        configs[1]["endpoint"] = endpoints[1]
        steps, failures, pushed = 150, [], [0, 0, 0]
        keys = np.arange(2000)
        ones = np.ones((2000, 2), np.float32)
        clients = [process_client(endpoints, rank, 3) for rank in range(3)]

        def work(rank):
            try:
                client = clients[rank]
                for _ in range(steps):
                    client.wait(client.push({0: Gradient(keys, ones), 1: np.ones(7, np.float32)}))
                    client.wait(client.pull({0: keys[::50]}))
                    pushed[rank] += 1
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(3)]
        for thread in threads:
            thread.start()
        for number in range(3):
            goal = (number + 1) * steps * 3 // 5
            while sum(pushed) < goal and not failures:
                time.sleep(0.002)
            servers[1].kill()
            servers[1] = ServerProcess(configs[1])
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert not failures, failures
        found = clients[0].wait(clients[0].pull({0: keys, 1: None}))
        assert (found[0] == -3 * steps).all()
        assert (found[1] == -3 * steps).all()
        assert any("replayed" in line for line in servers[1].lines)
        for client in clients:
            client.goodbye()
        assert [server.join() for server in servers] == [0, 0]
        assert not list(tmp_path.glob("*/journal"))
    finally:
        for server in servers:
            server.kill()


@pytest.mark.slow
def test_a_server_process_without_proxies_and_with_a_clean_end(tmp_path):
    """001-04, 001-07, 001-08: it says where it listens, proxies play no part, it ends after the workers."""
    proxies = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "ALL_PROXY")}
    server = ServerProcess({"num_workers": 2, "secret": "k"}, proxies)
    try:
        clients = [process_client([server.endpoint], rank, 2, secret=b"k") for rank in range(2)]
        clients[0].wait(clients[0].push({0: gradient([1])}))
        for client in clients:
            client.goodbye()
        assert server.join() == 0
        assert server.lines[-1] == "ENDED"
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_and_keeps_its_state(number, tmp_path):
    """001-12: TERM or Ctrl-C on the server ends it cleanly; the worker reports the lost server by name."""
    config = {"num_workers": 1, "folder": str(tmp_path / "s")}
    server = ServerProcess(config)
    try:
        client = process_client([server.endpoint], deadline_s=1.0)
        client.wait(client.push({0: gradient([1])}))
        server.signal(number)
        assert server.join() == 128 + number
        with pytest.raises(PSError, match=f"parameter server 0 .{server.endpoint}. did not answer for 1 s"):
            client.wait(client.push({0: gradient([1])}))
        client.close()
        server = ServerProcess(config)
        again = process_client([server.endpoint])
        assert rows(again, [1])[0, 0] == -1
        again.goodbye()
        assert server.join() == 0
    finally:
        server.kill()
