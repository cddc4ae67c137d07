"""A tensor as an array on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fleet.errors import ConfigError


def host_array(value: Any) -> Any:
    """Returns a tensor as an array on the host, bfloat16 as float32, which numpy has; anything else as it is.

    Raises:
        ConfigError: a sparse or nested tensor, or an array with masked values, which would count as they are below
            the mask.

    Example:
        >>> host_array(torch.ones(2, dtype=torch.bfloat16)).dtype
        dtype('float32')
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ConfigError(
            "an array with masked values was given, and arrays are taken whole. Leave the values out "
            "(array.compressed()), or fill them (array.filled(0))."
        )
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided or value.is_nested:
        raise ConfigError(f"a tensor of layout {value.layout} was given; it takes dense ones, as to_dense() returns.")
    value = value.detach().cpu()
    return value.float().numpy() if value.dtype is torch.bfloat16 else value.numpy()
