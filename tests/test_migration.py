"""The rows of docs/migration.md for parameter-server scripts say what is true (001-01, 002-26)."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.facade import Fleet

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("migration.md", "migration.zh-CN.md")


def section(page: str) -> str:
    """Returns the part of a page on parameter-server scripts."""
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text.count("\n## PaddleRec") == 1
    return text.partition("\n## PaddleRec")[2].partition("\n## ")[0]


def rows(page: str) -> list[tuple[str, str]]:
    """Returns the two cells of each row of the table."""
    lines = [line for line in section(page).splitlines() if line.startswith("| ")][2:]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]  # type: ignore[misc]


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_this_package_exists(page: str) -> None:
    """001-01: imports run as they stand, and what the right column names is there."""
    found = rows(page)
    assert len(found) == 16
    assert all(len(row) == 2 for row in found)
    code = [code for _, right in found for code in re.findall("`([^`]+)`", right)]
    imports = [line for line in code if line.startswith("from ")]
    assert len(imports) == 2
    for line in imports:
        module, _, names = line.removeprefix("from ").partition(" import ")
        for name in names.split(", "):
            # hasattr would say False for the names that are refused with a reason
            assert hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}")
    names = sorted({name for line in code for name in re.findall(r"\bfleet\.(\w+)\(", line)})
    assert {"SparseEmbedding", "distributed_model", "save_persistables", "train_from_dataset"} <= set(names)
    for name in names:
        assert hasattr(fleet, name), name
    for name in re.findall(r"fleet\.(\w+)\(", " ".join(left for left, right in found if "`" not in right)):
        assert hasattr(fleet, name), name
    for module in re.findall("python -m ([a-z_.]+)", " ".join(code)):
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("page", PAGES)
def test_the_reader_loop_trains_and_ends_with_the_data(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """002-26: what the page puts in place of reader.start(), EOFException and reader.reset() is run."""
    (block,) = re.findall("```diff\n(.*?)```", section(page), re.DOTALL)
    loop = "\n".join(line[1:] for line in block.splitlines() if not line.startswith("-"))
    torch.manual_seed(0)
    own = Fleet()
    monkeypatch.setattr(own, "_close", lambda: None)
    own.init()
    model: Any = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 1))
    optimizer = own.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.5))
    model = own.distributed_model(model)
    data = torch.utils.data.TensorDataset(torch.arange(9), (torch.arange(9) % 2).float()[:, None])
    seen: list[list[int]] = []

    class Loader:
        def __iter__(self) -> Any:
            for ids, label in torch.utils.data.DataLoader(data, batch_size=4):
                seen.append(ids.tolist())
                yield ids, label

    names = {"torch": torch, "model": model, "optimizer": optimizer, "loader": Loader(), "epochs": 3}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(loop, page, "exec"), names)  # the page's own lines
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8]] * 3
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
