"""Lightning Fabric with FleetStrategy: users' scripts on two workers train as Lightning alone does in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.integrations.test_lightning import compare

pytestmark = pytest.mark.slow


def test_scripts_train_as_in_one_process(tmp_path: Path) -> None:
    compare("fabric", tmp_path)
