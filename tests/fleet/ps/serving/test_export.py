from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fleet import fleet
from fleet.errors import ConfigError
from fleet.facade import Fleet
from fleet.ps import Predictor, Reader, export
from tests.fleet.ps.serving.models import EveryForm, inputs
from tests.helpers.served import run_job, strategy_of

IDS = torch.tensor([[1, 2], [3, 4]])


class Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = fleet.SparseEmbedding(4, name="first")
        self.second = fleet.SparseEmbedding(4, name="second")

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(ids).argmax(-1))
        return found


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.SparseEmbedding(4, name="rows", combiner="sum")

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.rows(ids.tolist())
        return found


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.SparseEmbedding(4, name="rows")

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.rows(ids)
        return found * 2 if found.sum() > 0 else found


class Sizes(nn.Module):
    """Computes with the number of samples, in one of several forms."""

    def __init__(self, form: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.rows = fleet.SparseEmbedding(4, name="rows")
        self.form = form

    def forward(self, ids: Tensor) -> Tensor:
        return self.form(ids, self.rows(ids))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.SparseEmbedding(4, name="rows", entry=fleet.ShowClickEntry("show", "click"))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.rows(ids, show=torch.ones(len(ids)), click=torch.zeros(len(ids)))
        return found


def _views(rows: Tensor) -> Tensor:
    return torch.stack([rows, rows, rows, rows], 1)


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    model = EveryForm().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert export(model, inputs(4), tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert {name: type(module) for name, module in model.named_children()} == {
        name: type(module) for name, module in EveryForm().named_children()
    }
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    body = json.loads(json.loads((tmp_path / "new" / "folder" / "export.json").read_text())["export"])
    assert [(one["module"], one["table"]) for one in body["lookups"]] == [
        ("bags", "bags"),
        ("plain", "plain"),
        ("flat", "shared"),
    ]


def test_the_program_takes_rows(tmp_path: Path) -> None:
    """What is written is a program of torch: it runs without this library."""
    model = nn.Sequential(fleet.SparseEmbedding(4, name="ads", combiner="sum"), nn.Linear(4, 1))
    export(model, (IDS,), tmp_path)
    program = torch.export.load(next(tmp_path.glob("dense-*.pt2"))).module()
    rows = torch.randn(7, 4)
    assert torch.equal(program((rows,), torch.zeros(7, 2, dtype=torch.int64)), model[1](rows))


class Collected(nn.Module):
    """Features in every form that a program takes: ids of samples, bags, and flat ids with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.fields = fleet.SparseEmbeddings(
            {"user": 2, "words": {"dim": 2, "combiner": "mean"}, "tags": {"dim": 2, "combiner": "sum"}}
        )

    def forward(self, user: Tensor, words: Tensor, tags: Tensor, starts: Tensor) -> Tensor:
        return torch.cat(list(self.fields({"user": user, "words": words, "tags": (tags, starts)}).values()), 1)


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_a_program_of_a_collection_takes_batches_of_any_size(tmp_path: Path, batch: int) -> None:
    def given(n: int) -> tuple[Tensor, ...]:
        return torch.arange(n), torch.zeros(n, 4, dtype=torch.int64), torch.arange(2 * n), 2 * torch.arange(n)

    export(Collected(), given(3), tmp_path)
    body = json.loads(json.loads((tmp_path / "export.json").read_text())["export"])
    dense = torch.export.load(tmp_path / body["dense"]).module()
    rows = tuple(torch.full((batch, 2), float(place)) for place in range(len(body["lookups"])))
    assert dense(rows, *given(batch)).tolist() == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * batch
    asked = torch.export.load(tmp_path / body["ids"]).module()(*given(batch))
    assert [len(ids) for ids, *_ in asked] == [batch, batch, 2 * batch]


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = fleet.SparseEmbedding(4, combiner="sum")
        self.words = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(8, 3)

    def forward(self, ids: Tensor, words: Tensor) -> Tensor:
        found: Tensor = self.out(torch.cat([self.ids(ids), self.words(words)], 1))
        return found


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = Tower()
        self.item = Tower()

    def forward(self, ids: Tensor, words: Tensor) -> Tensor:
        found: Tensor = (self.user(ids, words) * self.item(ids, words)).sum(1)
        return found


def test_each_tower_of_a_trained_model_is_exported_alone(tmp_path: Path) -> None:
    """Its modules have no names, so the names of the tables are those that the whole model gave them."""
    example = torch.tensor([[7, 8], [8, 9]]), torch.tensor([3, 4])

    def work(own: Fleet, rank: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = Towers()
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.5), strategy_of("sync", 1))
        model = own.distributed_model(net)
        own.init_worker()
        for _ in range(3):
            model(*example).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        own.save_persistables(str(tmp_path / "rows"))
        for side in ("user", "item"):
            export(getattr(net, side), example, tmp_path / side)
        with torch.no_grad():
            found = {side: getattr(net, side)(*example) for side in ("user", "item")}
        own.stop_worker()
        return found

    (wanted,) = run_job(work, strategy=strategy_of("sync", 1))
    with Reader(tmp_path / "rows") as reader:
        assert sorted(reader.tables) == ["item.ids", "item.words", "user.ids", "user.words"]
        for side, expected in wanted.items():
            predictor = Predictor(tmp_path / side, reader)
            assert [(lookup.module, lookup.table) for lookup in predictor.lookups] == [
                ("ids", f"{side}.ids"),
                ("words", f"{side}.words"),
            ]
            assert torch.equal(predictor(*example), expected)
    assert not torch.equal(wanted["user"], wanted["item"])


@pytest.mark.parametrize(
    "model",
    [
        Counted(),
        Sizes(lambda ids, rows: rows + torch.ones(len(ids))[:, None]),
        Sizes(lambda ids, rows: rows.sum(1) * torch.arange(len(rows))),
        Sizes(lambda ids, rows: rows / int(ids.shape[0])),
        Sizes(lambda ids, rows: _views(rows)[:, [1, 2]].flatten(1)),
        Sizes(lambda ids, rows: _views(rows)[:, 1:3].flatten(1)),
        Sizes(lambda ids, rows: rows + torch.rand(ids.shape[0], 1) * 0),
    ],
)
def test_programs_that_compute_with_the_number_of_samples(tmp_path: Path, model: nn.Module) -> None:
    export(model, (torch.tensor([7, 8, 9]),), tmp_path)
    dense = torch.export.load(next(tmp_path.glob("dense-*"))).module()
    asked = torch.export.load(next(tmp_path.glob("ids-*"))).module()
    for samples in (1, 2, 3, 40):
        ids, rows = torch.arange(samples), torch.randn(samples, 4)
        wanted = model.form(ids, rows) if isinstance(model, Sizes) else rows
        assert torch.equal(dense((rows,), ids), wanted), samples
        assert torch.equal(asked(ids)[0][0], ids)


_ALONE = "the model takes batches of the example's size alone"
_FIXES = "The example's size is fixed in the rows of rows .* It is fixed by .*test_export.py, line "


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (lambda ids, rows: torch.stack([rows[i].sum() for i in range(len(rows))]),
         r"takes 6 samples, its program does not: Guard failed: \(rows of rows\)" rf".*{_FIXES}.*range\(len\(rows\)\)"),
        (lambda ids, rows: rows.sum(1) + torch.arange(3), rf"{_ALONE}. {_FIXES}.*arange"),
        (lambda ids, rows: rows.reshape(3, 4), _ALONE),
        (lambda ids, rows: rows if len(ids) > 2 else -rows,
         r"takes 1 sample, its program does not: Guard failed: example_inputs\[0\].* branch over their number"),
        (lambda ids, rows: rows if len(ids) != 1 else -rows,
         r"takes 1 sample, its program does not: it gives other values"),
    ],
)  # fmt: skip
def test_programs_of_one_size_are_refused(
    tmp_path: Path, form: Callable[[Tensor, Tensor], Tensor], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=text):
        export(Sizes(form), (torch.tensor([7, 8, 9]),), tmp_path / "export")
    assert not (tmp_path / "export").exists()
    assert capfd.readouterr().err == ""


class Owned(nn.Module):
    """Flat ids with offsets that no lookup takes, and constants: a loop over their number fixes it, not the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.SparseEmbedding(4, name="rows")

    def forward(self, batch: dict[str, Tensor], constants: Tensor) -> Tensor:
        flat, offsets = batch["flat"], batch["offsets"]
        owner = torch.bucketize(torch.arange(flat.shape[0]), offsets, right=True) - 1
        found = torch.zeros(offsets.shape[0], 4).index_add(0, owner, self.rows(flat))
        for place in range(len(constants)):
            found = found * constants[place]
        return found + batch["dense"][:, None]


@pytest.mark.parametrize("constants", [2, 5])
def test_sizes_that_are_not_the_batchs(tmp_path: Path, constants: int) -> None:
    given = {"flat": torch.arange(7).flip(0), "offsets": torch.tensor([0, 4, 4]), "dense": torch.zeros(3)}
    with pytest.raises(ConfigError, match=r"fixed in example_inputs\[1\] .*give another number of samples"):
        export(Owned(), (given, torch.ones(3)), tmp_path)
    export(Owned(), (given, torch.ones(constants)), tmp_path)
    dense = torch.export.load(next(tmp_path.glob("dense-*"))).module()
    given = {"flat": torch.arange(3), "offsets": torch.tensor([0, 0]), "dense": torch.ones(2)}
    assert dense((torch.ones(3, 4),), given, torch.ones(constants)).tolist() == [[1.0] * 4, [4.0] * 4]


def test_two_exports_leave_the_newer_and_the_older_program(tmp_path: Path) -> None:
    model = fleet.SparseEmbedding(4, name="ads")
    for _ in range(3):
        export(model, (IDS,), tmp_path)
    assert len(list(tmp_path.glob("*.pt2"))) == 4


@pytest.mark.parametrize(
    ("model", "example", "text"),
    [
        (nn.Linear(2, 1), (torch.ones(2, 2),), "no rows to serve"),
        ("model", (IDS,), "takes a torch.nn.Module"),
        (fleet.SparseEmbedding(4), IDS, "takes a tuple"),
        (fleet.SparseEmbedding(4), (), "takes a tuple"),
        (fleet.SparseEmbedding(4), ([1, 2],), "an example input is 1; a program takes tensors"),
        (fleet.SparseEmbedding(4), (IDS[:1],), "give 2 samples or more"),
        (Chained(), (IDS,), "depend on the rows of another"),
        (Lists(), (IDS,), "rows is called with a list; a program takes tensors"),
        (Branches(), (IDS,), "torch.export cannot trace the model"),
    ],
)
def test_what_cannot_be_exported(tmp_path: Path, model: nn.Module, example: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        export(model, example, tmp_path / "export")  # type: ignore[arg-type]
    assert not (tmp_path / "export" / "export.json").exists()
