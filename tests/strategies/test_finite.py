"""What is remembered of tensors: the first one that was not finite, in any floating type."""

from __future__ import annotations

import pytest
import torch

from fleet.strategies.check_nan_inf import Place, Sightings

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_sightings_find_every_kind(dtype: torch.dtype) -> None:
    """Every floating type, sparse tensors and empty ones; large finite values are finite; the first one is named."""
    for bad in (None, NAN, INF, -INF):
        seen = Sightings()
        values = torch.ones(7, 3, dtype=dtype)
        values[2, 1] = torch.finfo(dtype).max
        seen.add(values.clone(), Place("output", "a"))
        seen.add(torch.empty(0, dtype=dtype), Place("output", "b"))
        seen.add(torch.ones(3, dtype=torch.int64), Place("output", "c"))
        seen.add(torch.ones(2, dtype=torch.float32), Place("output", "d"))
        if bad is not None:
            values[4, 2] = bad
        seen.add(values.to_sparse(), Place("output", "e"))
        seen.add(torch.full((2,), NAN), Place("output", "f") if bad is None else Place("output", "later"))
        first = seen.first()
        assert int(seen.any_bad(torch.device("cpu"))) == 1
        assert first is not None
        assert first[1].name == ("f" if bad is None else "e")
        assert first[2] == ("NaN" if bad is None or bad != bad else "Inf")
        seen.clear()
        assert seen.first() is None
        assert int(seen.any_bad(torch.device("cpu"))) == 0
