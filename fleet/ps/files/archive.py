"""Archives of ``torch.save``: reading one takes no more memory than the file has bytes, whatever it claims."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO

import torch

from fleet.errors import CheckpointError


def check_archive(file: Path | IO[bytes], label: str) -> None:
    """Raises CheckpointError, beginning with ``label``, when ``file`` holds compressed parts, or one part many times.

    ``torch.save`` compresses nothing; a compressed megabyte of zeros is a gigabyte. Other files are left to torch.
    """
    if not zipfile.is_zipfile(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            end = archive.start_dir
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return  # torch reports the damage
    # Stored parts can overlap as well: their sizes together must fit before the directory at the end.
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > end:
        raise CheckpointError(
            f"{label}: its parts are compressed and could expand to any size; a checkpoint is not compressed. If you "
            "trust it, read it with torch.load and save it again."
        )


def check_parts(file: IO[bytes], label: str) -> None:
    """Raises CheckpointError, beginning with ``label``, when the checksum of a part of an archive is wrong.

    ``torch.load`` does not look at the checksums. Other files are left to torch. Nothing is checked in a process that
    writes archives without checksums (``torch.serialization.set_crc32_options(False)``).
    """
    if not zipfile.is_zipfile(file) or not torch.serialization.get_crc32_options():
        return
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise CheckpointError(f"{label} is damaged ({error}); load another checkpoint.") from None
    if damaged is not None:
        raise CheckpointError(f"{label} is damaged: the checksum of {damaged!r} is wrong. Load another checkpoint.")
