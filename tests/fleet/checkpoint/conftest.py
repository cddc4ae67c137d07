"""No test leaves the process that writes behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet.checkpoint.writer import own_writer


@pytest.fixture(autouse=True)
def _no_writer_left() -> Iterator[None]:
    yield
    own_writer().close()
