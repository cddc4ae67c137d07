"""KafkaSource on the mock broker of confluent-kafka: partitions, offsets, the end, lag, and what cannot be read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

import fleet
from fleet.errors import ConfigError, FleetError
from tests.fleet.dataset.test_stream import TRAIN, trained

PARTITIONS = 4  # of a topic that the mock broker makes


@pytest.fixture(scope="module")
def broker() -> Iterator[tuple[str, Producer]]:
    # The cluster lives inside this producer; log_level keeps its greeting off standard error.
    producer = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused", "log_level": 0})
    (one,) = producer.list_topics(timeout=20).brokers.values()
    yield f"{one.host}:{one.port}", producer
    producer.flush(5)


def filled(broker: tuple[str, Producer], topic: str, per_partition: int = 5) -> str:
    address, producer = broker
    for number in range(per_partition):
        for partition in range(PARTITIONS):
            producer.produce(topic, value=b"%d" % (100 * partition + number), key=b"k", partition=partition)
    assert producer.flush(20) == 0
    return address


def value_of(record) -> int:
    return int(record.value)


def source(address: str, topic: str, **settings) -> fleet.KafkaSource:
    return fleet.KafkaSource(address, topic, stop_at_end=True, **settings)


def test_every_message_comes_once_in_the_order_of_its_partition(broker) -> None:
    dataset = fleet.StreamDataset(source(filled(broker, "clicks"), "clicks"), value_of, batch_size=3)
    found = [value for batch in dataset for value in batch.tolist()]
    assert sorted(found) == sorted(100 * p + n for p in range(PARTITIONS) for n in range(5))
    for partition in range(PARTITIONS):
        mine = [value for value in found if value // 100 == partition]
        assert mine == sorted(mine)
    assert dataset.lag() == 0
    assert dataset.lags() == dict.fromkeys(range(PARTITIONS), 0)
    assert dataset.state_dict() == {"name": "clicks", "positions": {str(p): 5 for p in range(PARTITIONS)}}
    dataset.close()


def test_a_state_goes_on_behind_its_offsets(broker) -> None:
    dataset = fleet.StreamDataset(source(filled(broker, "views"), "views"), value_of, batch_size=2)
    dataset.load_state_dict({"name": "views", "positions": {"0": 4, "1": 5, "2": 3, "3": 5}})
    assert sorted(value for batch in dataset for value in batch.tolist()) == [4, 203, 204]
    dataset.close()


def test_a_record_has_value_key_and_time(broker) -> None:
    records = []
    dataset = fleet.StreamDataset(
        source(filled(broker, "kinds", 1), "kinds"), lambda record: records.append(record) or 0, batch_size=4
    )
    list(dataset)
    assert {record.key for record in records} == {b"k"}
    assert all(record.timestamp > 1e9 for record in records)
    dataset.close()


def test_messages_that_the_broker_no_longer_has_are_said(broker) -> None:
    dataset = fleet.StreamDataset(source(filled(broker, "short"), "short"), value_of, batch_size=2)
    dataset.load_state_dict({"name": "short", "positions": {"0": 4000}})
    with pytest.raises(FleetError, match=r"topic 'short', partition 0: .*\(retention\)"):
        list(dataset)
    dataset.close()


def test_no_broker_is_an_error_with_its_address() -> None:
    lonely = fleet.KafkaSource("127.0.0.1:1", "clicks", config={"log_level": 0})
    lonely.answer_s = 0.5
    with pytest.raises(FleetError, match=re.escape("KafkaSource('127.0.0.1:1', 'clicks'): no broker answered")):
        lonely.partitions()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"start": "first"}, "start='first'"),
        ({"topic": ""}, "topic=''"),
        ({"servers": None}, "servers=None"),
        ({"config": {"enable.auto.commit": True}}, "'enable.auto.commit'"),
    ],
)
def test_wrong_arguments_are_refused(settings, words) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        fleet.KafkaSource(**{"servers": "127.0.0.1:1", "topic": "clicks", **settings})


def test_a_source_has_its_own_name_and_partitions() -> None:
    with pytest.raises(ConfigError, match="a source has its own name and partitions"):
        fleet.StreamDataset(fleet.KafkaSource("127.0.0.1:1", "c"), value_of, batch_size=1, name="other")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "stale"])
def test_each_message_is_trained_once_whatever_is_killed(broker, tmp_path: Path, mode: str) -> None:
    """Workers and servers of a real job; the broker stays."""
    events, (address, producer) = 1000, broker
    for offset in range(events):
        for partition in range(PARTITIONS):
            producer.produce(mode, value=b"%d" % ((offset * 7 + partition) % 50), partition=partition)
        producer.poll(0)
    assert producer.flush(60) == 0
    own = 'fleet.StreamDataset(events, int, batch_size=32, partitions=PARTITIONS, name="clicks")'
    assert own in TRAIN
    kafka = f'fleet.KafkaSource("{address}", "{mode}", stop_at_end=True)'
    script = TRAIN.replace(own, f"fleet.StreamDataset({kafka}, lambda record: int(record.value), batch_size=32)")
    trained(tmp_path, mode, kills=3, servers=2, events=events, script=script)
