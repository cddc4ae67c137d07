"""A package is changed once it is imported, and stays importable by everybody else as it was."""

import importlib
import sys
from pathlib import Path

import pytest

from fleet.verify.engines.late_imports import when_imported


def test_a_module_is_changed_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fleet_late_one.py").write_text("value = 1\n", encoding="utf-8")
    seen = []
    when_imported("fleet_late_one", lambda module: seen.append(module.value))
    when_imported("fleet_late_one", lambda module: seen.append(10 * module.value))
    assert seen == []
    module = importlib.import_module("fleet_late_one")
    assert sorted(seen) == [1, 10]
    assert module.__loader__ is module.__spec__.loader is not None
    assert "fleet" not in type(module.__loader__).__module__
    when_imported("fleet_late_one", lambda module: seen.append(100 * module.value))
    assert seen[-1] == 100
    monkeypatch.delitem(sys.modules, "fleet_late_one")
    importlib.import_module("fleet_late_one")
    assert len(seen) == 3


def test_a_package_that_is_not_there_is_not_found() -> None:
    when_imported("fleet_is_nowhere", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fleet_is_nowhere")
    assert not any(getattr(finder, "_name", "") == "fleet_is_nowhere" for finder in sys.meta_path)
