"""Saving and loading on request of a worker (D.8)."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from fleet.errors import PSError
from fleet.ps.server.job_state import Refused
from fleet.ps.server.server_files import save_tables
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.layout import SparseTableConfig
from tests.fleet.ps.local_transport import Fault
from tests.fleet.ps.service import SGD, SPARSE, gradient, rows, serving


def test_save_while_training_and_load_on_another_number_of_servers(tmp_path):
    """D.8: save and load run while training runs, for any count of servers."""
    keys = range(500)
    with serving(3) as service:
        client = service.client()
        client.wait(client.push({0: gradient(keys), 1: np.arange(5, dtype=np.float32)}))
        assert client.save(str(tmp_path / "m")) == 505
    for count in (1, 2, 5):
        with serving(count) as service:
            client = service.client()
            assert client.load(str(tmp_path / "m")) == 505
            assert (rows(client, keys) == -1).all()
            assert client.wait(client.pull({1: None}))[1].tolist() == [0, -1, -2, -3, -4]


def test_a_save_whose_answer_is_lost_is_not_done_again(tmp_path):
    """Mode 1 takes the saved delta scores off the rows: a second run would write an empty delta over the first."""
    table = SparseTableConfig("ctr", 2, SGD, accessor=Accessor(delta_threshold=0.5, base_threshold=0.5))
    with serving(folder=tmp_path / "s") as service:
        client = service.client(tables={0: table}, answer_timeout_s=0.5)
        grads = gradient(range(20))
        grads.shows = grads.clicks = np.ones(20, np.float32)
        client.wait(client.push({0: grads}))
        service.transport.faults.append(Fault("server", service.transport.sent["server"] + 1, "cut"))
        assert client.save(str(tmp_path / "m"), mode=1) == 20
        assert client.save(str(tmp_path / "m2"), mode=1) == 0
        service.servers[0].stop()
        service.start(0)
        assert client.save(str(tmp_path / "m3"), mode=1) == 0  # the restart knows that they were saved
        with pytest.raises(PSError, match="save mode 7"):
            client.save(str(tmp_path / "m"), mode=7)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dirname": ""},
        {"dirname": 3},
        {"mode": "0"},
        {"save_id": 1},
        {"tables": [7]},
        {"tables": "0"},
    ],
)
def test_a_request_that_cannot_be_read_writes_nothing(tmp_path, fields):
    good = {"dirname": str(tmp_path / "m"), "mode": 0, "save_id": "x", "tables": [0]}
    with serving() as service:
        service.client(tables={0: SPARSE})
        server = service.servers[0]
        with pytest.raises(Refused):
            save_tables(server.state, server.config, {**good, **fields} if fields else {})
        assert not (tmp_path / "m").exists()
        assert save_tables(server.state, server.config, good) == {"rows": 0}


def test_a_save_amid_pushes_on_3_servers_loads_on_2_row_for_row(tmp_path):
    """D.8, 003-19: each row of the save is what it was after one of the pushes, and comes back so on 2 servers."""
    keys, pushed, stop = np.arange(400), [], threading.Event()
    with serving(3) as service:
        trainer, saver = service.client(client_id=5), service.client(client_id=5, channel=1)
        trainer.wait(trainer.push({0: gradient(keys), 1: np.ones(5, np.float32)}))

        def push():
            while not stop.is_set():
                trainer.wait(trainer.push({0: gradient(keys), 1: np.ones(5, np.float32)}))
                pushed.append(1)

        thread = threading.Thread(target=push, daemon=True)
        thread.start()
        while len(pushed) < 3:
            time.sleep(0.001)
        least = len(pushed)
        assert saver.save(str(tmp_path / "m")) == 405
        most = len(pushed) + 2  # the first push, and one that is on its way
        stop.set()
        thread.join(10)
        assert not thread.is_alive()
        trainer.wait(trainer.push({0: gradient(keys)}))
        assert saver.save(str(tmp_path / "still")) == 405
        last = rows(trainer, keys)
    with serving(2) as service:
        client = service.client()
        assert client.load(str(tmp_path / "m")) == 405
        found = rows(client, keys)
        assert (found[:, 0] == found[:, 1]).all()
        assert (found == np.round(found)).all()
        assert ((-found >= least + 1) & (-found <= most)).all()
        assert client.load(str(tmp_path / "still")) == 405
        assert rows(client, keys).tobytes() == last.tobytes()
