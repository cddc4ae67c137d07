"""fleet.base.role_maker is Fleet's own path to the role makers."""

from __future__ import annotations

import fleet.role_maker
from fleet.base import role_maker


def test_the_path_of_the_documentation_gives_the_same_classes() -> None:
    """B.1, 003-06: ``from fleet.base import role_maker; role_maker.PaddleCloudRoleMaker()``."""
    for name in role_maker.__all__:
        assert getattr(role_maker, name) is getattr(fleet.role_maker, name)
    assert role_maker.PaddleCloudRoleMaker(is_collective=True).is_collective
