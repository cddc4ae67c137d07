"""StateAdapter: describes the state of one object, and loads a saved one into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fleet.checkpoint.items import Item, StateSource, Wanted


@dataclass(frozen=True)
class Description:
    """A state as one worker has it.

    Attributes:
        items: its tensors.
        aliases: second names of tied parameters, each with the first.
        values: the rest, encoded, by name.
    """

    items: list[Item] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class StateAdapter:
    """Describes and loads the state of one object.

    Attributes:
        key: the name of the object in a checkpoint.
        kind: ``"module"``, ``"optimizer"``, ``"state"`` for other objects with ``state_dict``, or ``"value"``.
        class_name: the class of the object, where only an object of the same class can load its state.
    """

    key: str
    kind: str
    class_name: str = ""

    def describe(self) -> Description:
        """Returns the state."""
        raise NotImplementedError

    def check(self, source: StateSource) -> list[str]:
        """Returns why the saved state does not fit; an empty list where it does. Nothing is changed."""
        raise NotImplementedError

    def twins(self, source: StateSource) -> list[tuple[str, str]]:
        """Returns pairs of saved tensors that must be equal, because they are one parameter here."""
        return []

    def wanted(self, source: StateSource) -> Wanted:
        """Returns the boxes to fill before :meth:`put`; of the object itself, only the memory of its tensors."""
        raise NotImplementedError

    def put(self, source: StateSource, wanted: Wanted) -> Any:
        """Completes the load once ``wanted`` is filled; returns a plain value."""
        raise NotImplementedError
