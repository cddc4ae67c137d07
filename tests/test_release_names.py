"""What a release has promised stays: its public names, arguments and defaults; and the changelog has its section."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from types import ModuleType

import pytest
from packaging.version import Version

import fleet
from tests.helpers.sources import ROOT
from tests.test_readme import generator, read

# A name of docs/releases/*.txt that warns when it is used -> the first version that warned. By
# docs/reference/stability.md it warns in two minor versions before it goes.
DEPRECATED: dict[str, str] = {}


@cache
def release() -> ModuleType:
    """Returns docs/generate_names.py as a module."""
    generator()
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("generate_names")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def last_names() -> list[str]:
    """Returns the lines of the newest release's file."""
    files = sorted((ROOT / "docs" / "releases").glob("*.txt"), key=lambda path: Version(path.stem))
    return files[-1].read_text(encoding="utf-8").splitlines()


def may_go(first: str, now: str) -> bool:
    """Returns whether a name that has warned since version ``first`` may be absent from version ``now``."""
    since, present = Version(first), Version(now)
    return present.major > since.major or present.minor >= since.minor + 2


def test_nothing_of_the_last_release_is_broken() -> None:
    found = release().broken(last_names(), release().names())
    gone = {name for name, first in DEPRECATED.items() if may_go(first, fleet.__version__)}
    assert {name: why for name, why in found.items() if name not in gone} == {}


def test_each_version_has_its_file() -> None:
    assert (ROOT / "docs" / "releases" / f"{fleet.__version__}.txt").exists(), "run python docs/generate_names.py"


def test_the_file_names_everything_that_is_public() -> None:
    lines = last_names()
    kinds = {"call", "class", "command", "constant", "flag", "module", "option", "property", "value", "variable"}
    assert {line.partition(" ")[0] for line in lines} == kinds
    for line in ("flag --gpus", "option amp: bool = False", "variable FLEET_JOB_SECRET", "module fleet.ps"):
        assert line in lines
    assert any(line.startswith("call fleet.init(role_maker=None, is_collective=False, strategy=None") for line in lines)


def test_a_file_of_a_release_is_not_written_again() -> None:
    with pytest.raises(SystemExit, match="The file of a release stays as it is"):
        release().main()


BREAKS = [
    ("call f(a, b=1)", "call f(a)", {"call f": "b is gone"}),
    ("call f(a, b=1)", "call f(a, *, b=1)", {"call f": "b is argument by name and was 2"}),
    ("call f(a, b=1)", "call f(b=1, a=2)", {"call f": "a is argument 2 and was 1; b is argument 1 and was 2"}),
    ("call f(a, b=1)", "call f(a, b=2)", {"call f": "b is 2 where it is left out, and was 1"}),
    ("call f(a, b=1)", "call f(a, b)", {"call f": "b is required where it is left out, and was 1"}),
    ("call f(a)", "call f(a, *, b)", {"call f": "b has no default"}),
    ("call f(a, **more)", "call f(a)", {"call f": "**more is gone"}),
    ("option amp: bool = False", "option amp: bool = True", {"option amp": "': bool = False' became ': bool = True'"}),
    ("flag --gpus", "flag --devices", {"flag --gpus": "is gone"}),
    ("call f(a)", "class f(a)", {"call f": "is gone"}),
]


@pytest.mark.parametrize(("before", "now", "found"), BREAKS)
def test_what_breaks_a_script_is_named(before: str, now: str, found: dict[str, str]) -> None:
    assert release().broken([before], [now]) == found


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("call f(a)", "call f(a, b=1, *rest, c=2, **more)"),
        ("call f(*, a)", "call f(a)"),
        ("call f(a=1)", "call f(a=1)"),
    ],
)
def test_what_only_adds_breaks_nothing(before: str, now: str) -> None:
    assert release().broken([before], [now, "flag --new"]) == {}


def test_a_name_goes_after_two_minor_versions_of_warnings() -> None:
    gone_in = [now for now in ("1.2.1", "1.3.0", "1.4.0rc1", "1.4.0", "2.0.0") if may_go("1.2.0", now)]
    assert gone_in == ["1.4.0rc1", "1.4.0", "2.0.0"]
    assert set(DEPRECATED) <= {re.split("[(:]", line)[0] for line in last_names()}


def test_the_changelog_has_a_section_for_the_version() -> None:
    """Newest first: what is not released yet, then each release with its date."""
    titles = re.findall(r"^## (.*)$", read("CHANGELOG.md"), re.MULTILINE)
    released = [title for title in titles if title != "[Unreleased]"]
    assert titles[1:] == released[-len(titles) + 1 :] or titles == released
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+(?:rc\d+)?\] - \d{4}-\d{2}-\d{2}", title) for title in released), released
    versions = [Version(title[1:].partition("]")[0]) for title in released]
    assert versions == sorted(versions, reverse=True)
    assert versions[0] == Version(fleet.__version__)
