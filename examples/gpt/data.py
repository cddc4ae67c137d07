"""Text as bytes: the reference of the Python language, which comes with Python, or a folder of text files.

Every process reads the same bytes and draws the same rows in a step, and takes its share of them. So a job of any
number of workers trains on the rows that one process would train on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256
TEXT_SUFFIXES = {".md", ".py", ".rst", ".txt"}


def open_text(source: str) -> Tensor:
    """Returns the bytes of the text that ``--data`` names: ``python``, or the path of a folder of text files.

    Raises:
        ValueError: the folder is absent or holds no text.
    """
    text = python_reference() if source == "python" else folder_text(Path(source))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def python_reference() -> bytes:
    """Returns the chapters that ``help("if")``, ``help("LAMBDAS")`` and the like show: about 700 kB of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def folder_text(root: Path) -> bytes:
    """Returns the text files below ``root``, joined in the order of their names."""
    if not root.is_dir():
        raise ValueError(f"--data takes 'python' or a folder of text files; {str(root)!r} is not a folder.")
    paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in TEXT_SUFFIXES and path.is_file())
    text = b"\n\n".join(path.read_bytes() for path in paths)
    if not text:
        raise ValueError(f"{str(root)!r} holds no text in files ending in {', '.join(sorted(TEXT_SUFFIXES))}.")
    return text


def batches(
    text: Tensor, steps: int, batch_size: int, length: int, seed: int = 0, rank: int = 0, replicas: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields, for each step, tokens and the tokens that follow them; both are int64 (rows, ``length``).

    Args:
        text: bytes, from :func:`open_text`.
        steps: number of batches.
        batch_size: rows of a step over all replicas.
        length: tokens of a row.
        seed: decides where the rows begin.
        rank: which share of each batch to yield.
        replicas: how many shares there are.

    Raises:
        ValueError: the text is shorter than a row, or the batch does not divide.
    """
    if len(text) <= length:
        raise ValueError(f"--length is {length}, and the text has {len(text)} bytes; a row needs one more than that.")
    if batch_size % replicas:
        raise ValueError(f"--batch-size is {batch_size}; it must be a multiple of the {replicas} shares of the batch.")
    generator = torch.Generator().manual_seed(seed)
    share = slice(rank * batch_size // replicas, (rank + 1) * batch_size // replicas)
    offsets = torch.arange(length + 1)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (batch_size, 1), generator=generator)
        rows = text[starts[share] + offsets].long()
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
