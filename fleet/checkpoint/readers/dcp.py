"""Checkpoints of ``torch.distributed.checkpoint``: read without running their metadata, written by torch itself.

Source of the format: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``. A folder holds ``.metadata``,
a pickle with the file and the bytes of each box of each tensor; those bytes are an archive of ``torch.save``.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleet.checkpoint.boxes import box_slices
from fleet.checkpoint.conversion.formats import Asked, Format
from fleet.checkpoint.conversion.plain_pickle import Named, Opaque, opaque, read_pickle
from fleet.checkpoint.conversion.torch_tree import state_of_tree, tree_of_state
from fleet.checkpoint.conversion.whole_state import TORCH_DTYPES, WholeState, read_small
from fleet.checkpoint.index import DTYPES, MOST_DEPTH, Index, Piece, TensorEntry, is_shape
from fleet.checkpoint.readers.torch_file import load_plain
from fleet.common.plain_files import open_to_read
from fleet.errors import CheckpointError

FORMAT = Format(
    order=20,
    title="folders of torch.distributed.checkpoint",
    mark=".metadata",
    folder=".metadata (torch.distributed.checkpoint)",
    to="dcp",
    has_numbers=True,
)
METADATA = FORMAT.mark
_HOME = "torch.distributed.checkpoint.metadata"
_LONGEST_TEXT = 4096
_OLD_HOME = "torch.distributed._shard.sharded_tensor.metadata"  # of two classes before torch 2.3


def _sizes(items: Any = ()) -> tuple[int, ...]:
    if type(items) not in (tuple, list) or not is_shape(items):
        raise ValueError("the shape of a tensor is no list of lengths")  # a text of it may have no end
    return tuple(items)


def _text(*parts: Any) -> str:
    if not all(type(part) in (str, int) for part in parts) or sum(len(f"{part}") for part in parts) > _LONGEST_TEXT:
        raise ValueError("a path is no text, or a long one")
    return "/".join(map(str, parts))


_DTYPES = {name: f"{one}".removeprefix("torch.") for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
# The names that a metadata file of torch 2.0 to 2.13 may have, each with its stand-in.
_KNOWN: dict[tuple[str, str], Any] = {
    **{(_HOME, kind): opaque(kind) for kind in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta",
    )},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): opaque("_StorageInfo"),
    (_OLD_HOME, "TensorProperties"): opaque("TensorProperties"),
    (_HOME, "_MEM_FORMAT_ENCODING"): Named(_text),
    (_OLD_HOME, "MEM_FORMAT_ENCODING"): Named(_text),
    ("torch.serialization", "_get_layout"): Named(_text),
    ("torch", "Size"): Named(_sizes),
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    ("collections", "OrderedDict"): Named(dict),
    **{(module, kind): Named(_text) for module in ("pathlib", "pathlib._local") for kind in (
        "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath",
    )},
}  # fmt: skip


def recognises(path: str) -> bool:
    """Returns whether ``path`` is a folder with torch's metadata."""
    return Path(path, METADATA).is_file()


def open_state(path: str | Path, asked: Asked) -> WholeState:
    """Returns the state in the folder of a ``torch.distributed.checkpoint``.

    Args:
        path: the folder.
        asked: the choices of the user; ``names`` are not for this format.

    Raises:
        CheckpointError: the metadata has content beyond the format, none of which runs, or a file is missing or
            damaged.
    """
    folder = Path(path)
    label = f"{folder / METADATA}"
    data = read_small(folder / METADATA)
    found = read_pickle(data, _KNOWN, label)
    try:
        described = _Metadata(found, folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{label} is no metadata of this format ({type(error).__name__}: {error!s:.99})."
        ) from error
    # Tensors without memory hold the places until a converter asks for one: then it alone is read.
    placeholders = {
        name: torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="meta")
        for name, entry in described.tensors.items()
    }
    names = {id(tensor): name for name, tensor in placeholders.items()}
    leaves: dict[str, Any] = {**placeholders, **{name: described.value(name) for name in described.values}}
    tree = _nested({described.paths.get(name, (name,)): leaves[name] for name in described.order}, len(data), label)

    def read(tensor: Tensor) -> Tensor:  # the state keeps the placeholders alive, so ids stay unique
        return described.read(names[id(tensor)]) if id(tensor) in names else tensor

    return state_of_tree(
        tree, f"{path}", "a checkpoint of torch.distributed.checkpoint", asked.key, asked.in_order, read
    )


class _Metadata:
    """The metadata: for each name its boxes, or the place of its value."""

    def __init__(self, found: Any, folder: Path) -> None:
        state = _state_of(found, "Metadata")
        self._folder = folder
        self.tensors: dict[str, TensorEntry] = {}
        self.values: dict[str, tuple[str, int, int]] = {}
        self.order: list[str] = []
        self.paths: dict[str, tuple[Any, ...]] = _paths(state.get("planner_data"))
        self._lengths: dict[Piece, int] = {}
        stored = {_place(place): _stored(info) for place, info in state["storage_data"].items()}
        _check_apart(stored.values())
        for name, entry in state["state_dict_metadata"].items():
            if not isinstance(name, str):
                raise TypeError(f"a name is a {type(name).__name__}")
            self.order.append(name)
            if isinstance(entry, Opaque) and entry.kind == "BytesStorageMetadata":
                self.values[name] = stored[name, None]
            else:
                self.tensors[name] = self._tensor(name, _state_of(entry, "TensorStorageMetadata"), stored)
        if holes := Index(tensors=self.tensors).holes():
            raise CheckpointError(f"{folder / METADATA}: no file has some parts of {holes[0]!r}.")

    def _tensor(self, name: str, state: dict[str, Any], stored: Mapping[Any, tuple[str, int, int]]) -> TensorEntry:
        dtype = state["properties"].state[0]
        if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
            raise CheckpointError(
                f"{self._folder / METADATA}: {name!r} is a tensor of {dtype!s:.80}; {', '.join(TORCH_DTYPES)} are read."
            )
        entry = TensorEntry(dtype, _sizes(state["size"]))
        for chunk in state["chunks"]:
            box = _state_of(chunk, "ChunkStorageMetadata")
            file, begin, length = stored[name, _sizes(box["offsets"])]
            piece = Piece(file, begin, _sizes(box["offsets"]), _sizes(box["sizes"]))
            if not piece.lies_in(entry.shape) or piece in self._lengths:
                raise ValueError(f"a box of {name!r} lies outside it, or stands there twice")
            if piece.numel * DTYPES[dtype][0] > length:
                raise ValueError(f"a box of {name!r} has more numbers than its {length} bytes hold")
            entry.pieces.append(piece)
            self._lengths[piece] = length
        return entry

    def value(self, name: str) -> Any:
        """Returns the value ``name``, which is not a tensor."""
        file, begin, length = self.values[name]
        return load_plain(self._bytes(file, begin, length), f"{self._folder / file}: {name!r}")

    def read(self, name: str) -> Tensor:
        """Returns the whole tensor of this name."""
        entry = self.tensors[name]
        whole = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        for piece in entry.pieces:
            label = f"{self._folder / piece.file}: {name!r}"
            box = load_plain(self._bytes(piece.file, piece.begin, self._lengths[piece]), label)
            if not isinstance(box, Tensor) or box.dtype != whole.dtype or tuple(box.shape) != piece.sizes:
                raise CheckpointError(f"{label} is not the {entry.dtype} {list(piece.sizes)} that {METADATA} says.")
            whole[box_slices(piece.offsets, piece.sizes)] = box
        return whole

    def _bytes(self, file: str, begin: int, length: int) -> io.BytesIO:
        try:
            with open_to_read(self._folder / file) as opened:
                size = os.fstat(opened.fileno()).st_size
                if begin + length > size:
                    raise CheckpointError(f"{self._folder / file} has {size} bytes and was cut off.")
                opened.seek(begin)
                return io.BytesIO(opened.read(length))
        except FileNotFoundError as error:
            raise CheckpointError(f"{self._folder / file} is missing: {METADATA} says that it has parts.") from error
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{self._folder / file}: {error.strerror or error}.") from error


def _state_of(found: Any, kind: str) -> dict[str, Any]:
    if not isinstance(found, Opaque) or found.kind != kind or not isinstance(found.state, dict):
        raise TypeError(f"a {kind} was expected")
    return found.state


def _place(place: Any) -> tuple[str, tuple[int, ...] | None]:
    state = _state_of(place, "MetadataIndex")
    offset = state.get("offset")
    if not isinstance(state["fqn"], str):
        raise TypeError("a name is no text")
    return state["fqn"], None if offset is None else _sizes(offset)


def _stored(info: Any) -> tuple[str, int, int]:
    state = _state_of(info, "_StorageInfo")
    file = state["relative_path"]
    begin = state["offset"]
    length = state["length"]
    if type(begin) is not int or type(length) is not int or begin < 0 or length < 0:
        raise ValueError("bytes of a file are wrong")
    if not isinstance(file, str) or Path(file).name != file or file in ("", "..", "."):
        raise ValueError(f"{file!r:.200} is no file of the folder")
    if state.get("transform_descriptors"):
        raise CheckpointError(
            f"{file} was written through {state['transform_descriptors']!r:.99}, such as compression, which is not "
            "read here. Load it with torch, and save it without."
        )
    return file, begin, length


def _check_apart(places: Iterable[tuple[str, int, int]]) -> None:
    """Raises ValueError where two entries have the same bytes of a file."""
    for (file, begin, length), (next_file, next_begin, _) in pairwise(sorted(places)):
        if file == next_file and next_begin < begin + length:
            raise ValueError(f"bytes of {file} stand for several entries")


def _paths(found: Any) -> dict[str, tuple[Any, ...]]:
    """Returns the path of each name in nested dictionaries and lists, as noted by torch's planner."""
    if not isinstance(found, dict):
        return {}
    for name, path in found.items():
        if type(path) is not tuple or not 0 < len(path) <= MOST_DEPTH:
            raise ValueError(f"the path {path!r:.200} of {name!r:.200}")
        if not all(type(part) is str or (type(part) is int and part >= 0) for part in path):
            raise ValueError(f"the path {path!r:.200} of {name!r:.200}")
    return found


def _nested(leaves: Mapping[tuple[Any, ...], Any], most: int, label: str) -> Any:
    """Returns the nested dictionaries and lists of ``leaves`` by their paths, without empty ones, as torch writes them.

    Raises CheckpointError, with ``label``, for lists of more than ``most`` places in all.
    """
    root: Any = _Branch()
    for path, leaf in leaves.items():
        at = root
        for part in path[:-1]:
            at = at.setdefault(part, _Branch())
            if type(at) is not _Branch:
                raise CheckpointError(f"{label}: {path!r} lies inside a value.")
        if path[-1] in at:
            raise CheckpointError(f"{label}: {path!r} stands there twice.")
        at[path[-1]] = leaf
    # One leaf at place 10**12 would make a list of that length.
    places = sum(one.num_places() for one in _branches(root))
    if places > most:
        raise CheckpointError(f"{label}: its lists have {places} places, and a file of {most} bytes can have no more.")
    return _with_lists(root)


def _branches(root: _Branch) -> Iterator[_Branch]:
    yield root
    for one in root.values():
        if isinstance(one, _Branch):
            yield from _branches(one)


class _Branch(dict[Any, Any]):
    """A dictionary or a list that is being put together, unlike a dictionary that is a value."""

    def num_places(self) -> int:
        """Returns its length as a list; 0 for a dictionary."""
        return max(self) + 1 if self and all(type(part) is int for part in self) else 0


def _with_lists(found: Any) -> Any:
    if not isinstance(found, _Branch):
        return found
    parts = {part: _with_lists(value) for part, value in found.items()}
    if count := found.num_places():
        return [parts.get(place, {}) for place in range(count)]
    return parts


def write_state(state: WholeState, target: str | Path) -> None:
    """Writes ``state`` by torch's own API, without a process group and with the whole of it in memory.

    Raises:
        CheckpointError: torch cannot name its entries apart, because it joins the parts of a path by dots.
        OSError: it cannot be written.
    """
    import torch.distributed.checkpoint as torch_checkpoint

    tree = tree_of_state(state)
    if others := _other_keys({name: value for name, value in tree.items() if state.groups(name) is None}):
        state.notes.append(f"torch.distributed.checkpoint makes texts of keys that are none: {others[0]}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that no process group was started
            torch_checkpoint.save(tree, checkpoint_id=target, no_dist=True)
    except torch_checkpoint.api.CheckpointException as error:
        failure = next((one for one, _ in error.failures.values()), error)
        if isinstance(failure, OSError):
            raise failure from None  # torch's own text is a traceback
        raise CheckpointError(f"{target} was not written: {type(failure).__name__}: {failure}") from error
    except ValueError as error:
        raise CheckpointError(f"{target} was not written: torch.distributed.checkpoint: {error}.") from error


def _other_keys(value: Any, path: str = "") -> list[str]:
    """Returns the places of keys other than texts in the dictionaries inside ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    own = [f"{path}[{key!r}]" for key in value if not isinstance(key, str)] if isinstance(value, dict) else []
    return own + [found for key, one in items for found in _other_keys(one, f"{path}[{key!r}]")]
