"""What an installation of the package brings along: its requirements, theirs, and their files."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(requirements: list[str], extra: str = "") -> set[str]:
    """Returns the names of the distributions that these requirements of a package install, with one of its extras."""
    found: set[tuple[str, str]] = set()
    names: set[str] = set()
    waiting = [*_chosen(requirements, ("", extra))]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in found:
                found.add((name, wanted))
                names.add(name)
                waiting += _chosen(distribution(name).requires or [], ("", wanted))
    return names


def _chosen(requirements: list[str], extras: tuple[str, str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def link_distributions(names: set[str], site: Path) -> None:
    """Makes these distributions of this environment importable from the folder ``site``, and no others.

    A folder that several distributions share (``nvidia``) is linked whole.
    """
    for name in sorted(names):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or [] if ".." not in file.parts}:
            source, target = Path(str(found.locate_file(top))), site / top
            if top != "__pycache__" and source.exists() and not target.exists():
                target.symlink_to(source)
