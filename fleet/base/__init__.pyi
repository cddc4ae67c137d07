# Made by `make docs`; a change belongs into the code that it is made from.
"""The path of the role makers in older scripts: ``fleet.base.role_maker``."""

from fleet.base import role_maker as role_maker

__all__ = ["role_maker"]
