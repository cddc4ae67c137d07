"""Fleet's path to ``recompute``, ``recompute_hybrid`` and ``recompute_sequential``.

``fleet.recompute`` is the function, too: it stands in the place of this module and has the names as attributes.
"""

from __future__ import annotations

import sys

from fleet.strategies._shared.segments import recompute as recompute
from fleet.strategies._shared.segments import recompute_sequential as recompute_sequential
from fleet.strategies.tensor_parallel.recompute_hybrid import recompute_hybrid as recompute_hybrid

__all__ = ["recompute", "recompute_hybrid", "recompute_sequential"]

recompute.__dict__.update({name: globals()[name] for name in __all__})
sys.modules[__name__] = recompute  # type: ignore[assignment]
