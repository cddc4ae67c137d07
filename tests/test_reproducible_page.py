"""docs/run/reproducible.md: every block leaves the same bits on one, two and three processes, and trains."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

import fleet
from fleet.job.logical_workers import hosted_ranks
from fleet.strategies.reproducible.tree import whole_nodes
from tests.helpers.workers import run_workers
from tests.test_ps_pages import FENCED, shape
from tests.test_readme import read
from tests.test_recipes import blocks, run_block, whole

PAGE = "run/reproducible.md"
CHINESE = "run/reproducible.zh-CN.md"


def run_blocks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Runs each block after the first one; returns the bits that each leaves: weights, averages, losses."""
    os.chdir(folder)
    found = blocks(PAGE)
    start = found.pop("start")
    left: dict[str, Any] = {}
    for title, body in found.items():
        names = run_block(start, body, f"{PAGE}: {title}")
        left[title] = [names["losses"], *(whole(names[name]) for name in ("net", "own", "average") if name in names)]
        left[f"{title} buffers"] = [buffer.clone() for buffer in names["net"].buffers()]
        fleet.barrier_worker()
    return left


def test_every_block_has_the_same_bits_on_any_number_of_processes(tmp_path: Path) -> None:
    by_size = {}
    for size in (1, 2, 3):
        folder = tmp_path / f"{size}"
        folder.mkdir()
        by_size[size] = run_workers(run_blocks, size, str(folder), backend=None)
    (expected,) = by_size[1]
    assert len(expected) == 8
    for size, ranks in by_size.items():
        for found in ranks:
            assert found.keys() == expected.keys()
            for title, left in expected.items():
                torch.testing.assert_close(found[title], left, atol=0, rtol=0, msg=f"{title} on {size}")
    for title in ("loop", "own data", "once an update", "checkpoint"):
        losses = expected[title][0]
        assert len(losses) == (4 if title == "own data" else 10), title
        assert len({str(loss) for loss in losses}) == len(losses), title


def run_left_loops(rank: int, world_size: int) -> list[Any]:
    """Leaves loops at an update, and at last in the middle of one; returns the losses and what the next loop says."""
    names: dict[str, Any] = {}
    start = blocks(PAGE)["start"]
    body = re.sub(r"range\(2\)", "range(3)", blocks(PAGE)["loop"]) + "            break\n"
    exec(compile(start + body, PAGE, "exec"), names)
    sampler, loader = names["sampler"], names["loader"]
    for x, _ in sampler.batches(loader):
        names["model"](x).sum().backward()
        names["optimizer"].step()
        break
    try:
        sampler.batches(loader)
    except fleet.errors.ConfigError as error:
        return [names["losses"], str(error)]
    return [names["losses"], "nothing"]


def test_a_loop_is_left_at_an_update(tmp_path: Path) -> None:
    (alone,) = run_workers(run_left_loops, 1, backend=None)
    first, second = run_workers(run_left_loops, 2, backend=None)
    assert len(alone[0]) == 3
    assert alone[0] == first[0] == second[0]
    for _, error in (alone, first, second):
        assert "Leave a loop at an update" in error


def test_both_languages_have_the_same_code_and_shape() -> None:
    english, chinese = read(f"docs/{PAGE}"), read(f"docs/{CHINESE}")
    assert FENCED.findall(english) == FENCED.findall(chinese)
    assert shape(english) == shape(chinese)


def test_the_page_is_read_in_ten_minutes() -> None:
    assert len(read(f"docs/{PAGE}").split()) <= 2200


def test_the_table_of_nodes_is_that_of_the_tree() -> None:
    rows = re.findall(r"^\| (\d+)((?: \| \d)+) \|$", read(f"docs/{PAGE}"), re.MULTILINE)
    assert len(rows) == 4
    for num, cells in rows:
        most = [
            max(len(list(whole_nodes(int(num), hosted_ranks(int(num), hosts, host)))) for host in range(hosts))
            for hosts in range(2, 9)
        ]
        assert [int(cell) for cell in re.findall(r"\d", cells)] == most, num
