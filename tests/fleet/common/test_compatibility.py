"""An old Python or torch is refused by name when the package is imported; the page and the metadata say the same."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from types import ModuleType

import pytest

from fleet.common import compatibility
from fleet.common.compatibility import OLDEST_PYTHON, OLDEST_TORCH, check_python, check_torch, torch_version
from tests.helpers.sources import ROOT
from tests.test_readme import found_in


def test_an_old_python_is_refused_by_name() -> None:
    check_python(OLDEST_PYTHON)
    with pytest.raises(ImportError, match=r"Python 3\.10 or newer, and this is Python 3\.9 "):
        check_python((3, 9))


@pytest.mark.parametrize("found", ["2.10.0", "2.1.2+cu121", "1.13.1"])
def test_an_old_torch_is_refused_by_name(found: str) -> None:
    with pytest.raises(ImportError) as caught:
        check_torch(found)
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert f"torch {oldest} or newer, and torch {found} is installed" in str(caught.value)
    assert f"pip install 'torch>={oldest}'" in str(caught.value)


@pytest.mark.parametrize("found", ["2.11.0", "2.14.1+cpu", "3.0.0a0+git1234", "unknown"])
def test_newer_and_unknown_ones_are_taken(found: str) -> None:
    check_torch(found)


def test_the_torch_that_is_loaded_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", loaded)
    assert torch_version() == importlib.metadata.version("torch")
    monkeypatch.setattr(loaded, "__version__", "1.0", raising=False)
    assert torch_version() == "1.0"


def test_no_torch_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher and the operator of Kubernetes run without it."""

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(compatibility, "version", absent)
    assert torch_version() is None


def test_it_is_refused_at_import() -> None:
    code = "import sys, types\nsys.modules['torch'] = types.SimpleNamespace(__version__='2.0.1')\nimport fleet.ps\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: fleet works with torch ")


def test_the_metadata_says_the_same() -> None:
    assert found_in("pyproject.toml", r'^requires-python = ">=([\d.]+)"$') == ".".join(map(str, OLDEST_PYTHON))
    assert found_in("pyproject.toml", r'^dependencies = \["torch>=([\d.]+)"') == ".".join(map(str, OLDEST_TORCH))
