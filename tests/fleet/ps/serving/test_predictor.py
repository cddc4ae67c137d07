from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fleet import fleet
from fleet.errors import CheckpointError, ConfigError
from fleet.ps import Predictor, Reader, SparseTable, SparseTableConfig, export, release, roll_back, save_table
from fleet.ps.publishing.folder_sink import FolderSink
from fleet.ps.publishing.versions import Mark
from fleet.ps.serving import predictor as predictor_module
from tests.fleet.ps.serving.deltas import DIM, Chain
from tests.fleet.ps.serving.models import EveryForm, inputs, save_rows

NONE = np.empty(0, np.int64)


def test_predicts_what_the_model_predicts(tmp_path: Path) -> None:
    model = EveryForm()
    save_rows(model, tmp_path)
    export(model, inputs(4), tmp_path)
    predictor = Predictor(tmp_path)
    model.eval()
    for samples in (1, 2, 3, 20, 0):
        batch = inputs(samples, seed=3)
        with torch.no_grad():
            assert torch.equal(predictor(*batch), model(*batch)), samples
    assert [lookup.table for lookup in predictor.lookups] == ["bags", "plain", "shared"]
    assert not predictor.refresh()
    with torch.no_grad():
        model.net[2].bias += 1
        wanted = model(*batch)
    export(model, inputs(4), tmp_path)
    assert predictor.refresh()
    assert torch.equal(predictor(*batch), wanted)


def test_a_program_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fleet.SparseEmbedding(DIM, name="ads")
    save_table(SparseTable(SparseTableConfig("ads", DIM)), tmp_path)
    export(model, (torch.tensor([1, 2]),), tmp_path)
    texts = [(tmp_path / "export.json").read_bytes()]
    for _ in range(2):
        export(model, (torch.tensor([1, 2]),), tmp_path)
    read = predictor_module._text
    monkeypatch.setattr(predictor_module, "_text", lambda folder: texts.pop() if texts else read(folder))
    assert Predictor(tmp_path)(torch.tensor([1])).shape == (1, DIM)


def test_several_threads_read_programs(tmp_path: Path) -> None:
    """Two towers of one service, of which a brake asks for both versions at once."""
    model = fleet.SparseEmbedding(DIM, name="ads")
    save_table(SparseTable(SparseTableConfig("ads", DIM)), tmp_path)
    export(model, (torch.tensor([1, 2]),), tmp_path)
    with ThreadPoolExecutor(4) as threads:
        predictors = list(threads.map(lambda _: Predictor(tmp_path), range(12)))
    assert all(predictor(torch.tensor([1])).shape == (1, DIM) for predictor in predictors)


def test_rows_that_change_change_the_prediction(tmp_path: Path) -> None:
    chain = Chain(FolderSink(tmp_path / "rows", "shop", "float32"))
    chain.put(0, np.array([1, 2]), np.ones((2, DIM), np.float32), NONE, whole=True)
    model = nn.Sequential(fleet.SparseEmbedding(DIM, name="ads", combiner="sum"), nn.Linear(DIM, 1, bias=False))
    nn.init.ones_(model[1].weight)
    export(model, (torch.tensor([[1, 2], [2, 1]]),), tmp_path / "export")
    predictor = Predictor(tmp_path / "export", Reader(tmp_path / "rows"))
    ids = torch.tensor([[1, 2]])
    assert predictor(ids).item() == 2 * DIM
    chain.put(0, np.array([2]), np.full((1, DIM), 5, np.float32), NONE)
    assert predictor(ids).item() == 2 * DIM
    predictor.reader.refresh()
    assert predictor(ids).item() == 6 * DIM


def _versioned(tmp_path: Path, with_program: bool) -> tuple[Chain, torch.Tensor]:
    """Rows of ones with a program that adds them up, marked; then rows of fives with a program that counts tenfold."""
    sink = FolderSink(tmp_path / "rows", "shop", "float32")
    chain = Chain(sink)
    model = nn.Sequential(fleet.SparseEmbedding(DIM, name="ads", combiner="sum"), nn.Linear(DIM, 1, bias=False))
    example = torch.tensor([[1, 2], [2, 1]])
    for number, (row, weight) in enumerate([(1.0, 1.0), (5.0, 10.0)]):
        chain.put(0, np.array([1, 2]), np.full((2, DIM), row, np.float32), NONE, whole=not number)
        nn.init.constant_(model[1].weight, weight)
        export(model, (example,), tmp_path / "export")
        if not number:
            sink.mark(0, Mark("monday", "key", 5, model=str(tmp_path / "export") if with_program else None))
    return chain, torch.tensor([[1, 2]])


def test_a_brake_takes_the_program_back_with_the_rows(tmp_path: Path) -> None:
    _, ids = _versioned(tmp_path, with_program=True)
    old, new = 2.0 * DIM, 100.0 * DIM
    predictor = Predictor(tmp_path / "export", Reader(tmp_path / "rows"))
    assert predictor(ids).item() == new
    roll_back(tmp_path / "rows", "monday")
    predictor.reader.refresh()
    assert predictor(ids).item() == old
    assert not predictor.refresh()  # nor does a newer export change it
    assert predictor(ids).item() == old
    release(tmp_path / "rows")
    predictor.reader.refresh()
    assert predictor(ids).item() == new
    assert Predictor(tmp_path / "export", Reader(tmp_path / "rows", version="monday"))(ids).item() == old


def test_no_prediction_mixes_two_states_of_a_brake(tmp_path: Path) -> None:
    _, ids = _versioned(tmp_path, with_program=True)
    predictor = Predictor(tmp_path / "export", Reader(tmp_path / "rows"))
    looked_up = predictor.reader.lookup_bags
    turns = [lambda: roll_back(tmp_path / "rows", "monday"), lambda: release(tmp_path / "rows")]

    def turning(*arguments, **options):
        rows = looked_up(*arguments, **options)
        if turns:  # between the lookup and the program
            turns.pop(0)()
            predictor.reader.refresh()
        return rows

    predictor.reader.lookup_bags = turning
    assert predictor(ids).item() == 100.0 * DIM
    assert not turns


def test_a_version_has_the_program_of_each_tower(tmp_path: Path) -> None:
    """The recommenders' service: two programs over one reader, of which each goes back to its own."""
    sink = FolderSink(tmp_path / "rows", "shop", "float32")
    chain = Chain(sink)
    chain.put(0, np.array([1, 2]), np.ones((2, DIM), np.float32), NONE, whole=True)
    ids = torch.tensor([[1, 2], [2, 1]])
    towers = {name: nn.Sequential(fleet.SparseEmbedding(DIM, name="ads", combiner="sum"), nn.Linear(DIM, 1, bias=False))
              for name in ("user", "item")}  # fmt: skip

    def write(factor: float) -> None:
        for name, weight in (("user", 1.0), ("item", -3.0)):
            nn.init.constant_(towers[name][1].weight, factor * weight)
            export(towers[name], (ids,), tmp_path / "towers" / name)

    write(1.0)
    sink.mark(0, Mark("monday", "key", 5, model=str(tmp_path / "towers")))
    write(10.0)
    reader = Reader(tmp_path / "rows")
    predictors = [Predictor(tmp_path / "towers" / name, reader) for name in ("user", "item")]

    def found() -> list[float]:
        reader.refresh()
        return [predictor(ids)[0].item() / (2 * DIM) for predictor in predictors]

    assert found() == [10.0, -30.0]
    roll_back(tmp_path / "rows", "monday")
    assert found() == [1.0, -3.0]
    write(20.0)  # while the brake is on
    release(tmp_path / "rows")
    assert found() == [20.0, -60.0]  # and not the programs that were there when it was pulled


def test_a_brake_finds_the_programs_of_the_newest_versions_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = FolderSink(tmp_path / "rows", "shop", "float32")
    chain = Chain(sink)
    model = nn.Sequential(fleet.SparseEmbedding(DIM, name="ads", combiner="sum"), nn.Linear(DIM, 1, bias=False))
    ids = torch.tensor([[1, 2], [2, 1]])
    read: list[Path] = []
    newest = predictor_module._newest
    monkeypatch.setattr(predictor_module, "_newest", lambda folder: read.append(folder) or newest(folder))
    predictor = None
    for number, name in enumerate(("monday", "tuesday"), 1):
        chain.put(0, np.array([1, 2]), np.full((2, DIM), number, np.float32), NONE, whole=number == 1)
        nn.init.constant_(model[1].weight, number)
        export(model, (ids,), tmp_path / "export")
        sink.mark(0, Mark(name, name, 5, model=str(tmp_path / "export")))
        if predictor is None:
            predictor = Predictor(tmp_path / "export", Reader(tmp_path / "rows"))
        predictor.refresh()
    assert read == [tmp_path / "export"] * 2  # a version's program that is the folder's is not read again
    roll_back(tmp_path / "rows", "monday")
    predictor.reader.refresh()
    assert predictor(ids)[0].item() == 2 * DIM
    assert len(read) == 2


def test_a_version_without_a_program_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, ids = _versioned(tmp_path, with_program=False)
    predictor = Predictor(tmp_path / "export", Reader(tmp_path / "rows", version="monday"))
    for _ in range(2):
        assert predictor(ids).item() == 20.0 * DIM
    assert caplog.text.count("version 'monday' was marked without a program (model=)") == 1


def test_ids_outside_an_embedding(tmp_path: Path) -> None:
    export(nn.Embedding(5, DIM, sparse=True), (torch.tensor([1, 2]),), tmp_path)
    table = SparseTable(SparseTableConfig("embedding", DIM))
    save_table(table, tmp_path)
    with pytest.raises(ConfigError, match="embedding has 5 rows; ids range from 1 to 5"):
        Predictor(tmp_path)(torch.tensor([1, 5]))


def test_folders_that_hold_no_program(tmp_path: Path) -> None:
    table = SparseTable(SparseTableConfig("ads", DIM))
    table.add(np.array([1]), np.ones((1, DIM), np.float32))
    save_table(table, tmp_path)
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="no exported program here"):
            Predictor(folder)
    export(fleet.SparseEmbedding(DIM, name="ads"), (torch.tensor([1, 2]),), tmp_path / "program")
    with pytest.raises(ConfigError, match="no tables beside the program.*Give it the rows, as in Predictor.*follow"):
        Predictor(tmp_path / "program")
    export(fleet.SparseEmbedding(DIM + 1, name="ads"), (torch.tensor([1, 2]),), tmp_path)
    with pytest.raises(ConfigError, match=r"takes 4 columns of table 'ads'; the reader's rows have 3"):
        Predictor(tmp_path)
    good = json.loads((tmp_path / "export.json").read_text())
    for wrong in (b"{", b"[]", json.dumps({**good, "crc32": 1}).encode(), json.dumps({**good, "format": 2}).encode()):
        (tmp_path / "export.json").write_bytes(wrong)
        with pytest.raises(CheckpointError, match="not what fleet.ps.export wrote"):
            Predictor(tmp_path)
    (tmp_path / "export.json").write_text(json.dumps(good))
    next(tmp_path.glob("dense-*")).write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="torch cannot read this program"):
        Predictor(tmp_path)
    next(tmp_path.glob("dense-*")).unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        Predictor(tmp_path)


def test_a_newer_program_of_another_model_is_not_taken(tmp_path: Path) -> None:
    """The older one stays, as it does when the newer one is damaged."""
    table = SparseTable(SparseTableConfig("ads", DIM))
    table.add(np.array([1]), np.ones((1, DIM), np.float32))
    save_table(table, tmp_path)
    ids = torch.tensor([1, 2])
    export(fleet.SparseEmbedding(DIM, name="ads"), (ids,), tmp_path)
    predictor = Predictor(tmp_path)
    wanted = predictor(ids)
    export(fleet.SparseEmbedding(DIM + 1, name="ads"), (ids,), tmp_path)
    with pytest.raises(ConfigError, match="different models"):
        predictor.refresh()
    assert torch.equal(predictor(ids), wanted)
    export(fleet.SparseEmbedding(DIM, name="ads"), (ids,), tmp_path)
    predictor.refresh()
    assert torch.equal(predictor(ids), wanted)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda ids, dense: (ids.numpy(), dense.numpy()), "these inputs: ndarray, ndarray. It was exported for"),
        (lambda ids, dense: (ids.tolist(), dense), "these inputs: list, float32"),
        (lambda ids, dense: (ids,), r"int64 \[3, 2\]\. It was exported for int64 \[a, b\], float32 \[a, 4\]"),
        (lambda ids, dense: (ids, dense, dense), "these inputs"),
        (lambda ids, dense: (ids, dense[:1]), r"these inputs: int64 \[3, 2\], float32 \[1, 4\]"),
        (lambda ids, dense: (ids, dense.double()), "float64"),
        (lambda ids, dense: (ids, dense[:, :3]), r"float32 \[3, 3\]"),
    ],
)  # fmt: skip
def test_inputs_that_the_program_cannot_take(tmp_path: Path, wrong, text: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ads = fleet.SparseEmbedding(DIM, name="ads", combiner="sum")
            self.out = nn.Linear(DIM + 4, 1)

        def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
            return self.out(torch.cat([self.ads(ids), dense], 1))

    ids, dense = torch.tensor([[1, 2], [2, 1], [1, 1]]), torch.randn(3, 4)
    save_table(SparseTable(SparseTableConfig("ads", DIM)), tmp_path)
    export(Two(), (ids, dense), tmp_path)
    predictor = Predictor(tmp_path)
    assert predictor(ids, dense).shape == (3, 1)
    with pytest.raises(ConfigError, match=text):
        predictor(*wrong(ids, dense))


@pytest.mark.parametrize("wrong", [{"ids": 0}, {"ids": 0, "dense": 1, "more": 1}, {"id": 0, "dense": 1}, [0, 1]])
def test_the_keys_of_inputs_in_a_dict_are_named(tmp_path: Path, wrong) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ads = fleet.SparseEmbedding(DIM, name="ads", combiner="sum")

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.ads(batch["ids"]).sum(1) + batch["dense"]

    tensors = torch.tensor([[1, 2], [2, 1]]), torch.randn(2)
    save_table(SparseTable(SparseTableConfig("ads", DIM)), tmp_path)
    export(Named(), ({"ids": tensors[0], "dense": tensors[1]},), tmp_path)
    predictor = Predictor(tmp_path)
    assert predictor({"ids": tensors[0], "dense": tensors[1]}).shape == (2,)
    given = {k: tensors[n] for k, n in wrong.items()} if isinstance(wrong, dict) else [tensors[n] for n in wrong]
    own = "".join(f"'{key}': .*" for key in wrong) if isinstance(wrong, dict) else r"list of \(int64.*"
    with pytest.raises(
        ConfigError, match=rf"inputs: {{?{own}exported for {{'ids': int64 \[a, b\], 'dense': float32.*types\.$"
    ):
        predictor(given)


def test_a_reader_is_no_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Predictor\(reader='rows'\) takes a fleet.ps.Reader"):
        Predictor(tmp_path, "rows")  # type: ignore[arg-type]
