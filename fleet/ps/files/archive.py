"""Archives of ``torch.save``: reading one takes as much memory as the file has bytes, not what it claims."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO

from fleet.errors import CheckpointError

__all__ = ["check_archive"]


def check_archive(file: Path | IO[bytes], label: str) -> None:
    """Raises CheckpointError that begins with ``label`` when ``file`` holds packed parts, or one part many times.

    ``torch.save`` packs nothing; of zeros a packed megabyte is a gigabyte. A file that is no archive is left to torch.
    """
    if not zipfile.is_zipfile(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            end = archive.start_dir
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return  # torch says what is wrong
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > end:
        raise CheckpointError(
            f"{label}: its parts are packed and could unpack to any size; a checkpoint is written unpacked. Read it "
            "with torch.load where you trust it, and save it again."
        )
