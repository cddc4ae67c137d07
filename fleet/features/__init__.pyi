# Made by `make docs`; a change belongs into the code that it is made from.
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

from fleet.features.column_transforms import Bucketize as Bucketize
from fleet.features.column_transforms import Clip as Clip
from fleet.features.column_transforms import Cross as Cross
from fleet.features.column_transforms import Hash as Hash
from fleet.features.column_transforms import Log as Log
from fleet.features.column_transforms import Vocabulary as Vocabulary
from fleet.features.transforms import Transforms as Transforms

__all__ = ["Bucketize", "Clip", "Cross", "Hash", "Log", "Transforms", "Vocabulary"]
