"""Rows in a real Redis: all of a delta or nothing, and nothing of a publisher that was overtaken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fleet.errors import ConfigError, PSError
from fleet.ps.publishing.delta import Delta, RowsDelta, StaleDelta, unpack_rows
from fleet.ps.publishing.redis_sink import RedisSink
from tests.fleet.ps.publishing.rig import PublishingService
from tests.helpers.redis_server import RedisServer, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


_opened: list[RedisSink] = []


@pytest.fixture(autouse=True)
def empty(redis: RedisServer) -> Iterator[None]:
    with redis.client() as client:
        client.flushall()
    yield
    while _opened:
        _opened.pop().close()


def sink_of(url: str, job: str, values: str) -> RedisSink:
    """Returns a sink that is closed after the test."""
    _opened.append(RedisSink(url, job, values))
    return _opened[-1]


def delta(
    previous: int,
    watermark: int,
    rows: dict[int, float],
    deleted: tuple[int, ...] = (),
    *,
    whole: bool = False,
    history: str = "00000001-a",
    server: int = 0,
    num_servers: int = 1,
    dim: int = 3,
) -> Delta:
    keys = np.array(list(rows), np.int64)
    values = np.repeat(np.array(list(rows.values()), np.float32)[:, None], dim, axis=1).reshape(-1, dim)
    table = RowsDelta("a[d]s", keys, values, np.array(deleted, np.int64))
    return Delta("shop", server, num_servers, history, previous, watermark, 5, 1.5, whole, (table,))


def rows_of(redis: RedisServer, values: str = "float32", dim: int = 3) -> dict[int, list[float]]:
    with redis.client() as client:
        prefix = b"fleet:shop:a[d]s:"
        keys = sorted(key for key in client.keys("*") if key.startswith(prefix))
        found = {int(key[len(prefix) :]): client.get(key) for key in keys}
    return {key: unpack_rows(row, dim, values)[0].tolist() for key, row in found.items()}


@pytest.mark.parametrize("values", ["float32", "bfloat16", "int8"])
def test_rows_positions_and_descriptions(redis: RedisServer, values: str) -> None:
    sink = sink_of(redis.url, "shop", values)
    assert sink.position(0) is None
    sink.write(delta(0, 4, {1: 1.0, -9: 2.0}, whole=True))
    sink.write(delta(4, 6, {2: 4.0}, (1, 77)))
    assert sink.position(0) == ("00000001-a", 6)
    assert rows_of(redis, values) == {-9: [2.0] * 3, 2: [4.0] * 3}
    with redis.client() as client:
        assert client.hgetall("fleet:shop:a[d]s") == {b"values": values.encode(), b"dim": b"3"}
        state = json.loads(client.hget("fleet:shop:position", "0"))
    assert state == {
        "history": "00000001-a",
        "watermark": 6,
        "step": 5,
        "pushed_at": 1.5,
        "values": values,
        "num_servers": 1,
    }


def test_a_delta_that_does_not_continue_changes_nothing(redis: RedisServer) -> None:
    sink = sink_of(redis.url, "shop", "float32")
    sink.write(delta(0, 4, {1: 1.0}, whole=True))
    for wrong in (delta(3, 9, {1: 2.0}), delta(4, 9, {1: 2.0}, history="00000001-b"), delta(0, 3, {}, whole=True)):
        with pytest.raises(StaleDelta):
            sink.write(wrong)
    assert rows_of(redis) == {1: [1.0] * 3}
    sink.write(delta(0, 1, {7: 1.0}, whole=True, history="00000002-a"))
    assert rows_of(redis) == {7: [1.0] * 3}


def test_two_publishers_at_once_never_put_an_older_row_over_a_newer_one(redis: RedisServer) -> None:
    """The zombie stands between its question and its transaction while the successor writes."""
    sink = sink_of(redis.url, "shop", "float32")
    sink.write(delta(0, 4, {1: 1.0}, whole=True))
    zombie = sink_of(redis.url, "shop", "float32")
    plain = zombie._queue_all

    def meanwhile(pipe: object, late: Delta) -> None:
        if sink.position(0) == ("00000001-a", 4):
            sink.write(delta(4, 8, {1: 8.0}))
        plain(pipe, late)

    zombie._queue_all = meanwhile  # type: ignore[method-assign]
    with pytest.raises(StaleDelta):
        zombie.write(delta(4, 6, {1: 6.0}))
    assert rows_of(redis) == {1: [8.0] * 3}
    assert sink.position(0) == ("00000001-a", 8)


def test_another_server_of_the_job_does_not_disturb_a_delta(redis: RedisServer) -> None:
    sinks = [sink_of(redis.url, "shop", "float32") for _ in range(2)]
    plain = sinks[0]._queue_all
    wrote = []

    def meanwhile(pipe: object, mine: Delta) -> None:
        if not wrote:
            sinks[1].write(delta(0, 3, {}, whole=True, server=1, num_servers=2))
        wrote.append(True)
        plain(pipe, mine)

    sinks[0]._queue_all = meanwhile  # type: ignore[method-assign]
    sinks[0].write(delta(0, 4, {1: 1.0}, whole=True, num_servers=2))
    assert len(wrote) == 2
    assert sinks[0].position(1) == ("00000001-a", 3)


def test_a_whole_delta_replaces_the_rows_of_its_server_only(redis: RedisServer) -> None:
    sink = sink_of(redis.url, "shop", "float32")
    sink.write(delta(0, 4, dict.fromkeys(range(40), 1.0), whole=True))
    sink.write(delta(0, 5, {0: 3.0}, whole=True, history="00000002-a", num_servers=2))
    left = rows_of(redis)
    assert 10 < len(left) < 30
    sink.write(delta(0, 6, {}, whole=True, history="00000002-b", server=1, num_servers=2))
    assert set(rows_of(redis)) <= {0}
    sink.write(delta(0, 7, {}, whole=True, history="00000003-b"))
    assert sink.position(1) is None  # the job has one server now


def test_rows_of_another_form_and_names_that_could_be_mistaken_are_refused(redis: RedisServer) -> None:
    sink_of(redis.url, "shop", "float32").write(delta(0, 4, {1: 1.0}, whole=True))
    for values, dim in (("int8", 3), ("float32", 4)):
        with pytest.raises(ConfigError, match=r"float32 rows of dim 3, these are .*fleet:shop:\*"):
            sink_of(redis.url, "shop", values).write(delta(4, 6, {1: 1.0}, dim=dim))
    assert sink_of(redis.url, "shop", "float32").position(1) is None
    for server in (0, 1):  # at the start of a job, before there is a delta
        with pytest.raises(ConfigError, match=r"rows as float32, and these are int8.*fleet:shop:\*"):
            sink_of(redis.url, "shop", "int8").position(server)
    client = redis.client()
    client.hset("fleet:shop:a[d]s", "dim", "9" * 5000)
    with pytest.raises(ConfigError, match=r"float32 rows of dim 9{20}, these are float32 rows of dim 3"):
        sink_of(redis.url, "shop", "float32").write(delta(4, 6, {1: 1.0}))
    for text in ("[" * 100_000, "{}", "7"):
        client.hset("fleet:shop:position", "1", text)
        with pytest.raises(ConfigError, match=r"as the position of a server .*no publisher writes.*fleet:shop:\*"):
            sink_of(redis.url, "shop", "float32").position(1)
    client.close()
    table = RowsDelta("position", np.empty(0, np.int64), np.empty((0, 3), np.float32), np.empty(0, np.int64))
    with pytest.raises(ConfigError, match="'position' cannot be published to Redis"):
        sink_of(redis.url, "shop", "float32").write(Delta("shop", 0, 1, "00000001-a", 4, 5, 0, 0.0, False, (table,)))
    with pytest.raises(ConfigError, match="redis://host:port/database"):
        RedisSink("redis://host:port/0", "shop", "float32")


def test_redis_killed_between_deltas_loses_nothing(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        service = PublishingService(server.url, tmp_path / "ps", 2, job="shop")
        try:
            client = service.client(job="shop")
            for round_ in range(3):
                service.push(client, *range(round_, round_ + 9))
                service.publish()
                server.kill()
                service.push(client, 100 + round_)
                with pytest.raises(Exception, match="[Cc]onnect"):
                    service.publish()
                server.start()
            service.publish()
            with server.client() as reader:
                prefix = b"fleet:shop:ads:"
                found = {int(key[len(prefix) :]): reader.get(key) for key in reader.keys(prefix + b"*")}
            assert found == service.served()["ads"]
        finally:
            service.close()


def test_a_job_whose_keys_could_be_those_of_another_is_refused(redis: RedisServer) -> None:
    """Row 7 of table "ads:us" of "shop" and of table "us" of "shop:ads" would be one key."""
    with pytest.raises(ConfigError, match=r"'shop:ads'.*name without ':'"):
        RedisSink(redis.url, "shop:ads", "float32")


def test_a_wrong_password_is_named(redis: RedisServer) -> None:
    sink = RedisSink(redis.url.replace("://", "://:wrong@"), "shop", "float32")
    with redis.client() as client:
        client.config_set("requirepass", "right")
        try:
            with pytest.raises(PSError, match=r"refuses this client: .*redis://user:password@") as caught:
                sink.position(0)
            assert "wrong@" not in str(caught.value)
        finally:
            client.config_set("requirepass", "")
    sink.close()
