"""Transforms of features that training and serving share: declared once, saved with the model, the same bits in both.

Names are resolved at first use; nothing here imports torch.

Example:
    >>> from fleet import features
    >>> transforms = features.Transforms([
    ...     features.Hash("site", out="site_id"),
    ...     features.Log("price"),
    ...     features.Bucketize("age", [18, 30, 50], out="age_group"),
    ...     features.Cross(["site_id", "age_group"], out="site_by_age"),
    ... ])
    >>> batch = transforms({"site": ["a.com", "b.com"], "price": [0.0, 1.0], "age": [17, 30]})
    >>> batch["age_group"].tolist(), batch["price"].tolist()
    ([0, 2], [0.0, 0.6931471824645996])
"""

from __future__ import annotations

from fleet.common.lazy_names import lazy_names

_HOMES = {
    "Bucketize": "fleet.features.column_transforms",
    "Clip": "fleet.features.column_transforms",
    "Cross": "fleet.features.column_transforms",
    "Hash": "fleet.features.column_transforms",
    "Log": "fleet.features.column_transforms",
    "Transforms": "fleet.features.transforms",
    "Vocabulary": "fleet.features.column_transforms",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
