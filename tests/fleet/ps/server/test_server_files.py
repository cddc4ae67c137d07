"""Saving and loading on request of a worker (D.8)."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from fleet.errors import CheckpointError, PSError
from fleet.ps.client.client import NothingLoaded
from fleet.ps.server import server_files
from fleet.ps.server.job_state import Refused
from fleet.ps.server.server_files import save_tables
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.layout import SparseTableConfig
from tests.fleet.ps._tables import rows_of
from tests.fleet.ps.local_transport import Fault
from tests.fleet.ps.service import DENSE, SGD, SPARSE, gradient, in_threads, rows, serving


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


THREE = {0: SPARSE, 1: DENSE, 2: replace(SPARSE, name="words")}
KEYS = range(500)


def push_all(client):
    client.wait(client.push({0: gradient(KEYS), 1: np.ones(5, np.float32), 2: gradient(KEYS)}))


def state_of(service):
    """Returns every bit that the tables hold, by server and table."""
    return [
        {key: rows_of(t.table) if hasattr(t.table, "blocks") else [a.tobytes() for a in t.table.read_state()]}
        for server in service.servers
        for key, t in server.state.tables.items()
    ]


def damage(path, place=-1):
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def spoil_text(folder):
    with (folder / "words" / "part-000-00000").open("a") as file:
        file.write("1 0 0\n")


def part_of(folder, table, server=0):
    return next((folder / table).glob(f"part-{server:03d}-*"))


SPOILS = {
    "the first file": lambda folder: damage(part_of(folder, "ads")),
    "a block amid the first file": lambda folder: damage(part_of(folder, "ads"), place=6000),
    "the dense file": lambda folder: damage(part_of(folder, "mlp")),
    "the last file": lambda folder: damage(part_of(folder, "words")),
    "a manifest": lambda folder: (folder / "words" / "part-000.json").write_text("{}"),
    "a part that is gone": lambda folder: part_of(folder, "words").unlink(),
    "the share of one server": lambda folder: damage(part_of(folder, "words", server=1)),
    "a line of text": spoil_text,
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_load_that_is_refused_changes_no_table_on_any_server(tmp_path, monkeypatch, name):
    folder = tmp_path / "m"
    with serving(2 if "one server" in name else 1) as service:
        client = service.client(tables=THREE)
        push_all(client)
        client.save(str(folder), text="text" in name)
        push_all(client)
        SPOILS[name](folder)
        before = state_of(service)
        forgotten = []
        monkeypatch.setattr(client._remainders, "forget", forgotten.append)
        with pytest.raises(NothingLoaded, match=rf"{folder}.*Nothing was loaded\.$"):
            client.load(str(folder))
        assert state_of(service) == before
        assert not forgotten
        assert client.load(str(folder), tables=[0 if "first" not in name else 2]) == 500  # the others are whole
        assert forgotten


@pytest.mark.parametrize("change", [{"dim": 3}, {"accessor": Accessor()}])
def test_a_last_table_of_another_shape_changes_no_table(tmp_path, change):
    folder = tmp_path / "m"
    with serving() as service:
        client = service.client(tables=THREE)
        push_all(client)
        client.save(str(folder))
    with serving() as service:
        client = service.client(tables={**THREE, 2: replace(THREE[2], **change)})
        with pytest.raises(NothingLoaded, match=r"saved with (dim|embed_rule).*Nothing was loaded"):
            client.load(str(folder))
        assert client.stat()[0]["tables"]["0"]["rows"] == 0


def test_a_save_is_checked_once_for_all_workers_and_they_are_told_the_same(tmp_path, monkeypatch):
    """Else one of them might load what another one was refused, and train on beside it with other rows."""
    folder, checks = tmp_path / "m", []
    check = server_files.check_table
    monkeypatch.setattr(server_files, "check_table", lambda *args, **kwargs: (checks.append(1), check(*args, **kwargs)))
    with serving(num_workers=2) as service:
        one, two = (service.client(rank, tables=THREE) for rank in range(2))
        push_all(one)
        saved = one.save(str(folder))
        whole = part_of(folder, "words").read_bytes()
        damage(part_of(folder, "words"))
        texts = []
        for client in (one, two):
            with pytest.raises(NothingLoaded) as caught:
                client.load(str(folder), key="first")
            texts.append(str(caught.value))
            part_of(folder, "words").write_bytes(whole)
        assert texts[0] == texts[1]
        assert len(checks) == 2
        found = []
        in_threads(*(lambda c=c: found.append(c.load(str(folder), key="second")) for c in (one, two)))
        assert found == [saved] * 2
        assert len(checks) == 4
        assert one.load(str(folder), key="second") == saved  # as a worker that was started again asks
        assert len(checks) == 4


def test_a_server_that_fails_after_the_check_says_so_to_all_workers(tmp_path, monkeypatch):
    folder = tmp_path / "m"
    load, broken = server_files.load_checked_table, []

    def load_or_fail(table, *args, **kwargs):
        if table.config.name == "words" and not broken:
            broken.append(1)
            raise CheckpointError("the disk is gone.")
        return load(table, *args, **kwargs)

    with serving(num_workers=2) as service:
        one, two = (service.client(rank, tables=THREE) for rank in range(2))
        push_all(one)
        one.save(str(folder))
        push_all(one)
        monkeypatch.setattr(server_files, "load_checked_table", load_or_fail)
        renewed = []
        service.servers[0].state.on_unrecorded = lambda: renewed.append(1)
        for client in (one, two):
            with pytest.raises(
                PSError, match=r"the disk is gone\. Tables may be partly loaded: load another"
            ) as caught:
                client.load(str(folder), key="first")
            assert not isinstance(caught.value, NothingLoaded)
        assert broken == renewed == [1]  # the second worker was told; a standby gets the rows of the part
        assert rows(two, KEYS)[0, 0] == -1
        assert rows(two, KEYS, table=2)[0, 0] == -2
        two.load(str(folder), key="second")
        assert rows(two, KEYS, table=2)[0, 0] == -1


def test_a_long_check_keeps_the_worker_waiting(tmp_path, monkeypatch):
    """Beats of the server tell it from a dead one, as in a long load."""
    check = server_files.check_table
    monkeypatch.setattr("fleet.ps.server.operations.BEAT_S", 0.1)
    monkeypatch.setattr(server_files, "check_table", lambda *args, **kwargs: (time.sleep(1.0), check(*args, **kwargs)))
    with serving() as service:
        client = service.client(tables={0: SPARSE}, answer_timeout_s=0.4, deadline_s=0.5)
        client.wait(client.push({0: gradient(KEYS)}))
        client.save(str(tmp_path))
        assert client.load(str(tmp_path)) == 500
