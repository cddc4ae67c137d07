"""One etcd for all quick tests of a run; each test uses a job of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers import etcd as helper
from tests.helpers.etcd import Etcd


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """A running etcd that no test stops."""
    if helper.missing():
        pytest.skip(helper.missing())
    with Etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server
