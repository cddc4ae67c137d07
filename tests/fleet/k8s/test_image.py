"""The operator's image: the files that its Dockerfile copies are enough."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fleet.k8s.__main__ import liveness_url
from tests.helpers.kubernetes import DEPLOY
from tests.helpers.sources import ROOT

MODULES = ("handlers", "cluster", "controller", "size_record", "__main__")


def test_the_health_check_has_an_address() -> None:
    assert liveness_url(None) is None
    assert liveness_url("[fd00::1]:8081") == "http://[fd00::1]:8081/healthz"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("kopf") is None or find_spec("etcd3gw") is None, reason="needs the extras k8s, elastic")
def test_the_image_holds_what_the_operator_imports(tmp_path: Path) -> None:
    """000-23: the copied files alone, torch and numpy absent."""
    copied = [
        line.split()[1:]
        for line in (DEPLOY / "Dockerfile.operator").read_text().splitlines()
        if line.startswith("COPY ")
    ]
    assert len(copied) == 5
    for *sources, target in copied:
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target)
            else:
                (tmp_path / target).mkdir(exist_ok=True)
                shutil.copy2(ROOT / source, tmp_path / target)
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import importlib, fleet\n"
        f"assert fleet.__file__.startswith({str(tmp_path)!r})\n"
        f"for name in {MODULES!r}: importlib.import_module('fleet.k8s.' + name)\n"
        "from fleet.launch.cli.elastic_command import ElasticJob\n"
        "from fleet.launch.membership.etcd import EtcdStore\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
