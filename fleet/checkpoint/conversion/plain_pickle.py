"""Pickles of known classes, read by an interpreter of their instructions that can make plain data and nothing else.

[Note: Why no code runs]
A pickle is a program for a small stack machine. Python's own machine imports the names in the program and calls them.
This one imports nothing: a name is looked up in a table, and stands for a function of this package or for plain data.
An unknown name, an unknown instruction and any unexpected form end the read.

A name for a value may stand in the file again and again, so little text can mean much: the size of the file limits the
results of functions, and the unfolded whole.

Source of the instructions: the module ``pickletools`` of the standard library, which also splits them.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping, Sized
from functools import partialmethod
from typing import IO, Any

from fleet.checkpoint.conversion.unfolded import check_unfolded, most_of
from fleet.errors import CheckpointError

_MARK = object()
_MOST_BITS = 1024
_LONGEST_KEY = 64
# Instructions whose argument is the value.
_CONSTANTS = (
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE",
    "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "STRING", "BINSTRING", "SHORT_BINSTRING",
)  # fmt: skip
_VALUES: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class Opaque:
    """An instance of a class of the format, as plain data.

    Attributes:
        kind: the name of its class in the table.
        arguments: the arguments of its constructor.
        state: its stored state, or ``None``.
    """

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None


class Named:
    """The stand-in for a name in the table: a class of the format, or a function of this package that is called."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


def opaque(kind: str) -> Named:
    """Returns the table's entry of a class whose instances become :class:`Opaque`."""
    return Named(lambda *arguments: Opaque(kind, arguments))


def read_pickle(data: bytes | IO[bytes], known: Mapping[tuple[str, str], Any], label: str, num_bytes: int = 0) -> Any:
    """Returns the plain data that ``data`` describes, without running anything of it.

    Args:
        data: the pickle, of any protocol, or an open file that stands at its start.
        known: the stand-in for each allowed name, by module and name: a :class:`Named`, or a value.
        label: how errors name the file.
        num_bytes: the size of an open file.

    Raises:
        CheckpointError: it has a name that is not in ``known``, or an instruction that the format never has, is
            damaged, or unfolds to far more than so many bytes can hold.

    Example:
        >>> read_pickle(b"(I1\\nI2\\nt.", {}, "numbers.pkl")
        (1, 2)
    """
    num_bytes = len(data) if isinstance(data, bytes) else num_bytes
    try:
        found = _Machine(known, label, most_of(num_bytes)).run(data)
    except CheckpointError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{label} is damaged, or no pickle ({type(error).__name__}: {error!s:.200}).") from error
    check_unfolded(found, num_bytes, label)
    return found


class _Machine:
    def __init__(self, known: Mapping[tuple[str, str], Any], label: str, most: int) -> None:
        self._known = known
        self._label = label
        self._left = most
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes | IO[bytes]) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                (found,) = self._stack
                return found
            if name in _CONSTANTS:
                if isinstance(argument, int) and argument.bit_length() > _MOST_BITS:
                    raise self._refused(f"a number of {argument.bit_length()} bits")
                self._stack.append(argument)
            elif name in _VALUES:
                self._stack.append(_VALUES[name])
            elif name not in ("PROTO", "FRAME"):
                step = getattr(self, f"_{name.lower()}", None)
                if step is None:
                    raise self._refused(f"the instruction {name}")
                step(argument)
        raise ValueError("it ends too early")

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._label} is a pickle with {what}, which files of this format do not have. Nothing of it was run. Do "
            "not load it with another program unless you trust who wrote it."
        )

    def _items(self) -> list[Any]:
        """Pops everything above the last mark, and the mark."""
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a mark is missing")
        found = self._stack[at + 1 :]
        del self._stack[at:]
        return found

    def _look_up(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise self._refused(f"a name that is a {type(name).__name__} of a {type(module).__name__}")
        if (module, name) not in self._known:
            raise self._refused(f"the name {module:.80}.{name:.80}")
        self._stack.append(self._known[module, name])

    def _global(self, argument: str) -> None:
        self._look_up(*argument.split(" ", 1))

    def _stack_global(self, _: Any) -> None:
        name = self._stack.pop()
        self._look_up(self._stack.pop(), name)

    def _reduce(self, _: Any) -> None:
        arguments = self._stack.pop()
        function = self._stack.pop()
        if not isinstance(function, Named) or type(arguments) is not tuple:
            raise self._refused("a call of something that is no class of the format")
        self._left -= 1 + sum(len(one) for one in arguments if isinstance(one, Sized))  # the function may copy them
        if self._left < 0:
            raise self._refused("calls that would make far more than the file has bytes")
        self._stack.append(function.make(*arguments))

    _newobj = _reduce

    def _build(self, _: Any) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if not isinstance(target, Opaque):
            raise self._refused(f"a state for a {type(target).__name__}")
        target.state = state

    def _mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def _pop(self, _: Any) -> None:
        self._stack.pop()

    def _pop_mark(self, _: Any) -> None:
        self._items()

    def _dup(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def _empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _list(self, _: Any) -> None:
        self._stack.append(self._items())

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._items()))

    def _tuple1(self, _: Any, count: int = 1) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count:
            raise ValueError("the stack is too short")
        self._stack[-count:] = [items]

    _tuple2 = partialmethod(_tuple1, count=2)
    _tuple3 = partialmethod(_tuple1, count=3)

    def _dict(self, _: Any) -> None:
        items = self._items()
        self._stack.append({})
        self._store(items)

    def _append(self, _: Any) -> None:
        self._extend([self._stack.pop()])

    def _appends(self, _: Any) -> None:
        self._extend(self._items())

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise self._refused(f"items for a {type(self._stack[-1]).__name__}")
        self._stack[-1].extend(items)

    def _setitem(self, _: Any) -> None:
        value = self._stack.pop()
        self._store([self._stack.pop(), value])

    def _setitems(self, _: Any) -> None:
        self._store(self._items())

    def _store(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise self._refused(f"entries for a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is tuple and (len(key) > _LONGEST_KEY or any(type(part) is tuple for part in key)):
                # Python hashes nested tuples without a limit of depth, a deep one would end the process, and anew for
                # each use.
                raise self._refused("a tuple of tuples, or a long one, as a key")
            target[key] = value

    def _put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    _binput = _long_binput = _put

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _get(self, place: int) -> None:
        self._stack.append(self._memo[place])

    _binget = _long_binget = _get
