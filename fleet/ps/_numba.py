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
