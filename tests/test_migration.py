"""The rows of docs/start/migration.md for parameter-server scripts say what is true (001-01, 002-26)."""

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
from tests.helpers.ready_python import run_python

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("start/migration.md", "start/migration.zh-CN.md")


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


SCRIPT = """
import torch
{imports}
fleet.init(role_maker.PaddleCloudRoleMaker())
strategy = StrategyFactory.create_sync_strategy()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(1000001, 10, sparse=True)
        self.ads = fleet.SparseEmbedding(10, entry=fleet.CountFilterEntry(1))
        self.out = torch.nn.Linear(20, 1)

    def forward(self, ids):
        return self.out(torch.cat([self.words(ids), self.ads(ids)], 1))

model = Net()
optimizer = {optimizer}
{model}
fleet.init_worker()

def step(batch):
    ids, label = batch
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids), label)
    optimizer.minimize(loss)
    optimizer.clear_grad()
    losses.append(loss.item())

data = torch.utils.data.TensorDataset(torch.arange(64), (torch.arange(64) % 2).float()[:, None])
for epoch in range(3):
    for batch in torch.utils.data.DataLoader(data, batch_size=16):
        step(batch)
fleet.save_persistables(exe, dirname)
fleet.save_inference_model(dirname=f"{{dirname}}/served", example_inputs=(torch.arange(4),))
fleet.stop_worker()
"""


@pytest.mark.parametrize("page", PAGES)
def test_a_static_script_that_follows_the_table_trains_and_saves(page: str, tmp_path: Path) -> None:
    """001-01: imports, optimizer and model as the right column writes them, the calls as the left one does."""
    code = [code for _, right in rows(page) for code in re.findall("`([^`]+)`", right)]
    names: dict[str, Any] = {"losses": [], "exe": object(), "dirname": str(tmp_path / "saved")}
    text = SCRIPT.format(
        imports="\n".join(line for line in code if line.startswith("from ")),
        optimizer=next(line for line in code if line.startswith("fleet.distributed_optimizer(")),
        model=next(line for line in code if line.startswith("model = fleet.distributed_model(")),
    )
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(text, page, "exec"), names)
    losses = names["losses"]
    assert sum(losses[-4:]) < sum(losses[:4])
    assert (tmp_path / "saved" / "served").is_dir()
    fleet._instance()._close()


def blocks(page: str, language: str) -> list[str]:
    """Returns the new side of the page's blocks of code in ``language``: what is added and what stays."""
    found = re.findall(f"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = [block.splitlines() for block in found]
    if language == "diff":
        lines = [[line[1:] for line in block if not line.startswith("-")] for block in lines]
    return ["\n".join(block) for block in lines]


def block_with(page: str, language: str, word: str) -> str:
    """Returns the one block that has ``word``."""
    (found,) = [block for block in blocks(page, language) if word in block]
    return found


_GIVEN = """\
import torch
from torch.utils.data import DistributedSampler
torch.manual_seed(0)
model = torch.nn.Sequential()
model.backbone, model.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
weight = model.head.weight
old = weight.detach().clone()
loss = model(torch.ones(2, 4)).sum()
layers, criterion = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)], torch.nn.MSELoss()
data, x, y = range(32), torch.rand(16, 4), torch.rand(16, 1)
"""


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    ("language", "word", "then"),
    [
        ("diff", "gradient_merge", "assert weight.grad is None and len(optimizer.param_groups) == 1"),
        ("python", "ClipGradByGlobalNorm", "loss.backward(); optimizer.step(); assert not torch.equal(weight, old)"),
        ("diff", "PipelineLayer", "assert loss.isfinite()"),
    ],
)
def test_blocks_of_the_page_run(page: str, language: str, word: str, then: str) -> None:
    """The new side, in one process: the degrees of the hybrid script, which need eight workers, are set to 1."""
    text = block_with(page, language, word).replace('_degree": 2', '_degree": 1')
    done = run_python(f"{_GIVEN}{text}\n{then}\n")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_every_other_command_of_the_page_is_known(page: str) -> None:
    from fleet.__main__ import COMMANDS

    lines = [line for kind in ("bash", "diff") for block in blocks(page, kind) for line in block.splitlines()]
    commands = [line.split() for line in lines if line.startswith("python -m fleet")]
    assert commands
    assert all(words[2] == "fleet.launch" or words[3] in COMMANDS for words in commands)
