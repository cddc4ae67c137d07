"""Calling the numba kernels: the reasons why they cannot run here, the cache of compiled functions, addresses."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt

from fleet.errors import ConfigError, FleetError


@functools.cache
def numba_problem() -> str:
    """Returns why the kernels cannot run here and the remedy; an empty text where they run."""
    if sys.platform == "win32" or sys.byteorder != "little" or sys.maxsize < 2**32:
        return "its kernels run on 64-bit Linux and macOS only. Run servers and workers there."
    try:
        import numba
    except Exception as error:  # numba refuses interpreters and numpy versions it does not know in several ways
        return f"it cannot be imported ({_first_line(error)}). Reinstall it: pip install --force-reinstall numba."
    if not hasattr(numba, "config"):  # an emptied folder, or a numba.py of the user's
        found = getattr(numba, "__file__", None) or next(iter(getattr(numba, "__path__", [])), "another module")
        return f"{found} is imported in its place. Rename or remove that, or reinstall numba."
    if getattr(numba.config, "DISABLE_JIT", 0):
        return "NUMBA_DISABLE_JIT is set, so it compiles nothing. Unset the variable."
    return ""


@contextlib.contextmanager
def naming_the_cause(user: str = "parameter-server tables") -> Iterator[None]:
    """Raises ConfigError where numba is broken, is disabled, or fails to compile a function of the block."""
    if problem := numba_problem():
        raise ConfigError(f"{user} need numba: {problem}")
    try:
        yield
    except (FleetError, MemoryError):
        raise
    except Exception as error:  # numba and llvmlite raise errors of many kinds, and plain ones
        raise ConfigError(
            f"{user} need numba: it failed to compile their kernels ({_first_line(error)}). Reinstall it, "
            "pip install --force-reinstall numba llvmlite, or unset the NUMBA_ variables of the environment."
        ) from error


@functools.cache
def load_kernels(name: str, package: str = "fleet.ps.table.kernels", user: str = "parameter-server tables") -> Any:
    """Returns the module ``name`` of ``package``; raises ConfigError where numba cannot compile it."""
    with naming_the_cause(user):
        return importlib.import_module(f"{package}.{name}")


def address_of(array: npt.NDArray[Any] | None) -> int:
    """Returns the address of an array's data, as kernels take it; 0 for ``None``."""
    return 0 if array is None else int(array.__array_interface__["data"][0])


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@functools.cache
def cache_works() -> bool:
    """Returns whether compiled kernels can be kept on disk: beside the source, or in the user's cache folder.

    Where neither can be written numba refuses to compile with a cache at all; kernels then compile in each process.
    """
    import numba

    try:
        numba.njit(cache=True)(_probe)
    except RuntimeError:
        return False
    return True


def keep_compiled(compiled: Any, function: Callable[..., Any]) -> Any:
    """Returns ``compiled``, numba's form of ``function``, which from now on uses the cache on disk."""
    # numba's own cache=True raises errors for files that a dead machine has left empty.
    if cache_works():
        compiled._cache = _cache_class()(function)
    return compiled


@functools.cache
def _stamp_of(folder: Path) -> str:
    """Returns a digest of the modules of ``folder``: compiled code holds constants and functions of its neighbours."""
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]


@functools.cache
def _cache_class() -> Any:
    from numba.core.caching import FunctionCache, IndexDataCacheFile

    class Cache(FunctionCache):
        """Has files of its own for each state of the sources, and rewrites unreadable ones.

        numba looks at the time of the function's own module alone, and another process may read code of an older state
        under the index of a newer one. A machine that died leaves empty files.
        """

        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__(function)  # type: ignore[no-untyped-call]
            stamp = _stamp_of(Path(function.__code__.co_filename).parent)
            base = f"{self._impl.filename_base}-{stamp}"
            self._cache_file = IndexDataCacheFile(self._cache_path, base, stamp)

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            try:
                return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
            except OSError:
                return None
            except Exception:  # whatever reading a damaged file raises
                with contextlib.suppress(OSError):
                    self.flush()  # type: ignore[no-untyped-call]
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            with contextlib.suppress(OSError):
                super().save_overload(sig, data)  # type: ignore[no-untyped-call]

    return Cache


def _probe() -> int:
    """Never called; :func:`cache_works` asks for a cache at its place."""
    return 0
