"""StateTaker: describes the state of one object, and gives the object a saved one."""

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


class StateTaker:
    """Describes and loads the state of one object.

    Attributes:
        key: the name of the object in a checkpoint.
        kind: ``"module"``, ``"optimizer"``, ``"state"`` for other objects with ``state_dict``, or ``"value"``.
        class_name: the class of the object, where only an object of the same class takes its state.
    """

    key: str
    kind: str
    class_name: str = ""

    def take(self) -> Description:
        """Returns the state."""
        raise NotImplementedError

    def check(self, source: StateSource) -> list[str]:
        """Returns why the saved state does not fit; an empty list where it does. Nothing is changed."""
        raise NotImplementedError

    def twins(self, source: StateSource) -> list[tuple[str, str]]:
        """Returns pairs of saved tensors that must be equal, because they are one parameter here."""
        return []

    def wanted(self, source: StateSource) -> Wanted:
        """Returns the boxes that :meth:`put` needs filled; of the object, nothing but its own numbers is among them."""
        raise NotImplementedError

    def put(self, source: StateSource, wanted: Wanted) -> Any:
        """Gives the object its state, once ``wanted`` is filled; returns a plain value."""
        raise NotImplementedError
