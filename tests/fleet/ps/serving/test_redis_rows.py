from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.errors import ConfigError, PSError
from fleet.ps.publishing.redis_sink import RedisSink
from fleet.ps.serving import redis_rows
from fleet.ps.serving.redis_rows import RedisRows
from fleet.ps.table.partition import servers_of_keys
from tests.fleet.ps.serving.deltas import DIM, IDS, Chain
from tests.helpers.redis_server import RedisServer, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "can run")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(shared: RedisServer) -> RedisServer:
    shared.client().flushall()
    return shared


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8"])
def test_every_delta(redis: RedisServer, encoding: str) -> None:
    chain = Chain(RedisSink(redis.url, "shop", encoding), 2, encoding)
    chain.write()
    rows = RedisRows(redis.url, None)
    assert rows.dims == {"ads": DIM}
    for step in range(1, 4):
        chain.check(*rows.lookup("ads", IDS))
        assert rows.positions[1].watermark == 10 * step
        assert not rows.refresh()
        chain.write(whole=step == 2)
    values, found = rows.lookup("ads", np.empty(0, np.int64))
    assert values.shape == (0, DIM)
    assert len(found) == 0
    rows.close()
    chain.sink.close()


def test_the_job_is_named_where_there_are_several(redis: RedisServer) -> None:
    with pytest.raises(ConfigError, match="no rows of a job yet.*try again then, or name the job with job="):
        RedisRows(redis.url, None)
    for job in ("shop", "toys"):
        sink = RedisSink(redis.url, job, "float32")
        Chain(sink).write()
        sink.close()
    with pytest.raises(ConfigError, match=r"has the rows of \['shop', 'toys'\]; choose one with job="):
        RedisRows(redis.url, None)
    rows = RedisRows(redis.url, "shop")
    assert rows.positions.keys() == {0}
    with pytest.raises(ConfigError, match="no such table.*Did you mean 'ads'"):
        rows.lookup("add", IDS)
    rows.close()


def test_rows_of_servers_that_have_not_written_are_not_read_as_zeros(redis: RedisServer) -> None:
    early = RedisRows(redis.url, "shop")
    sink = RedisSink(redis.url, "shop", "float32")
    chain = Chain(sink, servers=2)
    mine = IDS[servers_of_keys(IDS, 2) == 0]
    chain.put(0, mine, np.ones((len(mine), DIM), np.float32), IDS[:0], whole=True)
    for ask in (lambda: early.lookup("ads", IDS), lambda: RedisRows(redis.url, None)):
        with pytest.raises(ConfigError, match=r"of the job's 2 servers only those of number \[0\] have written rows"):
            ask()
    chain.put(1, IDS[:0], np.empty((0, DIM), np.float32), IDS[:0], whole=True)
    assert early.lookup("ads", mine)[1].all()
    sink.close()


def test_what_no_publisher_wrote(redis: RedisServer) -> None:
    client = redis.client()
    client.hset("fleet:shop:position", "0", '{"history": "a", "watermark": 1}')
    client.hset("fleet:shop:ads", mapping={"dim": 2, "values": "float32"})
    client.set("fleet:shop:ads:7", b"123")
    client.hset("fleet:shop:users", mapping={"dim": "x", "values": "float32"})
    rows = RedisRows(redis.url, "shop")
    with pytest.raises(ConfigError, match="It has 'ads'"):
        rows.lookup("books", np.array([7]))
    with pytest.raises(PSError, match="has not the 8 bytes of 2 columns as float32"):
        rows.lookup("ads", np.array([7]))
    with pytest.raises(PSError, match="describes no table"):
        rows.lookup("users", np.array([7]))
    for dim in ("1000000000000", "9" * 5000, "65537", "0", "-1"):
        client.hset("fleet:shop:books", mapping={"dim": dim, "values": "float32"})
        with pytest.raises(PSError, match="books describes no table.*A table has 1 to 65536 columns"):
            rows.lookup("books", np.array([7]))
        assert rows.dims == {"ads": 2}
    large = [f'{{"history": "a", "watermark": {text}}}' for text in ("9" * 4000, "true", f'1, "num_servers": {10**12}')]
    for text in ("{", "[]", "{}", "[" * 100_000, *large):
        client.hset("fleet:shop:position", "0", text)
        for ask in (lambda: rows.positions, lambda: RedisRows(redis.url, "shop")):
            with pytest.raises(PSError, match="position is not what a publisher writes"):
                ask()
    rows.close()
    client.close()


def test_a_redis_that_is_away_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_rows, "_RETRIES", 1)
    with RedisServer(tmp_path) as redis:
        chain = Chain(RedisSink(redis.url, "shop", "float32"))
        chain.write()
        rows = RedisRows(redis.url, "shop")
        chain.check(*rows.lookup("ads", IDS))
        redis.kill()
        with pytest.raises(PSError, match=f"redis://127.0.0.1:{redis.port}/0: Redis does not answer"):
            rows.lookup("ads", IDS)
        redis.start()
        chain.check(*rows.lookup("ads", IDS))
        rows.close()
        chain.sink.close()


def test_addresses_and_a_package_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="fleet.ps.Reader"):
        RedisRows("redis://host:port/0", "shop")
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"Reader\('redis://host'\) needs.*pip install '\.\[redis\]'"):
        RedisRows("redis://user:secret@host", "shop")


def test_a_wrong_password_is_named(redis: RedisServer) -> None:
    with redis.client() as client:
        client.config_set("requirepass", "right")
        try:
            with pytest.raises(PSError, match=r"refuses this client: .*redis://user:password@") as caught:
                RedisRows(redis.url.replace("://", "://:wrong@"), "shop").refresh()
            assert "wrong@" not in str(caught.value)
        finally:
            client.config_set("requirepass", "")


def test_a_table_whose_key_looks_like_a_jobs_positions(redis: RedisServer) -> None:
    sink = RedisSink(redis.url, "shop", "float32")
    Chain(sink).write()
    with redis.client() as client:
        client.hset("fleet:shop:ads:position", mapping={"values": "float32", "dim": 4})
    rows = RedisRows(redis.url, None)
    assert rows.positions.keys() == {0}
    rows.close()
    sink.close()


@pytest.mark.parametrize("table", ["position", None, ["ads"]])
def test_the_positions_are_no_table(redis: RedisServer, table: Any) -> None:
    sink = RedisSink(redis.url, "shop", "float32")
    Chain(sink).write()
    rows = RedisRows(redis.url, "shop")
    with pytest.raises(ConfigError, match="no such table.* It has 'ads'"):
        rows.lookup(table, np.array([1]))
    rows.close()
    sink.close()
