"""Versions: named states of the rows in a publisher's folder, and the brake that takes all readers back to one.

``versions/NAME/version.json`` is written once, in the form of the manifest::

    {"format": 1, "name": "monday", "number": 3, "key": "5f...", "marked_at": 1e9, "num_servers": 1, "save": null,
     "model": false, "servers": {"0": {... as in MANIFEST.json: "base", "deltas", "watermark", "step" ...}}}

It names files that the manifest named at that moment; they stay while the version is kept, so no row is copied. Each
server adds its share, and a version counts once all servers have. ``versions/NAME/`` also keeps the exported program,
or a folder for each of several.
``ROLLBACK.json``, ``{"version": "monday", "at": 1e9}``, is the brake: while it is there, readers have these rows.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.common.plain_files import open_own, open_to_read, replace_file
from fleet.errors import CheckpointError, ConfigError, PSError, did_you_mean

MANIFEST = "MANIFEST.json"
BRAKE = "ROLLBACK.json"
EXPORT = "export.json"
_FOLDER = "versions"
_VERSION = "version.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_LOCK_S = 30.0
READ_AHEAD = 2  # versions whose files readers have at hand before a brake asks for one


@dataclass(frozen=True, slots=True)
class Version:
    """A named state of the rows in a publisher's folder.

    Attributes:
        name: as ``fleet.mark_version`` was given it.
        number: from 1, in the order in which versions were marked.
        marked_at: unix time in seconds.
        step: sync mode: the last step that the rows hold; otherwise the lowest clock of the workers. 0 in geo mode,
            whose servers count no steps.
        save: the folder from which ``fleet.load_model`` takes training back to it; None without one.
        model: whether exported programs are kept with it.
    """

    name: str
    number: int
    marked_at: float
    step: int
    save: str | None
    model: bool


@dataclass(frozen=True, slots=True)
class Mark:
    """What the workers ask of each server for a version.

    Attributes:
        name: the version's.
        key: the same for all requests of one call.
        keep: how many versions stay.
        save, model: folders of a save and of exported programs; None without.
    """

    name: str
    key: str
    keep: int
    save: str | None = None
    model: str | None = None


def check_name(name: object) -> str:
    """Returns ``name``; raises :class:`ConfigError` unless it can name a version."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"a version is named {name!r}; a name has 1 to 64 letters of A to Z, digits, '_', '-' and '.', and begins "
            "with none of the last two."
        )
    return name


def check_keep(keep: object) -> int:
    """Returns how many versions stay; raises :class:`ConfigError` unless it is 1 or more."""
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ConfigError(f"keep is {keep!r}; it takes the number of versions that stay, from 1.")
    return keep


def mark_of(fields: Mapping[str, Any]) -> Mark:
    """Returns the mark of a request; raises :class:`ConfigError` for a wrong one."""
    texts = [fields.get(name) for name in ("key", "save", "model")]
    if not texts[0] or not all(text is None or isinstance(text, str) for text in texts):
        raise ConfigError("MARK takes a key, and folders as text or null.")
    return Mark(check_name(fields.get("name")), str(texts[0]), check_keep(fields.get("keep")), *texts[1:])


def version_folder(folder: Path, name: str) -> Path:
    """Returns where version ``name`` and its program are."""
    return folder / _FOLDER / name


def version_path(folder: Path, name: str) -> Path:
    """Returns the file that says which rows version ``name`` has."""
    return version_folder(folder, name) / _VERSION


def version_of(fields: Mapping[str, Any]) -> Version:
    """Returns the version that a file describes. Raises KeyError, TypeError, ValueError and the like for another."""
    step = min((int(state["step"]) for state in fields["servers"].values()), default=0)
    save = fields["save"]
    return Version(
        str(fields["name"]),
        int(fields["number"]),
        float(fields["marked_at"]),
        step,
        None if save is None else str(save),
        bool(fields["model"]),
    )


def program_folders(folder: Path) -> list[Path]:
    """Returns ``folder`` if it has an exported program, otherwise those in it that have one, such as two towers."""
    found = [folder] if (folder / EXPORT).is_file() else sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if (path / EXPORT).is_file()]


def list_versions(folder: Path) -> list[Version]:
    """Returns the versions that all servers have, oldest first. Raises CheckpointError for a damaged file."""
    return [version_of(fields) for fields in _all_fields(folder) if _is_complete(fields)]


def find_version(folder: Path, wanted: str | Version, origin: str) -> Version:
    """Returns a version that all servers have; raises :class:`ConfigError`, which begins with ``origin``, without."""
    versions = {version.name: version for version in list_versions(folder)}
    name = wanted.name if isinstance(wanted, Version) else wanted
    if isinstance(wanted, Version) and versions.get(name, wanted) != wanted:
        raise ConfigError(
            f"{origin}: {folder} has another version {name!r} than {wanted!r}, as when that was removed and its name "
            "given again. Take one of Reader(folder).versions."
        )
    if name in versions:
        return versions[name]
    held = ", ".join(map(repr, versions)) or "none; fleet.mark_version(name) makes one"
    raise ConfigError(
        f"{origin}: {folder} has no version {name!r} that all servers have marked.{did_you_mean(str(name), versions)} "
        f"It has {held}. A version is removed when more than keep= are marked after it."
    )


def rows_of_versions(folder: Path) -> set[str]:
    """Returns the names of the files of rows that versions need, of all servers."""
    return {name for fields in _all_fields(folder) for name in _row_files(fields)}


def add_share(folder: Path, mark: Mark, server: int, manifest: Mapping[str, Any]) -> None:
    """Adds the manifest's state of ``server`` to the version; the one who calls it holds the folder.

    A repeated request changes nothing, nor does a later one for the same rows, as by a worker that was restarted.
    With the last share the version is complete, and those beyond ``keep`` go.

    Raises:
        ConfigError: there is a version of this name for other rows, or ``mark.model`` holds no exported program.
    """
    known = {fields["name"]: fields for fields in _all_fields(folder)}
    fields = known.get(mark.name)
    if fields is None or fields["key"] != mark.key:
        if fields is not None and _is_complete(fields):
            if _names_the_same(fields, mark, server, manifest):
                return
            raise ConfigError(
                f"version {mark.name!r} was marked before, with step {version_of(fields).step}, and what it names "
                "never changes. Choose another name."
            )
        fields = _new_fields(mark, 1 + max((other["number"] for other in known.values()), default=0), manifest)
        version_folder(folder, mark.name).mkdir(parents=True, exist_ok=True)
        if mark.model is not None:
            _copy_programs(Path(mark.model), version_folder(folder, mark.name))
    if str(server) not in fields["servers"]:
        fields["servers"][str(server)] = manifest["servers"][str(server)]
        replace_file(version_path(folder, mark.name), json.dumps(fields))
    if _is_complete(fields):
        _drop_old(folder, mark.keep, fields["number"])


def read_brake(folder: Path) -> str | None:
    """Returns the version that all readers of ``folder`` were sent back to, None while they follow the newest rows.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / BRAKE
    try:
        with open_to_read(path) as file:
            return check_name(json.loads(file.read(1 << 16))["version"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}. Roll back again, or release.") from None


def roll_back(source: str | os.PathLike[str], version: str | Version) -> Version:
    """Takes every Reader of the folder ``source`` back to ``version``, until :func:`release`.

    Readers that follow have its rows within a second, others with their next ``refresh``; new ones begin with it. From
    then on none of them gives anything newer. Servers go on publishing into the folder. Readers pinned to an older
    version stay there. A second call replaces the first, whoever made it.

    Args:
        source: the folder of ``fleet.ps.publish``; this process must be able to write there.
        version: one of ``Reader(source).versions``, or its name.

    Returns:
        The version; ``save`` is the folder for ``fleet.load_model``, which takes training back.

    Raises:
        ConfigError: it is no such folder, there is no such version, or a file of its rows is absent.

    Example:
        >>> fleet.ps.roll_back("rows", "monday").step                                    # doctest: +SKIP
        1200
    """
    folder = publisher_folder("roll_back", source)
    with locked(folder, ".rollback.lock"):
        found = find_version(folder, version, f"fleet.ps.roll_back({str(source)!r}, {version!r:.80})")
        fields = next(fields for fields in _all_fields(folder) if fields["name"] == found.name)
        lacking = sorted(name for name in _row_files(fields) if not (folder / name).is_file())
        if lacking:
            raise ConfigError(
                f"fleet.ps.roll_back({str(source)!r}, {found.name!r}): {lacking[0]} is absent from {folder}, so "
                "readers cannot take up this version. Choose another one."
            )
        replace_file(folder / BRAKE, json.dumps({"version": found.name, "at": time.time()}))
    return found


def release(source: str | os.PathLike[str]) -> str | None:
    """Lets the Readers of the folder follow the newest rows again; returns the version they were at, None without.

    Raises:
        ConfigError: ``source`` is no folder of ``fleet.ps.publish``.
    """
    folder = publisher_folder("release", source)
    with locked(folder, ".rollback.lock"):
        with suppress(CheckpointError):  # a damaged brake is released, too
            version = read_brake(folder)
            (folder / BRAKE).unlink(missing_ok=True)
            return version
        (folder / BRAKE).unlink(missing_ok=True)
    return None


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Keeps out other processes that lock ``name`` in ``folder``; the lock ends with the process.

    Raises:
        PSError: another one holds it for half a minute.
    """
    deadline = time.monotonic() + _LOCK_S
    with open(open_own(folder / name, os.O_RDWR), "r+b") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PSError(f"{folder}: another publisher holds the folder for {_LOCK_S:.0f} s.") from None
                time.sleep(0.01)
        yield  # closing the file releases it


def publisher_folder(call: str, source: object) -> Path:
    """Returns the folder of ``fleet.ps.publish`` that ``source`` names; raises :class:`ConfigError` for another one."""
    text = os.fspath(source) if isinstance(source, str | os.PathLike) else ""
    if not isinstance(text, str) or not text or "://" in text:
        raise ConfigError(
            f"fleet.ps.{call}({source!r}) takes the folder of fleet.ps.publish. Redis and servers have the newest rows "
            "alone: fleet.load_model(the save of a version) brings theirs back."
        )
    folder = Path(text.removeprefix("folder:"))
    if not (folder / MANIFEST).exists():
        raise ConfigError(f"fleet.ps.{call}({source!r}): no publisher has written there ({MANIFEST} is absent).")
    return folder


def _new_fields(mark: Mark, number: int, manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": 1,
        "name": mark.name,
        "number": number,
        "key": mark.key,
        "marked_at": time.time(),
        "num_servers": manifest["num_servers"],
        "save": mark.save,
        "model": mark.model is not None,
        "servers": {},
    }


def _all_fields(folder: Path) -> list[dict[str, Any]]:
    """Returns the files of all versions, also of those that lack servers, oldest first."""
    found = []
    for path in (folder / _FOLDER).glob(f"*/{_VERSION}"):
        with suppress(FileNotFoundError):  # it was dropped just now
            found.append(_fields_of(path))
    return sorted(found, key=lambda fields: fields["number"])


def _fields_of(path: Path) -> dict[str, Any]:
    try:
        with open_to_read(path) as file:
            fields: dict[str, Any] = json.loads(file.read())
        version_of(fields)
        if any(Path(name).name != name for name in _row_files(fields)):
            raise ValueError("it names files outside the folder")
        if fields["name"] != path.parent.name or type(fields["num_servers"]) is not int:
            raise ValueError("it is another version's")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a version of published rows ({error!s:.200}). Remove the folder {path.parent}."
        ) from None
    return fields


def _is_complete(fields: Mapping[str, Any]) -> bool:
    return len(fields["servers"]) >= int(fields["num_servers"])


def _names_the_same(fields: Mapping[str, Any], mark: Mark, server: int, manifest: Mapping[str, Any]) -> bool:
    """Returns whether a version is what ``mark`` asks of ``server``."""
    if (fields["save"], fields["model"], fields["num_servers"]) != (
        mark.save,
        mark.model is not None,
        manifest["num_servers"],
    ):
        return False
    held, wanted = (made["servers"].get(str(server), {}) for made in (fields, manifest))
    return all(held.get(part) == wanted.get(part) for part in ("history", "watermark", "step"))


def _row_files(fields: Mapping[str, Any]) -> set[str]:
    return {entry["file"] for state in fields["servers"].values() for entry in (state["base"], *state["deltas"])}


def _drop_old(folder: Path, keep: int, newest: int) -> None:
    """Removes versions beyond the newest ``keep``, and older ones that some server never marked."""
    with locked(folder, ".rollback.lock"):
        braked = read_brake(folder)
        older = [fields for fields in _all_fields(folder) if fields["number"] < newest and fields["name"] != braked]
        complete = [fields for fields in older if _is_complete(fields)]
        stays = complete[-(keep - 1) :] if keep > 1 else []
        for fields in older:
            if fields not in stays:
                target = version_folder(folder, fields["name"])
                (target / _VERSION).unlink(missing_ok=True)  # first: without it the rest is nothing
                shutil.rmtree(target)


def _copy_programs(source: Path, target: Path) -> None:
    """Copies the program of ``source``, or each of those in its folders."""
    for path in program_folders(source) or [source]:  # without one, the copy says so
        _copy_program(path, target / path.relative_to(source))


def _copy_program(source: Path, target: Path) -> None:
    """Copies an exported program, which a newer export may be replacing at this moment."""
    target.mkdir(exist_ok=True)
    for tries_left in reversed(range(3)):
        try:
            with open_to_read(source / EXPORT) as file:
                text = file.read()
            inner = json.loads(json.loads(text)["export"])
            for part in ("dense", "ids"):
                name = Path(inner[part]).name
                with open_to_read(source / name) as file:
                    replace_file(target / name, file.read())
            replace_file(target / EXPORT, text)
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not tries_left:
                raise ConfigError(
                    f"fleet.mark_version(model={str(source)!r}): no program of fleet.ps.export there: {error!s:.200}."
                ) from None
