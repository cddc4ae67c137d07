"""The GPT example's text and rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.examples.gpt.example import example_module

data = example_module("data")


def test_the_reference_of_python_is_long_english_text() -> None:
    text = data.open_text("python")
    assert len(text) > 300_000
    words = bytes(text.tolist()).decode()
    assert words.count("statement") > 100
    assert torch.equal(text, data.open_text("python"))


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.TXT").write_text("two")
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "c.bin").write_bytes(b"\x00")
    assert bytes(data.open_text(str(tmp_path)).tolist()) == b"one\n\ntwo"
    with pytest.raises(ValueError, match="absent' is not a folder"):
        data.open_text(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no text in files ending in .md, .py, .rst, .txt"):
        data.open_text(str(tmp_path / "empty"))


def test_the_shares_of_replicas_are_the_batch_of_one_process() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    whole = list(data.batches(text, 3, 8, 5, seed=2))
    shares = [list(data.batches(text, 3, 8, 5, 2, rank, 4)) for rank in range(4)]
    assert len(whole) == 3
    for step, (tokens, targets) in enumerate(whole):
        assert tokens.shape == (8, 5)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert torch.equal(targets, tokens + 1)
        assert torch.equal(torch.cat([share[step][0] for share in shares]), tokens)
    assert not torch.equal(whole[0][0], whole[1][0])
    assert not torch.equal(whole[0][0], next(data.batches(text, 1, 8, 5, seed=3))[0])


def test_what_cannot_be_divided_is_refused() -> None:
    text = torch.zeros(5, dtype=torch.uint8)
    with pytest.raises(ValueError, match="the text has 5 bytes; a row needs one more"):
        next(data.batches(text, 1, 8, 5))
    with pytest.raises(ValueError, match="it must be a multiple of the 3 shares"):
        next(data.batches(text, 1, 8, 4, 0, 0, 3))
