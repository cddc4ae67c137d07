"""Which server holds what (D.2)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigError
from fleet.ps import plan_dense_blocks, servers_of_keys
from fleet.ps.table.hash import mix, mix_int, range_of
from fleet.ps.table.partition import range_bounds
from tests.fleet.ps._tables import key_with_bits


def test_placement_is_stable() -> None:
    """Files and running jobs depend on it: these numbers never change."""
    keys = np.array([0, 1, 2, -1, 2**63 - 1, 1_000_003])
    assert mix(keys).tolist() == [mix_int(key) for key in keys.tolist()]
    assert mix_int(1) == 0xB456BCFC34C2CB2C
    assert servers_of_keys(keys, 8).tolist() == [0, 5, 1, 3, 5, 7]
    assert key_with_bits(mix_int(-12345)) == -12345


def test_modulo_is_the_documented_one() -> None:
    """D.2: id % servers; ids are unsigned there."""
    assert servers_of_keys(np.array([0, 7, 8, -1]), 3, "modulo").tolist() == [0, 1, 2, (2**64 - 1) % 3]
    with pytest.raises(ConfigError, match="routing"):
        servers_of_keys(np.array([1]), 2, "hash")


@pytest.mark.parametrize("servers", [1, 2, 3, 7, 100, 4096])
@pytest.mark.parametrize("stride", [1, 2, 4096, 2**40])
def test_ranges_share_any_ids_evenly(servers: int, stride: int) -> None:
    """The key's bits are mixed: ids in steps do not fall on one server; each server's ranges stand together."""
    keys = np.arange(200_000) * stride
    owners, bounds = servers_of_keys(keys, servers), range_bounds(servers)
    ranges = range_of(mix(keys))
    for server in range(min(servers, 20)):
        inside = (ranges >= bounds[server]) & (ranges < bounds[server + 1])
        assert ((owners == server) == inside).all()
    counts = np.bincount(owners, minlength=servers)
    assert len(counts) == servers
    mean = len(keys) / servers
    # The shares of ranges differ by one in 4096 / servers, the rest is chance.
    assert np.abs(counts - mean).max() < mean * servers / 4096 + 6 * np.sqrt(mean)


@given(st.integers(0, 10**6), st.integers(1, 4096))
def test_dense_blocks_cover_everything_once(elements: int, servers: int) -> None:
    """Consecutive, none missing, none twice, no server with more than its share."""
    blocks = plan_dense_blocks(elements, servers)
    assert len(blocks) == servers
    assert blocks[0][0] == 0
    assert blocks[-1][1] == elements
    assert all(a[1] == b[0] for a, b in zip(blocks, blocks[1:], strict=False))
    assert max(stop - start for start, stop in blocks) <= -(-elements // servers)


@pytest.mark.parametrize("servers", [0, -1, 4097, 1.0, True])
def test_number_of_servers(servers: object) -> None:
    """Refused before anything is placed."""
    with pytest.raises(ConfigError, match="number of servers"):
        servers_of_keys(np.array([1]), servers)  # type: ignore[arg-type]
