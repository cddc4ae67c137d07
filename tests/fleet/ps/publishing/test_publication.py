"""What may be published where: wrong values are refused with the rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet import ps
from fleet.errors import ConfigError
from fleet.ps.publishing.publication import Publication, open_sink, take_asked

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"every_s": 0}, "every_s is 0; it takes a number of seconds above 0"),
    ({"every_s": True}, "every_s is True"),
    ({"every_s": float("nan")}, "every_s is nan"),
    ({"every_s": 1e300}, r"every_s is 1e\+300; it takes a number of seconds above 0"),
    ({"values": "float16"}, "'float16'.*'float32', 'bfloat16', 'int8'"),
    ({"sink": ""}, "the sink is ''"),
    ({"sink": "folder:"}, "a path follows it"),
    ({"sink": "folder:///mnt/rows"}, "a path follows the colon, such as folder:/mnt/rows"),
    ({"sink": "redis://h:99999/0"}, "has no port from 0 to 65535"),
    ({"sink": "redis://:secret@h:x/0"}, "'redis://h:x/0' has no port"),
    ({"sink": "http://x"}, "schemes are redis://"),
    ({"sink": "redis://"}, "write the host"),
    ({"sink": 3}, "the sink is 3"),
    ({"sink": print, "values": "int8"}, "the sink is a function; it gets float32 rows"),
    ({"tables": "ads"}, r"write \['ads'\]"),
    ({"tables": []}, "at least one"),
    ({"tables": [3]}, "names of sparse tables"),
    ({"tables": 3}, "tables=3.*names of sparse tables"),
]


@pytest.mark.parametrize(("fields", "rule"), WRONG)
def test_wrong_values_are_refused(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        ps.publish(**{"sink": "folder:rows", **fields})
    assert take_asked() is None


def test_a_second_sink_is_refused() -> None:
    ps.publish("folder:rows", tables=["ads"])
    with pytest.raises(ConfigError, match="called twice"):
        ps.publish("folder:rows")
    asked = take_asked()
    assert asked is not None
    assert (asked.sink, asked.every_s, asked.values, asked.tables) == ("folder:rows", 1.0, "float32", {"ads"})
    assert take_asked() is None


def test_a_path_is_a_path(tmp_path: Path) -> None:
    ps.publish(tmp_path / "rows")
    asked = take_asked()
    assert asked is not None
    assert asked.sink == asked.address == str(tmp_path / "rows")


def test_messages_name_the_sink_without_its_password() -> None:
    pytest.importorskip("redis")
    assert Publication(sink="redis://u:secret@host:1/0").address == "redis://***@host:1/0"
    assert Publication(sink=print).address == "print"


def test_the_extra_of_a_sink_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.ps.publishing.redis_sink.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[redis\]'"):
        open_sink(Publication(sink="redis://host/0"), "job")
