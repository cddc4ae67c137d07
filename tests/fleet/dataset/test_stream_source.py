"""Sources made of a function: turns between partitions, ends, pauses, and what is no event."""

from __future__ import annotations

import time

import pytest

from fleet.dataset.stream_source import Event, ReplayableSource, StreamSource
from fleet.errors import ConfigError


def letters(partition: int, start: int):
    return ((offset, f"{partition}{chr(97 + offset)}") for offset in range(start, 3))


def test_each_partition_begins_at_its_offset() -> None:
    source = ReplayableSource(letters, 2, "letters")
    assert isinstance(source, StreamSource)
    reader = source.open({0: 1, 1: None})
    found = reader.poll(1.0)
    assert found == [Event(0, 1, "0b"), Event(0, 2, "0c"), Event(1, 0, "1a"), Event(1, 1, "1b"), Event(1, 2, "1c")]
    assert reader.poll(1.0) is None
    assert reader.lag({0: 1}) is None


def test_a_function_with_an_end_says_how_much_waits() -> None:
    class Letters:
        __call__ = staticmethod(letters)

        def end(self, partition: int) -> int:
            return 3 + partition

    reader = ReplayableSource(Letters(), 2, "letters").open({0: None, 1: None})
    assert reader.lag({0: 1, 1: 0}) == 2 + 4
    assert reader.lag({0: 7}) == 0


def test_none_means_that_nothing_has_come_yet() -> None:
    def slow(partition: int, start: int):
        while True:
            yield None if time.monotonic() < ready else (start, "late")
            start += 1

    ready = time.monotonic() + 0.2
    reader = ReplayableSource(slow).open({0: 5})
    assert reader.poll(0.01) == []
    found = reader.poll(30.0)
    assert found is not None
    assert found[0].record == "late"
    reader.close()
    assert reader.poll(0.01) is None


@pytest.mark.parametrize("item", [7, ("a", "b", "c"), "x"])
def test_what_is_no_offset_and_record_is_named(item) -> None:
    reader = ReplayableSource(lambda partition, start: iter([item]), name="odd").open({0: 0})
    with pytest.raises(ConfigError, match=r"stream 'odd', partition 0: the source gave .*not \(offset, record\)"):
        reader.poll(0.1)


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="a source is a KafkaSource, an object with name"):
        ReplayableSource([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"partitions=0"):
        ReplayableSource(letters, 0)
