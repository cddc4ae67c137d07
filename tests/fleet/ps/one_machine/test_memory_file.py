"""Memory that two processes of one user share: found by its word alone, of the right size, and not to be shortened."""

from __future__ import annotations

import os
from typing import Any

import pytest

from fleet.ps.one_machine.memory_file import NotShared, make_memory, open_memory


def test_memory_is_one_keeps_its_size_and_is_found_while_its_maker_has_it_open() -> None:
    fd, place = make_memory(8192)
    other = open_memory(place, 8192)
    os.pwrite(fd, b"abc", 4096)
    assert os.pread(other, 3, 4096) == b"abc"
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    os.close(fd)
    os.close(other)
    with pytest.raises(NotShared):
        open_memory(place, 8192)


@pytest.mark.parametrize(
    "wrong",
    [{"word": "0" * 32}, {"word": 7}, {"pid": "1"}, {"pid": -1}, {"fd": -1}, {"fd": True}, {"fd": 1 << 30}, {"pid": 0}],
)
def test_another_place_is_refused(wrong: dict[str, Any]) -> None:
    fd, place = make_memory(4096)
    with pytest.raises(NotShared):
        open_memory({**place, **wrong}, 4096)
    with pytest.raises(NotShared, match="not memory that this user made"):
        open_memory(place, 8192)
    os.close(open_memory(place, 4096))
    os.close(fd)
