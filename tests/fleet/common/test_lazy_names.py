"""Names of packages are found at first use, kept, listed, and corrected where they are misspelt."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from fleet.common.lazy_names import lazy_names


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("made")
    monkeypatch.setitem(sys.modules, "made", made)
    made.own = 1  # type: ignore[attr-defined]
    return made


def test_a_name_is_found_in_its_module_and_kept(package: ModuleType) -> None:
    find, _ = lazy_names("made", {"sqrt": "math"})
    assert find("sqrt")(4.0) == 2.0
    assert vars(package)["sqrt"] is find("sqrt")


def test_relative_homes_and_modules_belong_to_the_package() -> None:
    find, names = lazy_names("fleet.moe", {"SwitchGate": ".gates"}, ["expert_clip"])
    assert find("SwitchGate").__module__ == "fleet.moe.gates"
    assert find("expert_clip").__name__ == "fleet.moe.expert_clip"
    assert {"SwitchGate", "expert_clip"} <= set(names())


def test_all_names_are_listed_before_they_are_used(package: ModuleType) -> None:
    _, names = lazy_names("made", {"sqrt": "math"})
    assert {"own", "sqrt"} <= set(names())
    assert "sqrt" not in vars(package)


def test_a_misspelt_name_gets_the_nearest_one(package: ModuleType) -> None:
    find, _ = lazy_names("made", {"sqrt": "math"})
    with pytest.raises(AttributeError, match="module 'made' has no attribute 'sqrtt'. Did you mean 'sqrt'"):
        find("sqrtt")
