"""A database that is not a number is refused by publisher and reader; the redis package takes database 0."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError
from fleet.ps.publishing.publication import Publication
from fleet.ps.publishing.redis_address import check_database
from fleet.ps.serving.redis_rows import RedisRows

RIGHT = ["redis://h:1", "redis://h:1/", "rediss://:p@h:1/12", "unix:///run/redis.sock?db=3", "redis://h?db=2"]
WRONG = ["redis://h:1/shop", "redis://:p@h:1/0/1", "rediss://h/-1", "redis://h//"]


@pytest.mark.parametrize("address", RIGHT)
def test_addresses(address: str) -> None:
    check_database("here", address)
    assert Publication(sink=address).sink == address


@pytest.mark.parametrize("address", WRONG)
def test_no_database(address: str) -> None:
    with pytest.raises(ConfigError, match="write its number"):
        check_database("here", address)
    with pytest.raises(ConfigError, match="write its number"):
        Publication(sink=address)
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match=r"^fleet.ps.Reader\('rediss?://h.*write its number"):
        RedisRows(address, "shop")
