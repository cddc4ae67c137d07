"""What ``--data`` names, as a folder of Parquet files in one layout; README.md describes it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path

from formats.clicks import write_clicks
from formats.movielens import ratings_file, write_movielens
from simulator.files import simulate, write_shop
from simulator.settings import Settings

CACHE = Path(tempfile.gettempdir()) / f"fleet-recommenders-{os.getuid()}"
_SIMULATED = "simulated"
_SOURCES = (
    "Write simulated, simulated:users=2000,seed=1, flights, a folder that simulate.py wrote, or a file or folder of "
    "MovieLens or in Criteo's format."
)


def open_data(source: str, cache: Path = CACHE) -> Path:
    """Returns the folder of a source; what is not in the layout yet is written into the cache, once.

    All workers of a job may call it at the same time: a folder appears there whole or not at all.

    Args:
        source: a folder in the layout, as ``simulate.py`` writes it; ``simulated``, or with sizes
            ``simulated:users=2000,seed=1``; ``flights``; a file or folder of MovieLens or in Criteo's format.
        cache: where folders are written.

    Raises:
        ValueError: there is no such source, or it is not in its format.
    """
    path = Path(source)
    if (path / "impressions" / "train").is_dir():
        return path
    name, _, sizes = source.partition(":")
    if name == _SIMULATED:
        settings = _settings(sizes)
        return _written(cache, repr(settings), lambda folder: write_shop(simulate(settings), folder))
    if source == "flights":
        return _written(cache, source, lambda folder: write_clicks(source, folder))
    if not path.exists():
        raise ValueError(f"--data {source!r}: no such file or folder. {_SOURCES}")
    ratings = ratings_file(path)
    if ratings is not None:
        return _written(cache, _state(ratings.parent), lambda folder: write_movielens(ratings, folder))
    try:
        return _written(cache, _state(path), lambda folder: write_clicks(source, folder))
    except ValueError as error:
        raise ValueError(
            f"--data {source!r} is not in Criteo's format, and nothing else was found: {error} {_SOURCES}"
        ) from None


def _settings(sizes: str) -> Settings:
    """Returns the settings of ``users=2000,seed=1``."""
    known = [field.name for field in fields(Settings)]
    given = {}
    for part in sizes.split(",") if sizes else ():
        name, _, value = part.partition("=")
        if name not in known or not value.isdecimal() or name in given:
            raise ValueError(
                f"--data {_SIMULATED}:{sizes}: {part!r} is not NAME=NUMBER with one of {', '.join(known)}."
            )
        given[name] = int(value)
    return Settings(**given)


def _state(path: Path) -> str:
    """Returns a text that changes when the files of a source do."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return f"{path.resolve()} {facts}"


def _written(cache: Path, key: str, write: Callable[[Path], None]) -> Path:
    """Returns the folder of a key, written by one process; others that began at the same time drop theirs."""
    folder = cache / blake2b(key.encode(), digest_size=8).hexdigest()
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=cache, prefix=".unfinished-"))
    try:
        write(unfinished)
        unfinished.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
