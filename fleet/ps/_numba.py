"""Whether the numba kernels can run here."""

from __future__ import annotations

import functools
import sys


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


def _probe() -> int:
    """Never called; its place is what the cache is asked for."""
    return 0
