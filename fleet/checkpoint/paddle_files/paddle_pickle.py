"""Files that ``paddle.save`` and ``paddle.static.save`` wrote: ``.pdparams``, ``.pdopt``, and dictionaries of them.

[Note: What Paddle writes]
Paddle 2.0 to 3.3 pickle (protocol 2 to 4) a dictionary from names to numpy arrays. The form of a tensor depends on the
rest of the dictionary:

* a state_dict alone: an array; ``StructuredToParameterName@@`` holds Paddle's own name of each parameter, and from
  protocol 2 or 3 an array of 1 GiB or more stands in slices, which ``UnpackBigParamInfor@@`` lists;
* a state_dict with others, or with master weights: ``tuple((name, array))``, a call that the file asks for;
* in a static program: an array, or ``eval("data", {"data": array})``, also a call that the file asks for.

Such calls are recognised and never made (:mod:`fleet.checkpoint.conversion.plain_pickle`). Paddle keeps bfloat16 as
uint16, which none of its own tensors has. Weights of linear layers are [in, out].
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fleet.checkpoint.conversion.plain_pickle import Named, Opaque, opaque, read_pickle
from fleet.checkpoint.conversion.unfolded import most_of
from fleet.checkpoint.index import is_shape
from fleet.common.plain_files import open_to_read
from fleet.errors import CheckpointError

_NAMES = "StructuredToParameterName@@"
_SLICES = "UnpackBigParamInfor@@"
_MOST_READS = 50_000_000
_LONGEST_LINE = 1 << 16
_VIEWED_BYTES = 4096  # longer pieces stay in the file until their bytes are used
_KINDS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
_NDARRAY = object()


class PaddleState(dict[Any, Any]):
    """A dictionary of a Paddle file: names to tensors, plain values, and dictionaries of the same kind.

    Attributes:
        parameter_names: Paddle's own name of a parameter (``"linear_0.w_0"``) by its name in the dictionary, where the
            file has it. Optimizer states are under the former.
    """

    def __init__(self, entries: Mapping[Any, Any] | None = None, names: Mapping[str, str] | None = None) -> None:
        super().__init__(entries or {})
        self.parameter_names: dict[str, str] = dict(names or {})

    def tensors(self) -> dict[str, Tensor]:
        """Returns the entries that are tensors, in the order of the file."""
        return {name: value for name, value in self.items() if isinstance(value, Tensor)}


def read_paddle(path: str | Path, key: str | None = None) -> PaddleState:
    """Returns the content of a file of ``paddle.save`` or ``paddle.static.save``, without running any code of it.

    Arrays become tensors of the same shape and dtype (uint16: bfloat16), in Paddle's layout, so weights of linear
    layers are [in, out]. Their bytes are read from the file at their first use: keep the file until then.

    Args:
        path: a file of either function, of protocol 2 to 4: ``model.pdparams``, ``model.pdopt``.
        key: which entry, for a file that holds several dictionaries: ``paddle.save({"model": ..., "epoch": 3}, path)``.

    Raises:
        CheckpointError: the file is damaged or something else, or names a class or a function that such files do not
            have.

    Example:
        >>> state = fleet.checkpoint.read_paddle("model.pdparams")
        >>> state["fc.weight"].shape, state.parameter_names["fc.weight"]
        (torch.Size([8, 4]), 'linear_0.w_0')
    """
    label = str(path)
    mapped = _mapped(Path(path))
    _check_start(mapped, label)
    found = read_pickle(cast(IO[bytes], _Window(mapped, label)), _KNOWN, label, len(mapped))
    try:
        state = _Reader(most_of(len(mapped))).read(found)
    except (ValueError, TypeError, OverflowError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{label}: {error}.") from None
    if not isinstance(state, PaddleState):
        raise CheckpointError(
            f"{label} holds a {type(state).__name__}; it must be a dictionary, as paddle.save(model.state_dict(), ...) "
            "writes it."
        )
    return state if key is None else entry_of(state, key, label)


def entry_of(state: PaddleState, key: str, label: str) -> PaddleState:
    """Returns the dictionary under ``key``; raises CheckpointError without one."""
    found = state.get(key)
    if not isinstance(found, PaddleState):
        keys = [name for name, value in state.items() if isinstance(value, PaddleState)]
        raise CheckpointError(f"{label} has no dictionary under {key!r}. Those that it has: {keys or 'none'}.")
    return found


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open_to_read(os.path.realpath(path)) as file:
            # Copy on write: tensors over it may be changed, the file may not.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise CheckpointError(f"{path} is empty.") from None
    except OSError as error:
        hint = " Give the file: model.pdparams." if path.is_dir() or not path.suffix else ""
        raise CheckpointError(f"{path}: {error.strerror}.{hint}") from None


def _check_start(mapped: mmap.mmap, label: str) -> None:
    start = bytes(mapped[:16])
    if start[:1] == b"\x80" and len(start) > 1 and start[1] in (2, 3, 4):
        return
    what = "no file of paddle.save: those begin as a pickle of protocol 2 to 4"
    if start[:2] == b"PK":
        what = "an archive, as torch.save writes it, and no file of paddle.save"
    elif start[8:9] == b"{":
        what = "a safetensors file; the safetensors package reads it, with weights of linear layers as [in, out]"
    elif start[:4] == b"\0\0\0\0":
        what = (
            "Paddle's binary form of variables (paddle.jit.save, save_inference_model, use_binary_format=True), which "
            "has no names. Load it in Paddle and write paddle.save(layer.state_dict(), 'model.pdparams')"
        )
    raise CheckpointError(f"{label} is {what}.")


class _Window:
    """A mapped file as ``pickletools`` reads it: long pieces are views of the mapping, not copies."""

    def __init__(self, mapped: mmap.mmap, label: str) -> None:
        self._mapped = mapped
        self._view = memoryview(mapped)
        self._label = label
        self._at = self._reads = 0

    def read(self, size: int) -> bytes | memoryview:
        """Returns the next ``size`` bytes, or the rest."""
        self._reads += 1
        if self._reads > _MOST_READS:
            raise CheckpointError(f"{self._label} has more instructions than a state has: {_MOST_READS}.")
        part = self._view[self._at : self._at + size]
        self._at += len(part)
        return part if len(part) >= _VIEWED_BYTES else bytes(part)

    def readline(self) -> bytes:
        """Returns the next line."""
        end = self._mapped.find(b"\n", self._at, self._at + _LONGEST_LINE) + 1
        return bytes(self.read((end or self._at + _LONGEST_LINE) - self._at))

    def tell(self) -> int:
        """Returns the place of the next byte."""
        return self._at


# ---- stand-ins for the names in a file -------------------------------------------------------------------------------


class _Unknown(ValueError):
    """A call of an allowed name that Paddle never writes."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is called with what Paddle never gives it; nothing was run")


def _array(of: Any, shape: Any, code: Any) -> Opaque:
    if of is not _NDARRAY:
        raise ValueError("an array is of another class than numpy.ndarray")
    return Opaque("array", (shape, code))


def _encoded(text: Any, encoding: Any) -> bytes:
    """Protocol 2 has no bytes: Python writes them as a text, and this call."""
    if type(text) is not str or encoding != "latin1":
        raise ValueError("_codecs.encode stands for something else than the bytes of an array")
    return text.encode("latin-1")


def _no_bytes(*arguments: Any) -> bytes:
    if arguments:
        raise ValueError("bytes stand for something else than an array without elements")
    return b""


def _ordered(*arguments: Any) -> dict[Any, Any]:
    pairs = arguments[0] if arguments else []
    if type(pairs) is not list or not all(type(pair) is list and type(pair[0]) is str for pair in pairs):
        raise _Unknown("OrderedDict")
    return {key: value for key, value in pairs}


def _tuple(*arguments: Any) -> tuple[Any, ...]:
    if len(arguments) != 1 or type(arguments[0]) is not tuple:
        raise _Unknown("tuple")
    return arguments[0]


def _evaluated(*arguments: Any) -> Opaque:
    """Paddle writes ``eval("data", {"data": array})`` for an array; any other text is refused."""
    if len(arguments) == 2 and arguments[0] == "data" and type(arguments[1]) is dict and list(arguments[1]) == ["data"]:
        found = arguments[1]["data"]
        if isinstance(found, Opaque) and found.kind == "array":
            return found
    raise _Unknown("eval")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): opaque("dtype"),
    ("_codecs", "encode"): Named(_encoded),
    ("collections", "OrderedDict"): Named(_ordered),
}
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    _KNOWN |= {(_module, "_reconstruct"): Named(_array), (_module, "scalar"): opaque("scalar")}
for _module in ("builtins", "__builtin__"):
    _KNOWN |= {
        (_module, "tuple"): Named(_tuple),
        (_module, "eval"): Named(_evaluated),
        (_module, "bytes"): Named(_no_bytes),
    }


# ---- from there to tensors -------------------------------------------------------------------------------------------


class _Reader:
    """Makes tensors and plain values of the result of the pickle's machine."""

    def __init__(self, most_bytes: int) -> None:
        self._done: dict[int, Any] = {}
        self._left = most_bytes

    def read(self, found: Any) -> Any:
        if found is None or type(found) in (bool, int, float, str, bytes):
            return found
        # Once for each object: a file may name one value many times, and a tied weight must stay one tensor.
        if id(found) not in self._done:
            self._done[id(found)] = self._made(found)
        return self._done[id(found)]

    def _count(self, tensors: Iterable[Tensor]) -> None:
        """Counts the bytes of ``tensors``; raises ValueError where the file is too small for all that it describes."""
        self._left -= sum(tensor.nbytes for tensor in tensors)
        if self._left < 0:
            raise ValueError("its arrays name the same bytes again and again, and would be far larger than the file")

    def _made(self, found: Any) -> Any:
        if isinstance(found, Opaque):
            if found.kind == "scalar":
                return _number(found)
            self._count([tensor := _tensor(found)])
            return tensor
        if type(found) is dict:
            return self._state(found)
        if type(found) is tuple:
            named = _name_in(found)
            return self.read(found[1]) if named else tuple(self.read(item) for item in found)
        if type(found) is list:
            return [self.read(item) for item in found]
        raise ValueError(f"a value is a {type(found).__name__}, which no state holds")

    def _state(self, found: dict[Any, Any]) -> PaddleState:
        if wrong := [key for key in found if type(key) not in (str, int, float, bool)]:
            raise ValueError(f"a key is a {type(wrong[0]).__name__}, which no state has")
        names = {key: name for key, value in found.items() if type(value) is tuple and (name := _name_in(value))}
        given = found.get(_NAMES, {})
        slices = found.get(_SLICES, {})
        if type(given) is not dict or not all(type(text) is str for pair in given.items() for text in pair):
            raise ValueError(f"{_NAMES} must hold names")
        state = PaddleState(
            {key: self.read(value) for key, value in found.items() if key not in (_NAMES, _SLICES)}, {**names, **given}
        )
        if type(slices) is not dict:
            raise ValueError(f"{_SLICES} must hold the slices of each name")
        for name, described in slices.items():
            state[name] = self._joined(state, name, self.read(described))
        return state

    def _joined(self, state: PaddleState, name: Any, described: Any) -> Tensor:
        """Returns one array of its slices, which leave ``state``."""
        rule = f"{_SLICES} of {name!r:.80} must name its slices and shape"
        if not isinstance(described, dict) or type(described.get("slices")) is not list or name in state:
            raise ValueError(rule)
        parts = [state.pop(part, None) if type(part) is str else None for part in described["slices"]]
        flat = [part for part in parts if isinstance(part, Tensor) and part.dim() == 1]
        shape = described.get("OriginShape")
        if not flat or len(flat) != len(parts) or not _is_shape(shape):
            raise ValueError(rule)
        if sum(map(len, flat)) != math.prod(shape) or len({part.dtype for part in flat}) != 1:
            raise ValueError(f"{rule}: {math.prod(shape)} elements of one dtype")
        self._count(flat)
        return torch.cat(flat).reshape(shape)


def _name_in(found: tuple[Any, ...]) -> str | None:
    """Returns the name in Paddle's ``(name, array)``, or ``None`` for any other tuple."""
    if len(found) == 2 and type(found[0]) is str and isinstance(found[1], Opaque) and found[1].kind == "array":
        return found[0]
    return None


def _is_shape(shape: Any) -> TypeGuard[tuple[int, ...]]:
    return type(shape) is tuple and is_shape(shape)


def _dtype(found: Any) -> np.dtype[Any]:
    if not isinstance(found, Opaque) or found.kind != "dtype":
        raise ValueError("an array has no dtype")
    state = found.state
    code = found.arguments[0] if found.arguments else None
    # (version, byte order, and three entries that only records, sub-arrays and objects fill, ...)
    plain = type(state) is tuple and len(state) >= 5 and state[2:5] == (None, None, None)
    if code not in _KINDS or not plain or state[1] not in ("<", "|"):
        order = state[1] if plain else "?"
        raise ValueError(
            f"an array has the dtype {order!s:.8}{code!s:.40}; an array of a state holds numbers, with the lowest byte "
            "first"
        )
    dtype: np.dtype[Any] = np.dtype(code).newbyteorder("<")
    return dtype


def _elements(found: Opaque, dtype: np.dtype[Any], data: Any, count: int) -> npt.NDArray[Any]:
    if not isinstance(data, bytes | memoryview) or len(data) != count * dtype.itemsize:
        size = len(data) if isinstance(data, bytes | memoryview) else f"a {type(data).__name__}"
        raise ValueError(f"an {found.kind} of {count} elements of {dtype} has {size} as its bytes")
    if not count:
        return np.empty(0, dtype)
    # What is no view of the file is small, or was made for this array; tensors may be written to.
    return np.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype)


def _number(found: Opaque) -> Any:
    if len(found.arguments) != 2:
        raise ValueError("a number has no dtype or no bytes")
    dtype, data = found.arguments
    kind = _dtype(dtype)
    return _elements(found, kind, data, 1)[0].item()


def _tensor(found: Opaque) -> Tensor:
    state = found.state
    if found.kind != "array" or type(state) is not tuple or len(state) != 5 or state[0] != 1:
        raise ValueError(f"an {found.kind} has another state than numpy's")
    _, shape, dtype, by_columns, data = state
    if not _is_shape(shape):
        raise ValueError(f"an array has the shape {shape!s:.80}")
    kind = _dtype(dtype)
    flat = _elements(found, kind, data, math.prod(shape))
    is_bfloat16 = kind == np.uint16
    tensor = torch.from_numpy(flat.view(np.int16) if is_bfloat16 else flat)
    if is_bfloat16:
        tensor = tensor.view(torch.bfloat16)
    if by_columns:
        return tensor.reshape(tuple(reversed(shape))).permute(*reversed(range(len(shape)))).contiguous()
    return tensor.reshape(shape)
