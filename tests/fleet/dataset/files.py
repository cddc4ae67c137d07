"""Files in the MultiSlot text form for the tests of datasets."""

from __future__ import annotations

from pathlib import Path

from fleet.dataset.slots import Slot

SLOTS = [Slot("words", lod_level=1), Slot("prices", (-1, 2), "float32"), Slot("label")]


def line(number: int) -> str:
    """Returns sample ``number``: as many words as its last digit says, and everything else made from the number."""
    words = [number * 10 + place for place in range(number % 3 + 1)]
    return f"{len(words)} {' '.join(map(str, words))} 2 {number}.5 -{number} 1 {number}\n"


def write_files(folder: Path, sizes: list[int], first: int = 0) -> list[str]:
    """Writes a file for each size; samples are numbered from ``first`` through all files."""
    files, name = [], f"part-{first}"
    for index, size in enumerate(sizes):
        path = folder / f"{name}-{index}"
        path.write_text("".join(map(line, range(first, first + size))))
        files.append(str(path))
        first += size
    return files
