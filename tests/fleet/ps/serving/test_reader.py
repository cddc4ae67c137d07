from __future__ import annotations

import json
import logging
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleet.errors import CheckpointError, ConfigError, FleetError
from fleet.ps import Reader, Rule, SparseEmbedding, SparseTableConfig, release, roll_back, save_table
from fleet.ps.publishing.folder_sink import FolderSink
from fleet.ps.publishing.redis_sink import RedisSink
from fleet.ps.publishing.versions import MANIFEST, Mark
from tests.fleet.ps.reference_store import ReferenceTable
from tests.fleet.ps.serving.deltas import DIM, IDS, Chain
from tests.helpers.redis_server import RedisServer, missing

SGD = Rule("sgd", {"learning_rate": 1.0})


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    made = Chain(FolderSink(tmp_path / "rows", "shop", "float32"))
    made.write()
    return made


@pytest.fixture
def saved(tmp_path: Path) -> ReferenceTable:
    table = ReferenceTable(SparseTableConfig("ads", DIM, SGD))
    random = np.random.default_rng(0)
    table.push(IDS, random.normal(size=(len(IDS), DIM)).astype(np.float32))
    save_table(table, tmp_path / "save")
    return table


def test_any_form_of_ids(tmp_path: Path, saved: ReferenceTable) -> None:
    reader = Reader(tmp_path / "save")
    assert reader.tables == {"ads": DIM}
    wanted = saved.pull(np.array([-7, 5, 10**15]), create=False)
    wanted[2] = 0
    for ids in (
        [-7, 5, 10**15],
        np.array([-7, 5, 10**15]),
        torch.tensor([-7, 5, 10**15]),
        np.array([2**64 - 7, 5, 10**15], np.uint64),
        [2**64 - 7, 5, 10**15],  # as JSON gives unsigned ids: numpy makes floats of such a list
        (np.uint64(2**64 - 7), 5, np.int32(10**9) * np.int64(10**6)),
    ):
        rows, found = reader.lookup("ads", ids, found=True)
        kinds = torch.Tensor if isinstance(ids, torch.Tensor) else np.ndarray
        assert isinstance(rows, kinds)
        assert isinstance(found, kinds)
        assert np.array_equal(np.asarray(rows), wanted)
        assert found.tolist() == [True, True, False]
    for dtype in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32):
        assert np.array_equal(reader.lookup("ads", np.array([[5], [3]], dtype))[0, 0], wanted[1])
    assert reader.lookup("ads", torch.tensor([[5, 3]], dtype=torch.int32)).shape == (1, 2, DIM)
    assert np.array_equal(reader.lookup("ads", [[2**64 - 7, 5], [-7, 10**15]])[1], wanted[[0, 2]])
    sums = reader.lookup_bags("ads", [[2**64 - 7, 5], (10**15, 2**64 - 1)])
    assert torch.equal(sums, reader.lookup_bags("ads", [[-7, 5], [10**15, -1]]))
    assert reader.lookup("ads", 2**64 - 7).tolist() == wanted[0].tolist()
    assert reader.lookup("ads", 5).tolist() == wanted[1].tolist()
    for empty in ([], np.empty((0, 4), np.int64), torch.empty(0, dtype=torch.int64)):
        assert tuple(reader.lookup("ads", empty).shape) == (*np.shape(empty), DIM)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([1.0], "ids are float64"),
        (torch.tensor([1.0]), "ids are float32"),
        (np.empty(0), "ids are float64"),
        ([True], "ids are bool"),
        (["7"], "ids are <U1"),
        ([2**64], "ids are object"),
        ([2**63, 1.0], "ids are float64"),
        ([-(2**63) - 1], "ids are object"),
        (None, "ids are object"),
        ([[1], [2, 3]], "unequal lengths; use lookup_bags"),
    ],
)
def test_ids_that_are_none(tmp_path: Path, saved: ReferenceTable, ids: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Reader(tmp_path / "save").lookup("ads", ids)


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    for source, text in (
        (tmp_path / "absent", "there is no such folder.*once the servers have written the first ones"),
        ("folder:", "takes a folder, or an address"),
        ("redis://h:99999/0", "has no port from 0 to 65535"),
        (tmp_path / "other", r"neither rows that fleet.ps.publish writes.*holds \['letter.txt'\]"),
        ("kafka://host", "takes a folder, or an address"),
        ("", "takes a folder, or an address"),
        (7, "takes a folder, or an address"),
    ):
        with pytest.raises(ConfigError, match=text):
            Reader(source)  # type: ignore[arg-type]
    for job in (5, ""):
        with pytest.raises(ConfigError, match=rf"Reader\('redis://h/0', job={job!r}\) takes the name of a job"):
            Reader("redis://user:secret@h/0", job=job)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Omit job="):
        Reader(tmp_path / "other", job="shop")


def test_follow_takes_up_deltas_until_close(tmp_path: Path, chain: Chain) -> None:
    with Reader(f"folder:{tmp_path / 'rows'}").follow(0.01) as reader:
        for _ in range(3):
            chain.write()
            _wait(lambda: reader.position[0].watermark == 10 * chain.step)
            chain.check(*reader.lookup("ads", IDS, found=True))
    for call in (lambda: reader.lookup("ads", IDS), reader.refresh, lambda: reader.position, lambda: reader.tables):
        with pytest.raises(ConfigError, match="is closed"):
            call()
    reader.close()
    assert not any(thread.name == "fleet-reader" for thread in threading.enumerate())


def _wait(condition) -> None:
    limit = threading.Event()
    for _ in range(6000):
        if condition():
            return
        limit.wait(0.01)
    raise AssertionError("a minute has passed")


def test_follow_says_once_what_it_cannot_read_and_goes_on(
    tmp_path: Path, chain: Chain, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = tmp_path / "rows" / MANIFEST
    with caplog.at_level(logging.WARNING, "FLEET"), Reader(tmp_path / "rows").follow(0.01) as reader:
        whole = manifest.read_bytes()
        manifest.write_bytes(b"{")
        _wait(lambda: caplog.records)
        chain.check(*reader.lookup("ads", IDS, found=True))
        with pytest.raises(CheckpointError, match="not a manifest"):
            reader.refresh()
        manifest.write_bytes(whole)
        chain.write()
        _wait(lambda: reader.position[0].watermark == 10 * chain.step)
        chain.check(*reader.lookup("ads", IDS, found=True))
    assert "keeps its rows" in caplog.text
    for every_s in (0, -1, True, "1", float("nan"), float("inf")):
        with Reader(tmp_path / "rows") as reader, pytest.raises(ConfigError, match="a number of seconds above 0"):
            reader.follow(every_s)  # type: ignore[arg-type]


def test_a_follower_obeys_a_brake_long_before_its_next_round(tmp_path: Path, chain: Chain) -> None:
    chain.sink.mark(0, Mark("monday", "key", 5))
    rows = dict(chain.rows)
    chain.write()
    with Reader(tmp_path / "rows").follow(3600) as reader:
        chain.check(*reader.lookup("ads", IDS, found=True))
        roll_back(tmp_path / "rows", "monday")
        _wait(lambda: reader.version is not None)
        chain.rows, newer = rows, chain.rows
        chain.check(*reader.lookup("ads", IDS, found=True))
        release(tmp_path / "rows")
        _wait(lambda: reader.version is None)
        chain.rows = newer
        chain.check(*reader.lookup("ads", IDS, found=True))


def test_a_follower_has_the_newest_versions_ready(tmp_path: Path, chain: Chain) -> None:
    """A brake reads no file of rows, though the version's base is another than the newest rows'."""
    for name in ("monday", "tuesday", "wednesday"):
        chain.write(whole=True)
        chain.sink.mark(0, Mark(name, name, 5))
    chain.write(whole=True)
    with Reader(tmp_path / "rows").follow(0.01) as reader:
        _wait(lambda: {version.name for version in reader._files._ready} == {"tuesday", "wednesday"})
        reader.follow(3600)
        reader._files._add = None
        roll_back(tmp_path / "rows", "tuesday")
        _wait(lambda: reader.version is not None)


def test_a_brake_does_not_wait_for_files_that_are_being_read(
    tmp_path: Path, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are those put in place once they are read, for they are newer."""
    chain.sink.mark(0, Mark("monday", "key", 5))
    rows = dict(chain.rows)
    with Reader(tmp_path / "rows").follow(0.01) as reader:
        files = reader._files
        _wait(lambda: files._ready)
        begun, may_end = threading.Event(), threading.Event()
        read, put = files._read, files._put
        answers: list[bool] = []

        def slow(text: bytes, version: str | None) -> Any:
            found = read(text, version)
            if version is None:
                begun.set()
                may_end.wait(30)
            return found

        monkeypatch.setattr(files, "_read", slow)
        monkeypatch.setattr(files, "_put", lambda *arguments: answers.append(put(*arguments)))
        chain.write()
        assert begun.wait(30)
        roll_back(tmp_path / "rows", "monday")
        _wait(lambda: reader.version is not None)
        chain.rows = rows
        chain.check(*reader.lookup("ads", IDS, found=True))
        may_end.set()
        _wait(lambda: answers[:2] == [True, False])
        chain.check(*reader.lookup("ads", IDS, found=True))


def test_versions_where_there_are_none_are_refused(tmp_path: Path, chain: Chain) -> None:
    for source in ("redis://host/0", "ps://host:1"):
        with pytest.raises(ConfigError, match="Redis and servers have the newest rows alone"):
            Reader(source, version="monday")
    with pytest.raises(ConfigError, match=r"no version 'monday'.*It has none"):
        Reader(tmp_path / "rows", version="monday")
    table = ReferenceTable(SparseTableConfig("ads", DIM, Rule("sgd")))
    table.add(np.array([1]), np.ones((1, DIM), np.float32))
    save_table(table, tmp_path / "save")
    with pytest.raises(ConfigError, match="a save has no versions. Omit version="):
        Reader(tmp_path / "save", version="monday")
    assert Reader(tmp_path / "save").versions == []


def test_follow_outlives_a_header_that_is_nested_deeply(
    tmp_path: Path, chain: Chain, caplog: pytest.LogCaptureFixture
) -> None:
    """Once such a file ended the thread: the rows never became newer, and nobody was told."""
    manifest = tmp_path / "rows" / MANIFEST
    with Reader(tmp_path / "rows").follow(0.01) as reader:
        chain.write()
        _wait(lambda: reader.position[0].watermark == 10 * chain.step)
        content = json.loads(manifest.read_text())
        entry = content["servers"]["0"]["deltas"][-1]
        nested = struct.pack("<Q", 200_000) + b"[" * 200_000
        (tmp_path / "rows" / "nested").write_bytes(nested)
        entry.update(file="nested", bytes=len(nested), crc32=zlib.crc32(nested))
        good = manifest.read_bytes()
        manifest.write_text(json.dumps({**content, "servers": {"0": {**content["servers"]["0"], "deltas": [entry]}}}))
        _wait(lambda: "no complete safetensors file" in caplog.text)
        manifest.write_bytes(good)
        chain.write()
        _wait(lambda: reader.position[0].watermark == 10 * chain.step)
        chain.check(*reader.lookup("ads", IDS, found=True))


def test_a_thread_that_follows_no_more_is_said_and_lookups_raise(
    tmp_path: Path, chain: Chain, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Reader(tmp_path / "rows") as reader:
        with monkeypatch.context() as patch:
            patch.setattr(reader._files, "refresh", lambda: sys.exit(3))
            reader.follow(0.01)
            _wait(lambda: "The thread 'fleet-reader' has ended" in caplog.text)
            for call in (lambda: reader.lookup("ads", IDS), reader.refresh, lambda: reader.position):
                with pytest.raises(FleetError, match="'fleet-reader' has ended, and nothing does its work any more"):
                    call()
        reader.follow(0.01)
        chain.write()
        _wait(lambda: reader.position[0].watermark == 10 * chain.step)
        chain.check(*reader.lookup("ads", IDS, found=True))


@pytest.mark.parametrize("combiner", ["none", "sum", "mean"])
@pytest.mark.parametrize("separate_slots", [False, True])
def test_bags_are_those_of_the_embedding(tmp_path: Path, combiner: str, separate_slots: bool) -> None:
    """To the bit, for ids that have rows; with many ids in a bag an order of sums shows."""
    arguments = {"combiner": combiner, "num_slots": 2, "separate_slots": separate_slots, "padding_idx": 0}
    module = SparseEmbedding(5, name="ads", **arguments)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-20, 20, (6, 2) if combiner == "none" else (6, 2, 100), generator=generator)
    with torch.no_grad():
        wanted = module(ids)
        save_table(module.lookup.source.table, tmp_path)  # type: ignore[union-attr]
        reader = Reader(tmp_path)
        assert torch.equal(reader.lookup_bags("ads", ids, **arguments), wanted)
        if combiner != "none":
            flat, offsets = ids.flatten(), torch.arange(12) * 100
            assert torch.equal(reader.lookup_bags("ads", flat, offsets, **arguments), wanted)
            lists = [part.tolist() for part in ids.view(12, 100)]
            assert torch.equal(reader.lookup_bags("ads", lists, **arguments), wanted)
            assert not reader.lookup_bags("ads", [[], [0]], **arguments).any()
    with pytest.raises(ConfigError, match="combiner='max'"):
        reader.lookup_bags("ads", ids, combiner="max")


def test_bags_in_arrays(tmp_path: Path, saved: ReferenceTable) -> None:
    reader = Reader(tmp_path / "save")
    ids, offsets = np.array([-7, 5, 3]), np.array([0, 2], np.int32)
    wanted = reader.lookup_bags("ads", torch.from_numpy(ids), torch.from_numpy(offsets))
    assert torch.equal(reader.lookup_bags("ads", ids, offsets), wanted)
    assert torch.equal(reader.lookup_bags("ads", ids.view(np.uint64), offsets), wanted)
    assert torch.equal(reader.lookup_bags("ads", ids[None, :2]), wanted[:1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ids": 5}, "ids are a tensor, or a list of ids per sample; received int"),
        ({"ids": np.ones((1, 2))}, "ids are float64; they must be integers"),
        ({"ids": torch.tensor([1, 2])}, r"ids are \(2,\); with combiner 'sum' they must be \[batch, length\]"),
        ({"ids": torch.tensor([1, 2]), "offsets": [0]}, "offsets are list; they must be a tensor of integers"),
        ({"ids": torch.tensor([1, 2]), "offsets": torch.tensor([1])}, r"offsets \[1\] of ids \(2,\)"),
        ({"ids": [[1, 2], 3]}, "3 is not a list of ids"),
        ({"ids": [[1]], "num_slots": 0}, "num_slots=0. takes an integer from 1"),
        ({"ids": [[1]], "padding_idx": "0"}, "padding_idx='0'. takes an id, or None"),
    ],
)
def test_bags_that_are_refused(tmp_path: Path, saved: ReferenceTable, arguments: dict[str, Any], said: str) -> None:
    """By the name of what was called."""
    with pytest.raises(ConfigError, match=f"^reader.lookup_bags.*{said}"):
        Reader(tmp_path / "save").lookup_bags("ads", **arguments)


def test_a_lookup_loads_neither_torch_nor_a_compiler(tmp_path: Path, saved: ReferenceTable) -> None:
    program = (
        "import sys, fleet.ps\n"
        f"rows = fleet.ps.Reader({str(tmp_path / 'save')!r}).lookup('ads', [1, 2])\n"
        "print(rows.shape, [name for name in ('torch', 'numba', 'redis') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == f"(2, {DIM}) []"


@pytest.mark.skipif(bool(missing()), reason=missing() or "can run")
def test_a_redis_is_a_source_like_any(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        chain = Chain(RedisSink(redis.url, "shop", "int8"), encoding="int8")
        chain.write()
        with Reader(redis.url, job="shop").follow() as reader:
            chain.write()
            chain.check(*reader.lookup("ads", IDS, found=True))
            assert reader.tables == {"ads": DIM}
            assert reader.position[0].step == 2
            assert not reader.refresh()
            assert reader.lookup("ads", torch.tensor([[1, 2]])).shape == (1, 2, DIM)
            with pytest.raises(ConfigError, match="no such table"):
                reader.lookup("books", [1])
        chain.sink.close()
