"""safetensors files of numpy arrays: eight bytes of length, a header in JSON, and the arrays one after the other.

Written here because numpy has no bfloat16, which the safetensors package therefore cannot write from arrays.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.common.plain_files import create
from fleet.errors import CheckpointError
from fleet.ps.files.row_file import open_plain

_NAMES = {"int64": "I64", "float32": "F32", "uint16": "BF16", "int8": "I8"}  # uint16: the bits of bfloat16
_TYPES = {"I64": "<i8", "F32": "<f4", "BF16": "<u2", "I8": "i1"}


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> tuple[int, int]:
    """Writes a new file, durable when this returns; returns its length and its CRC-32.

    Raises:
        OSError: the file exists, or the disk did not take it; nothing is left.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    # Wide elements first, so that each array begins at a multiple of the size of its elements.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8, as safetensors writes them
    size = 0
    checksum = 0
    opened = create(path, 0o644)
    try:
        with opened as file:
            for block in (len(text).to_bytes(8, "little"), text, *(tensor.tobytes() for tensor in tensors.values())):
                file.write(block)
                size += len(block)
                checksum = zlib.crc32(block, checksum)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return size, checksum


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of a file, mapped into memory; bfloat16 as uint16.

    Raises:
        CheckpointError: the file is no safetensors file of rows, or is cut short.
    """
    try:
        with open_plain(path) as file:
            everything = np.memmap(file, np.uint8, "r")
        length = int.from_bytes(everything[:8].tobytes(), "little")
        header = json.loads(everything[8 : 8 + length].tobytes())
        data = everything[8 + length :]
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                if end > len(data):
                    raise ValueError(f"{name} ends after the file")
                found[name] = data[start:end].view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: this is no complete safetensors file of rows: {error}.") from None
    return found
