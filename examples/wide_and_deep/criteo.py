"""Files in Criteo's format: label, 13 integers, 26 categories of 8 hexadecimal digits, separated by tabs.

Empty fields are missing values: 0 for a number, no id for a category. The last tenth of the lines is the test data,
because the lines are in time order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from data import PADDING, Samples, hash_id

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
TEST_SHARE = 0.1


def read_criteo(path: Path) -> tuple[Samples, Samples]:
    """Returns the training and the test samples of a file, or of all files of a folder in the order of their names.

    Raises:
        ValueError: there is no file, there are fewer than two lines, or one is not in the format; the message names
            file and line.
    """
    files = sorted(found for found in path.iterdir() if found.is_file()) if path.is_dir() else [path]
    if not files or not path.exists():
        raise ValueError(f"--data {str(path)!r}: no such file or folder with files; or write flights.")
    ids: list[list[int]] = []
    dense: list[list[float]] = []
    labels: list[float] = []
    known: dict[tuple[int, str], int] = {}
    for file in files:
        with file.open(encoding="ascii") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    label, integers, categories = split_line(line.rstrip("\n"))
                    labels.append(label)
                    dense.append([squash(int(text)) if text else 0.0 for text in integers])
                    ids.append([category_id(slot, text, known) for slot, text in enumerate(categories)])
                except ValueError as error:
                    raise ValueError(f"{str(file)!r}, line {number}: {error}") from error
    if len(labels) < 2:
        raise ValueError(f"--data {str(path)!r} holds {len(labels)} lines; at least 2 are needed.")
    samples = Samples(np.array(ids, np.int64), np.array(dense, np.float32), np.array(labels, np.float32))
    first = len(labels) - max(1, int(len(labels) * TEST_SHARE))
    return samples.part(slice(first)), samples.part(slice(first, None))


def split_line(line: str) -> tuple[float, list[str], list[str]]:
    """Returns label, numbers and categories of a line, the last two as text.

    Raises:
        ValueError: the number of fields or the label is wrong.
    """
    fields = line.split("\t")
    if len(fields) != 1 + NUM_INTEGERS + NUM_CATEGORIES:
        raise ValueError(f"{len(fields)} fields; Criteo's format has {1 + NUM_INTEGERS + NUM_CATEGORIES}.")
    if fields[0] not in ("0", "1"):
        raise ValueError(f"the label is {fields[0]!r}; it is 0 or 1.")
    return float(fields[0]), fields[1 : 1 + NUM_INTEGERS], fields[1 + NUM_INTEGERS :]


def squash(value: int) -> float:
    """Returns the logarithm of 1 + the absolute value, with the value's sign: counts span many orders of magnitude."""
    return float(np.sign(value) * np.log1p(abs(value)))


def category_id(slot: int, text: str, known: dict[tuple[int, str], int]) -> int:
    """Returns the id of a category, 0 for a missing one; ``known`` caches earlier ones."""
    if not text:
        return PADDING
    if (found := known.get((slot, text))) is None:
        found = known[slot, text] = hash_id(f"C{slot + 1}", text)
    return found
