"""Objects that a command line names as FILE:NAME: a class or function in a Python file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from fleet.errors import ConfigError, did_you_mean


def object_in(place: str) -> Any:
    """Returns the object that ``FILE:NAME`` names; imports the file, with its folder on the import path.

    Raises:
        ConfigError: there is no such file or name, or the file cannot be imported.
    """
    file, colon, name = place.rpartition(":")
    path = Path(file)
    if not colon or not name or not file:
        raise ConfigError(f"{place!r}: write the file and the name in it, such as model.py:make_model.")
    if not path.is_file():
        raise ConfigError(f"{file!r} is not a file. Give the path of the Python file that defines {name!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file!r} is no Python file; its name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    replaced = sys.modules.get(path.stem)
    # Dataclasses and pickled functions look their module up by name.
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        if replaced is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = replaced
        raise ConfigError(f"{file!r} could not be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        near = did_you_mean(name, known) or f" It defines {', '.join(known[:12])}." if known else ""
        raise ConfigError(f"{file!r} has no {name!r}.{near}")
    return getattr(module, name)
