"""Versions: named rows in a publisher's folder, exact and complete, and the brake that readers obey."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fleet import ps
from fleet.errors import CheckpointError, ConfigError, PSError
from fleet.ps.publishing.folder_sink import FolderSink
from fleet.ps.publishing.versions import (
    BRAKE,
    Mark,
    check_name,
    list_versions,
    mark_of,
    read_brake,
    version_path,
)
from tests.fleet.ps.publishing.rig import publishing
from tests.fleet.ps.serving.deltas import DIM, IDS, Chain


def mark(name: str, key: str = "", keep: int = 5, **fields: str) -> Mark:
    return Mark(name, key or f"key of {name}", keep, **fields)


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("rows-*")}


def copy_of(chain: Chain) -> Chain:
    """Returns what a reader must find now, whatever ``chain`` writes later."""
    copy = Chain(chain.sink, chain.servers, chain.encoding)
    copy.rows = dict(chain.rows)
    return copy


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8"])
def test_a_version_keeps_its_rows_to_the_bit_through_new_deltas_and_bases(tmp_path: Path, encoding: str) -> None:
    sink = FolderSink(tmp_path, "shop", encoding, fewest_rows=150)
    chain = Chain(sink, 2, encoding)
    marked: dict[str, Chain] = {}
    for step in range(1, 25):
        chain.write(changed=150 if step == 1 else 40, whole=step == 15)
        if step % 5 == 0:
            name = f"step-{step}"
            before = files_of(tmp_path)
            for server in range(2):
                sink.mark(server, mark(name))
            assert files_of(tmp_path) == before  # nothing is copied
            marked[name] = copy_of(chain)
        for name, expected in marked.items():
            with ps.Reader(tmp_path, version=name) as reader:
                expected.check(*reader.lookup("ads", IDS, found=True))
                assert reader.version is not None
                assert reader.version.name == name
                assert name == f"step-{reader.version.step}"
    assert [version.name for version in ps.Reader(tmp_path).versions] == list(marked)
    assert [version.number for version in ps.Reader(tmp_path).versions] == [1, 2, 3, 4]


def test_versions_beyond_keep_go_with_their_files(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path, "shop", "float32", fewest_rows=0)
    chain = Chain(sink)
    for step in range(6):
        chain.write(whole=True)
        sink.mark(0, mark(f"v{step}", keep=2))
        chain.write()
        assert [version.name for version in list_versions(tmp_path)] == [f"v{n}" for n in range(step + 1)][-2:]
    manifest = json.loads((tmp_path / "MANIFEST.json").read_text())["servers"]["0"]
    states = [json.loads(version_path(tmp_path, f"v{n}").read_text())["servers"]["0"] for n in (4, 5)]
    named = {entry["file"] for state in (manifest, *states) for entry in (state["base"], *state["deltas"])}
    assert files_of(tmp_path) >= named
    assert len(files_of(tmp_path) - named) <= 2  # of the manifest before this one
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["v4", "v5"]


def test_a_reader_of_a_version_that_was_removed_keeps_its_rows_and_says_so(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path, "shop", "float32")
    chain = Chain(sink)
    chain.write()
    sink.mark(0, mark("monday"))
    expected = copy_of(chain)
    reader = ps.Reader(tmp_path, version="monday")
    chain.write(whole=True)
    sink.mark(0, mark("tuesday", keep=1))
    chain.write()
    with pytest.raises(CheckpointError, match=r"'monday' was removed: more than keep= were marked"):
        reader.refresh()
    expected.check(*reader.lookup("ads", IDS, found=True))
    with pytest.raises(ConfigError, match=r"no version 'monday'.*It has 'tuesday'"):
        ps.Reader(tmp_path, version="monday")


def test_a_version_counts_once_all_servers_have_marked_it(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path, "shop", "float32")
    chain = Chain(sink, 2)
    chain.write()
    sink.mark(0, mark("monday"))
    with pytest.raises(ConfigError, match="no version 'monday' that all servers have marked"):
        ps.Reader(tmp_path, version="monday")
    with pytest.raises(ConfigError, match="no version 'monday'"):
        ps.roll_back(tmp_path, "monday")
    expected = copy_of(chain)
    # Server 0 goes on, is killed, and is asked again: its share stays that of the first time.
    chain.put(0, IDS[:3], np.ones((3, DIM), np.float32), IDS[:0])
    sink.mark(0, mark("monday"))
    sink.mark(1, mark("monday"))
    expected.check(*ps.Reader(tmp_path, version="monday").lookup("ads", IDS, found=True))


def test_a_version_that_some_server_never_marked_is_replaced_or_removed(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path, "shop", "float32")
    chain = Chain(sink, 2)
    chain.write()
    sink.mark(0, mark("monday", key="of a job that died"))
    sink.mark(0, mark("sunday", key="of a job that died"))
    chain.write()
    expected = copy_of(chain)
    for server in range(2):
        sink.mark(server, mark("monday", key="of the next"))
    expected.check(*ps.Reader(tmp_path, version="monday").lookup("ads", IDS, found=True))
    assert not version_path(tmp_path, "sunday").exists()


def test_a_name_is_given_once(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path, "shop", "float32")
    chain = Chain(sink)
    chain.write()
    sink.mark(0, mark("monday"))
    sink.mark(0, mark("monday"))  # the same request once more
    sink.mark(0, mark("monday", key="of a worker that was restarted"))
    with pytest.raises(ConfigError, match="was marked before"):
        sink.mark(0, mark("monday", key="with a save", save="saves"))
    chain.write()
    with pytest.raises(ConfigError, match="was marked before, with step 1"):
        sink.mark(0, mark("monday", key="another call"))


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "-a", "a" * 65, "a b", None, 3])
def test_names_that_no_folder_can_have_are_refused(name: object) -> None:
    with pytest.raises(ConfigError, match="a name has 1 to 64"):
        check_name(name)


@pytest.mark.parametrize(
    "fields", [{}, {"key": 1}, {"key": "k", "save": 3}, {"key": "k", "keep": 0}, {"key": "k", "keep": True}]
)
def test_requests_of_another_form_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        mark_of({"name": "monday", **fields})


def test_the_brake_holds_all_readers_until_it_is_released(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path, "shop", "float32", fewest_rows=60)
    chain = Chain(sink)
    marked = {}
    for name in ("monday", "tuesday"):
        chain.write()
        sink.mark(0, mark(name))
        marked[name] = copy_of(chain)
    chain.write()
    readers = {name: ps.Reader(tmp_path, version=name) for name in ("monday", "tuesday")}
    newest = ps.Reader(tmp_path)
    assert newest.version is None
    found = ps.roll_back(f"folder:{tmp_path}", "monday")
    assert (found.name, found.step, found.save) == ("monday", 1, None)
    for _ in range(3):
        chain.write(whole=True)  # publishing goes on
        for reader in (newest, *readers.values(), ps.Reader(tmp_path)):
            reader.refresh()
            marked["monday"].check(*reader.lookup("ads", IDS, found=True))
            assert reader.version == found
    ps.roll_back(tmp_path, "tuesday")  # the second one counts
    newest.refresh()
    marked["tuesday"].check(*newest.lookup("ads", IDS, found=True))
    readers["monday"].refresh()  # an older version stays where it is
    marked["monday"].check(*readers["monday"].lookup("ads", IDS, found=True))
    assert ps.release(tmp_path) == "tuesday"
    assert ps.release(tmp_path) is None
    newest.refresh()
    assert newest.version is None
    chain.check(*newest.lookup("ads", IDS, found=True))


def test_a_version_is_taken_as_well_as_its_name(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path, "shop", "float32")
    chain = Chain(sink)
    for name in ("monday", "tuesday", "wednesday"):
        chain.write()
        sink.mark(0, mark(name))
    _, tuesday, _ = ps.Reader(tmp_path).versions
    assert ps.Reader(tmp_path, version=tuesday).version == tuesday
    assert ps.roll_back(tmp_path, tuesday) == tuesday
    assert ps.Reader(tmp_path).version == tuesday == ps.Reader(tmp_path, version="tuesday").version
    other = replace(tuesday, number=7)
    for call in (lambda: ps.roll_back(tmp_path, other), lambda: ps.Reader(tmp_path, version=other)):
        with pytest.raises(ConfigError, match="has another version 'tuesday' than .*number=7"):
            call()
    assert read_brake(tmp_path) == "tuesday"


def test_a_version_that_readers_are_at_is_not_removed(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path, "shop", "float32")
    chain = Chain(sink)
    for step in range(4):
        chain.write(whole=True)
        sink.mark(0, mark(f"v{step}", keep=1))
        if step == 0:
            ps.roll_back(tmp_path, "v0")
    assert [version.name for version in list_versions(tmp_path)] == ["v0", "v3"]
    assert ps.Reader(tmp_path).position[0].step == 1


def test_rollbacks_that_cannot_be_are_refused_and_change_nothing(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path, "shop", "float32")
    chain = Chain(sink)
    with pytest.raises(ConfigError, match="no publisher has written there"):
        ps.roll_back(tmp_path, "monday")
    chain.write()
    with pytest.raises(ConfigError, match="Redis and servers have the newest rows alone: fleet.load_model"):
        ps.roll_back("redis://host/0", "monday")
    with pytest.raises(ConfigError, match=r"no version 'monday'.*It has none; fleet.mark_version"):
        ps.roll_back(tmp_path, "monday")
    sink.mark(0, mark("monday"))
    with pytest.raises(ConfigError, match="Did you mean"):
        ps.roll_back(tmp_path, "mondy")
    next(iter(tmp_path.glob("rows-*"))).unlink()
    with pytest.raises(ConfigError, match="is absent"):
        ps.roll_back(tmp_path, "monday")
    assert read_brake(tmp_path) is None


def test_a_damaged_brake_is_said_and_released(tmp_path: Path) -> None:
    Chain(FolderSink(tmp_path, "shop", "float32")).write()
    (tmp_path / BRAKE).write_text("{")
    with pytest.raises(CheckpointError, match=r"Roll back again, or release"):
        ps.Reader(tmp_path)
    assert ps.release(tmp_path) is None
    assert ps.Reader(tmp_path).version is None


def drive(folder: Path, seed: int, names: dict[str, float], failed: list[BaseException]) -> None:
    random = np.random.default_rng(seed)
    try:
        for _ in range(15):
            ps.roll_back(folder, random.choice(list(names)))
            if random.random() < 0.3:
                ps.release(folder)
    except BaseException as error:
        failed.append(error)


def test_concurrent_rollbacks_marks_and_deltas(tmp_path: Path) -> None:
    """Some version or the newest rows, always whole: each version has one value in all its rows."""
    sink = FolderSink(tmp_path, "shop", "float32", fewest_rows=100)
    chain = Chain(sink)
    values = {}

    def write(number: int) -> None:
        chain.put(0, IDS, np.full((len(IDS), DIM), number, np.float32), IDS[:0], whole=number == 1)
        sink.mark(0, mark(f"v{number}", keep=30))
        values[f"v{number}"] = float(number)

    write(1)
    failed: list[BaseException] = []
    drivers = [threading.Thread(target=drive, args=(tmp_path, seed, values, failed)) for seed in range(3)]
    for thread in drivers:
        thread.start()
    reader = ps.Reader(tmp_path)
    number = 1
    while any(thread.is_alive() for thread in drivers) or number < 10:
        number += 1
        if number <= 30:
            write(number)
        reader.refresh()
        version = reader.version
        rows = reader.lookup("ads", IDS)
        assert len(np.unique(rows)) == 1
        assert version is None or rows[0, 0] == values[version.name]
    for thread in drivers:
        thread.join()
    assert not failed
    ps.roll_back(tmp_path, "v3")
    reader.refresh()
    assert reader.lookup("ads", IDS[:1])[0, 0] == 3


def test_servers_mark_the_rows_they_have(tmp_path: Path) -> None:
    """Behind the barrier of the workers: pushes before the mark are in it, those after are not."""
    rows = tmp_path / "rows"
    with publishing(f"folder:{rows}", tmp_path / "ps", 2) as service:
        client = service.client()
        service.push(client, *range(40))
        client.mark("monday", 5)
        expected = service.served()
        service.push(client, *range(20, 60), value=3.0)
        client.alter(0, "shrink", threshold=2)
        service.publish()
        assert rows_of(rows, "monday") == expected
        assert rows_of(rows, None) == service.served() != expected
        assert ps.Reader(rows).versions[0].step == 1


def test_a_server_that_dies_in_a_mark_marks_the_same_rows_after_its_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows"
    with publishing(f"folder:{rows}", tmp_path / "ps", 2) as service:
        client = service.client(retry_interval_s=0.1)
        service.push(client, *range(40))
        expected = service.served()
        real = FolderSink.mark
        deaths = ["before", "after"]

        def dying(sink: FolderSink, server: int, wanted: Mark, position: tuple[str, int]) -> None:
            if server == 1 and deaths:
                if deaths.pop() == "after":
                    real(sink, server, wanted, position)
                service.restart(1)
            real(sink, server, wanted, position)

        monkeypatch.setattr(FolderSink, "mark", dying)
        client.mark("monday", 5)
        assert not deaths
        service.push(client, *range(20))
        service.publish()
        assert rows_of(rows, "monday") == expected
        service.restart(0)
        service.publish()
        assert rows_of(rows, "monday") == expected
        assert rows_of(rows, None) == service.served()


def test_a_mark_waits_for_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows"
    with publishing(f"folder:{rows}", tmp_path / "ps") as service:
        client = service.client()
        service.push(client, 1, 2)
        write = FolderSink.write
        failures = [OSError("no space left on device")] * 2

        def failing(sink: FolderSink, delta: ps.Delta) -> None:
            if failures:
                raise failures.pop()
            write(sink, delta)

        monkeypatch.setattr(FolderSink, "write", failing)
        client.mark("monday", 5)
        assert rows_of(rows, "monday") == service.served()
        assert any("no space left on device" in line for line in service.lines)


@pytest.mark.parametrize("is_older", [False, True])
def test_rows_that_the_folder_lost_are_published_anew_before_they_are_marked(tmp_path: Path, is_older: bool) -> None:
    rows, copy = tmp_path / "rows", tmp_path / "copy"
    with publishing(f"folder:{rows}", tmp_path / "ps") as service:
        client = service.client()
        service.push(client, 1, 2)
        service.publish()
        shutil.copytree(rows, copy)
        service.push(client, 2, 3)
        service.publish()
        shutil.rmtree(rows)
        if is_older:
            shutil.copytree(copy, rows)
        client.mark("monday", 5)
        assert rows_of(rows, "monday") == service.served()


def test_a_sink_without_versions_refuses(tmp_path: Path) -> None:
    with publishing(lambda delta: None, tmp_path / "ps") as service:
        client = service.client()
        service.push(client, 1)
        with pytest.raises(PSError, match="versions are kept in a folder"):
            client.mark("monday", 5)


def rows_of(folder: Path, version: str | None) -> dict[str, dict[int, bytes]]:
    """Returns every row that a reader finds, as ``PublishingService.served`` does."""
    with ps.Reader(folder, version=version) as reader:
        found, mask = reader.lookup("ads", np.arange(100), found=True)
    return {"ads": {key: found[key].tobytes() for key in np.flatnonzero(mask).tolist()}}
