"""The structure of what a checkpoint holds beside model and optimizer, as far as resume() relies on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fleet.errors import CheckpointError

# A type; a dict of the required entries; a list of entries with the same structure.
_FORMS: dict[str, Any] = {
    "random": {"torch": torch.Tensor, "python": list, "numpy": list},
    "run": {
        "epoch": int,
        "step": int,
        "world_size": int,
        "k_steps": int,
        "extra": dict,
        "kinds": dict,
        "degrees": dict,
        "replicas": int,
        "workers": [{"data": object, "place": dict}],
    },
}


def check_form(content: Any, name: str, label: str) -> None:
    """Raises CheckpointError that begins with ``label`` unless ``content`` has the structure ``name``."""
    wrong = mismatch(content, _FORMS[name], "")
    if wrong:
        raise CheckpointError(f"{label} {wrong}")


def mismatch(value: Any, form: Any, place: str) -> str:
    """Returns where ``value`` does not have the structure ``form``, of types, or an empty string."""
    wanted: Any = form if isinstance(form, type) else type(form)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        at = f" at {place}" if place else ""
        return f"holds a value of type {type(value).__name__}{at}, where type {wanted.__name__} is required"
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(form, list):
        if not value:
            return f"holds nothing at {place}"
        inner = ((key, form[0]) for key in range(len(value)))
    elif isinstance(form, dict):
        inner = form.items()
    for key, entry in inner:
        if isinstance(value, dict) and key not in value:
            return f"lacks {place}[{key!r}]"
        if wrong := mismatch(value[key], entry, f"{place}[{key!r}]"):
            return wrong
    return ""
