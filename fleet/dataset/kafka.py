"""KafkaSource: the partitions of a topic, for StreamDataset; needs the extra ``kafka``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fleet.common.extras import install_line
from fleet.dataset.stream_source import Event
from fleet.errors import ConfigError, FleetError, UnsupportedOptionError

_OWN = ("bootstrap.servers", "enable.auto.commit", "auto.offset.reset", "enable.partition.eof")
_MESSAGES_PER_POLL = 1000


class KafkaRecord(NamedTuple):
    """The part of a message that a parse function receives."""

    value: bytes | None
    key: bytes | None
    timestamp: float | None  # unix time in seconds


class KafkaSource:
    """A topic of Kafka. Positions live on the parameter servers; no offsets are committed to Kafka.

    Args:
        servers: ``host:port``, several with commas.
        topic: its name.
        start: where a partition begins that the job has not read: ``"earliest"`` or ``"latest"``.
        name: under which the servers keep the positions; the topic by default.
        stop_at_end: the stream ends with the last message of now; otherwise the reader waits for more.
        config: further settings of librdkafka, such as ``{"security.protocol": "SSL"}``.

    Raises:
        ConfigError: an argument is wrong.
        UnsupportedOptionError: confluent-kafka is not installed.

    Example:
        >>> source = fleet.KafkaSource("127.0.0.1:9092", "clicks")
        >>> dataset = fleet.StreamDataset(source, lambda record: int(record.value), batch_size=256)
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        *,
        start: str = "earliest",
        name: str | None = None,
        stop_at_end: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if start not in ("earliest", "latest"):
            raise ConfigError(f"KafkaSource(start={start!r}): it is 'earliest' or 'latest'.")
        for key, value in (("servers", servers), ("topic", topic)):
            if not isinstance(value, str) or not value:
                raise ConfigError(f"KafkaSource({key}={value!r}): it is a string that is not empty.")
        for key in config or {}:
            if key in _OWN:
                raise ConfigError(
                    f"KafkaSource(config={{{key!r}: ...}}): StreamDataset decides it, because positions are kept with "
                    "the rows. Leave it out."
                )
        try:
            import confluent_kafka
        except ImportError:
            raise UnsupportedOptionError(
                f"KafkaSource needs the package confluent-kafka; {install_line('kafka')}."
            ) from None
        self._kafka = confluent_kafka
        self.name = topic if name is None else name
        self._servers = servers
        self._topic = topic
        self._start = start
        self._stop_at_end = stop_at_end
        self._config = dict(config or {})
        self.answer_s = 10.0  # how long a broker may take to describe the topic

    def partitions(self) -> int:
        """Returns how many partitions the topic has.

        Raises:
            FleetError: no broker answers, or there is no such topic.
        """
        consumer = self._consumer()
        try:
            known = consumer.list_topics(self._topic, timeout=self.answer_s).topics[self._topic]
        except self._kafka.KafkaException as error:
            raise FleetError(
                f"KafkaSource({self._servers!r}, {self._topic!r}): no broker answered in {self.answer_s:g} s: {error}."
            ) from None
        finally:
            consumer.close()
        if known.error is not None or not known.partitions:
            raise FleetError(
                f"KafkaSource({self._servers!r}, {self._topic!r}): no such topic can be read: {known.error}"
            )
        return len(known.partitions)

    def open(self, starts: Mapping[int, int | None]) -> KafkaReader:
        """Returns a reader of these partitions."""
        first = self._kafka.OFFSET_BEGINNING if self._start == "earliest" else self._kafka.OFFSET_END
        places = [
            self._kafka.TopicPartition(self._topic, partition, first if start is None else start)
            for partition, start in starts.items()
        ]
        consumer = self._consumer()
        consumer.assign(places)
        return KafkaReader(self._kafka, consumer, self._topic, set(starts))

    def _consumer(self) -> Any:
        return self._kafka.Consumer(
            {
                "group.id": f"fleet-{self.name}",
                **self._config,
                "bootstrap.servers": self._servers,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": self._stop_at_end,
            }
        )


class KafkaReader:
    """Reads partitions of a topic; made by :meth:`KafkaSource.open`."""

    def __init__(self, kafka: Any, consumer: Any, topic: str, partitions: set[int]) -> None:
        self._kafka = kafka
        self._consumer = consumer
        self._topic = topic
        self._left = partitions

    def poll(self, timeout_s: float) -> list[Event] | None:
        """Returns the messages that came.

        Raises:
            FleetError: Kafka has deleted the offset, or cannot go on.
        """
        if not self._left:
            return None
        events = []
        # With a timeout, consume() waits until it has all messages that it was asked for.
        consume = self._consumer.consume
        for message in consume(_MESSAGES_PER_POLL, 0) or consume(1, timeout_s):
            if message.error() is None:
                kind, stamp = message.timestamp()
                seconds = None if kind == self._kafka.TIMESTAMP_NOT_AVAILABLE else stamp / 1000
                record = KafkaRecord(message.value(), message.key(), seconds)
                events.append(Event(message.partition(), message.offset(), record))
            elif message.error().code() == self._kafka.KafkaError._PARTITION_EOF:
                self._left.discard(message.partition())
            elif not message.error().retriable():
                raise FleetError(
                    f"topic {self._topic!r}, partition {message.partition()}: {message.error().str()}. If the "
                    "broker has deleted messages that were not read (retention), they cannot be trained: read it "
                    "under another name (KafkaSource(name=...)) to begin at its start."
                )
        return events

    def lag(self, following: Mapping[int, int]) -> int | None:
        """Returns how many messages the broker has behind the offsets; ``None`` before it has said anything."""
        waiting = []
        for partition, offset in following.items():
            low, high = self._consumer.get_watermark_offsets(
                self._kafka.TopicPartition(self._topic, partition), cached=True
            )
            if high >= 0:
                waiting.append(max(0, high - max(offset, low)))
        return sum(waiting) if waiting else None

    def close(self) -> None:
        """Disconnects."""
        self._consumer.close()
