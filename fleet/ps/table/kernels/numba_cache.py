"""Whether the numba kernels can run here."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any


@functools.cache
def kernels_work() -> bool:
    """Returns whether numba imports, compiles, and the C library has what the kernels call (Linux, macOS)."""
    if sys.platform == "win32" or sys.byteorder != "little" or sys.maxsize < 2**32:
        return False
    try:
        import numba
    except Exception:  # numba refuses interpreters and numpy versions it does not know in several ways
        return False
    return not getattr(numba.config, "DISABLE_JIT", 0)


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
    """Returns ``compiled``, numba's form of ``function``, which from now on loads and saves what it compiles."""
    if cache_works():
        compiled._cache = _cache_class()(function)
    return compiled


@functools.cache
def _cache_class() -> Any:
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):
        """Writes anew what cannot be read: a machine that died leaves empty files."""

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
    """Never called; its place is what the cache is asked for."""
    return 0
