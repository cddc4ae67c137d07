"""The size of an elastic job on etcd."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.errors import ConfigError, LaunchError
from fleet.k8s._size_record import write_size
from tests.helpers import etcd


def test_without_an_address_the_edit_is_refused() -> None:
    with pytest.raises(ConfigError, match="edited to 3 pods.*--etcd-server host:port"):
        write_size(None, "default-demo", 3)


@pytest.mark.skipif(bool(etcd.missing()), reason=etcd.missing() or "no reason")
def test_a_job_that_has_not_started_has_no_size_to_set(tmp_path: Path) -> None:
    """004-17: its launchers come with the new size; a job that runs is in test_operator."""
    with etcd.Etcd(tmp_path / "etcd") as server:
        write_size(server.endpoint, "default-demo", 3)
        address = server.endpoint
    with pytest.raises(LaunchError):
        write_size(address, "default-demo", 3)
