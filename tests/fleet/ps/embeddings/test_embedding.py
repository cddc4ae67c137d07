"""SparseEmbedding on its own: forms of ids, combiners, padding, slots, against plain torch (D.2, D.6)."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fleet
from fleet.errors import CheckpointError, ConfigError, NotInitializedError, OptionWarning
from fleet.ps.embeddings.bags import bags_of
from fleet.ps.embeddings.lookup import LocalRows
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.rules import Rule
from tests.fleet.ps.embeddings.features import Keyed

WIDE = Initializer("uniform", -1.0, 1.0)
BIG = 10**15


class Trained(LocalRows):
    """Local rows whose gradients are wanted."""

    trains = True
    asked = 0


def make(**settings) -> fleet.SparseEmbedding:
    embedding = fleet.SparseEmbedding(3, "ads", initializer=WIDE, **settings)
    embedding.lookup.source = Trained(embedding.table_config(Rule("sgd")))
    return embedding


def rows(embedding: fleet.SparseEmbedding, *ids: int) -> torch.Tensor:
    return torch.from_numpy(embedding.lookup.source.rows(np.array(ids, np.int64)))


def test_each_id_has_a_row_and_repeated_ids_share_its_gradient() -> None:
    embedding = make()
    found = embedding(torch.tensor([[7, BIG], [7, -3]]))
    assert torch.equal(found[0, 0], found[1, 0])
    assert torch.equal(found.detach()[:, 1], rows(embedding, BIG, -3))
    (found * torch.tensor([[[1.0], [2.0]], [[10.0], [3.0]]])).sum().backward()
    gradient = embedding.lookup.take()
    assert dict(zip(gradient.ids.tolist(), gradient.rows[:, 0].tolist(), strict=True)) == {7: 11.0, BIG: 2.0, -3: 3.0}
    assert embedding.lookup.take() is None


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_combiners_equal_embedding_bag_in_every_form_of_ids(combiner) -> None:
    embedding = make(combiner=combiner)
    weight = rows(embedding, *range(6))
    flat, offsets = torch.tensor([1, 2, 2, 5, 0]), torch.tensor([0, 3, 3])
    expected = F.embedding_bag(flat, weight, offsets, mode=combiner)
    torch.testing.assert_close(embedding(flat, offsets), expected)
    torch.testing.assert_close(embedding([[1, 2, 2], [], torch.tensor([5, 0])]), expected)
    square = torch.tensor([[1, 2], [3, 3]])
    torch.testing.assert_close(embedding(square), F.embedding_bag(square, weight, mode=combiner))
    assert embedding([[], []]).tolist() == [[0.0] * 3] * 2
    assert embedding(torch.empty(2, 0, dtype=torch.int64)).tolist() == [[0.0] * 3] * 2


def test_padding_reads_as_zeros_counts_for_nothing_and_is_not_trained() -> None:
    plain, mean = make(padding_idx=0), make(padding_idx=0, combiner="mean")
    found = plain(torch.tensor([[0, 4], [4, 0]]))
    assert found[0, 0].tolist() == [0.0] * 3
    assert torch.equal(found[1, 0], rows(plain, 4)[0])
    found.sum().backward()
    assert plain.lookup.take().ids.tolist() == [4]
    torch.testing.assert_close(mean(torch.tensor([[4, 0], [0, 0]])), torch.stack([rows(mean, 4)[0], torch.zeros(3)]))
    assert not mean([[0], [0]]).any()


def test_slots_share_the_table_or_have_rows_of_their_own() -> None:
    ids = torch.tensor([[5, 5], [6, 5]])
    shared, apart = make(num_slots=2), make(num_slots=2, separate_slots=True)
    assert torch.equal(shared(ids)[0, 0], shared(ids)[0, 1])
    found = apart(ids)
    assert not torch.equal(found[0, 0], found[0, 1])
    assert torch.equal(found[0, 1], found[1, 1])
    both = make(num_slots=2, separate_slots=True, combiner="sum")
    assert torch.equal(both([[5], [5], [6], [5]]), found)
    assert torch.equal(both(ids[:, :, None]), found)


def test_bags_of_every_form() -> None:
    bags = bags_of([[1, 2], [], [3], [4]], None, "sum", 2)
    assert (bags.ids.tolist(), bags.offsets.tolist(), bags.shape) == ([1, 2, 3, 4], [0, 2, 2, 3], (2, 2))
    assert bags.spread(torch.tensor([5, 7]), 2).tolist() == [5, 5, 7, 7]
    with pytest.raises(ConfigError, match="3 lists"):
        bags_of([[1], [2], [3]], None, "sum", 2)


def test_a_forward_without_backward_keeps_nothing() -> None:
    embedding = make()
    embedding(torch.tensor([1])).sum()
    with torch.no_grad():
        embedding(torch.tensor([1]))
    assert not embedding.lookup.has_gradients()
    assert embedding.lookup.take() is None
    embedding(torch.tensor([1])).sum().backward()
    embedding(torch.tensor([1, 2])).sum().backward()  # a second micro-batch
    assert embedding.lookup.has_gradients()
    gradient = embedding.lookup.take()
    assert gradient.rows[:, 0].tolist() == [2.0, 1.0]
    embedding(torch.tensor([1])).sum().backward()
    embedding.lookup.drop()
    assert embedding.lookup.take() is None


def test_shows_and_clicks_are_added_up_by_id() -> None:
    """D.6: ShowClickEntry names what each sample counts for; without it an appearance is one show."""
    embedding = make(entry=fleet.ShowClickEntry("show", "click"), combiner="sum", slot=4)
    with pytest.raises(ConfigError, match="show= and click="):
        embedding([[1]])
    embedding([[1, 2], [1]], show=torch.tensor([3, 5]), click=torch.tensor([1, 0])).sum().backward()
    gradient = embedding.lookup.take()
    assert gradient.ids.tolist() == [1, 2]
    assert gradient.shows.tolist() == [8, 3]
    assert gradient.clicks.tolist() == [1, 1]
    assert gradient.slots.tolist() == [4, 4]
    counted = make(accessor=fleet.ps.Accessor())
    counted(torch.tensor([1, 1, 2])).sum().backward()
    assert counted.lookup.take().shows.tolist() == [2, 1]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0, 1e39])
@pytest.mark.parametrize("name", ["show", "click"])
def test_shows_and_clicks_that_no_row_can_add_up_are_refused(name: str, wrong: float) -> None:
    """A NaN made the score NaN for good, and no shrink or save by score saw the row again."""
    embedding = make(accessor=fleet.ps.Accessor())
    values = torch.tensor([1.0, wrong], dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"show and click have .*; they take finite numbers of 0 or more"):
        embedding(torch.tensor([1, 2]), **{name: values})
    assert embedding.lookup.take() is None


def test_integers_of_numpy_are_integers() -> None:
    embedding = fleet.SparseEmbedding(np.int64(3), num_slots=np.int32(2))
    assert (type(embedding.dim), type(embedding.num_slots)) == (int, int)
    assert type(embedding.table_config(Rule("sgd")).dim) is int  # messages and files take no other
    assert embedding(torch.tensor([[1, 2]])).shape == (1, 2, 3)
    for wrong in (np.float64(3), np.bool_(True), np.int64(0)):
        with pytest.raises(ConfigError, match="takes an integer"):
            fleet.SparseEmbedding(wrong)


def test_separate_slots_of_one_slot_warn() -> None:
    with pytest.warns(OptionWarning, match="changes nothing with num_slots=1") as found:
        fleet.SparseEmbedding(2, separate_slots=True)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fleet.SparseEmbedding(2, num_slots=2, separate_slots=True)


def test_wrong_arguments_and_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="combiner"):
        fleet.SparseEmbedding(3, combiner="max")
    with pytest.raises(ConfigError, match="1 or more"):
        fleet.SparseEmbedding(3, num_slots=0)
    with pytest.raises(ConfigError, match="integer"):
        fleet.SparseEmbedding(0)
    for size in (([100, 8],), ((100, 8),), (100, 8)):
        with pytest.raises(ConfigError, match=r"Leave the number of rows out: fleet.SparseEmbedding\(8\)"):
            fleet.SparseEmbedding(*size)
    with pytest.raises(ConfigError, match="integers"):
        make()(torch.tensor([1.0]))
    with pytest.raises(ConfigError, match="combiner is 'none'"):
        make()(torch.tensor([1]), torch.tensor([0]))
    with pytest.raises(ConfigError, match="start with 0"):
        make(combiner="sum")(torch.tensor([1, 2]), torch.tensor([1]))
    with pytest.raises(ConfigError, match="batch, length"):
        make(combiner="sum")(torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match="show= or click="):
        make()(torch.tensor([1]), show=torch.tensor([1]))


def test_training_before_the_servers_are_known_is_refused() -> None:
    """003-33: a step that nobody would apply raises and does not pass in silence."""
    embedding = fleet.SparseEmbedding(3)
    found = embedding(torch.tensor([1]))
    with pytest.raises(NotInitializedError, match="init_worker"):
        found.sum().backward()


def test_a_damaged_save_leaves_the_rows_of_prediction(tmp_path) -> None:
    table = fleet.ps.SparseTable(fleet.ps.SparseTableConfig("ads", 3, Rule("sgd"), initializer=WIDE))
    ids = np.arange(1000)
    table.pull(ids)
    table.push(ids, np.ones((1000, 3), np.float32))
    kept = torch.from_numpy(table.pull(ids))
    path = fleet.ps.save_table(table, tmp_path).path
    embedding = fleet.SparseEmbedding(3, "ads")
    assert embedding.load(tmp_path) == 1000
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name):
        embedding.load(tmp_path)
    assert torch.equal(embedding.lookup_rows(torch.from_numpy(ids)), kept)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3), ()])
def test_looked_up_rows_have_the_shape_of_the_ids(shape: tuple[int, ...]) -> None:
    rows = fleet.SparseEmbedding(4).lookup_rows(torch.zeros(shape, dtype=torch.int64))
    assert rows.shape == (*shape, 4)


def test_unsigned_ids_are_those_of_the_same_bits() -> None:
    bags, rows = fleet.SparseEmbedding(3, combiner="sum"), fleet.SparseEmbedding(3)
    signed = torch.tensor([[-(1 << 63), 1]])
    assert torch.equal(bags([[1 << 63, 1], [5]])[0], bags(signed)[0])
    assert torch.equal(bags([[(1 << 64) - 1, -2]]), bags(torch.tensor([[-1, -2]])))
    unsigned = torch.from_numpy(np.array([1 << 63, 1], np.uint64))
    assert torch.equal(rows(unsigned), rows(signed[0]))
    for wrong in (1 << 64, -(1 << 63) - 1, "a"):
        with pytest.raises(ConfigError, match="is not a list of ids"):
            bags([[wrong]])


def nested(layout: torch.layout = torch.jagged) -> torch.Tensor:
    bags = [torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3])]
    return torch.nested.nested_tensor(bags, layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_jagged_ids_are_the_bags_of_a_combiner(combiner: str, layout: torch.layout) -> None:
    embedding = make(combiner=combiner)
    assert torch.equal(embedding(nested(layout)), embedding([[1, 2], [], [3]]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("combiner", "given", "message"),
    [
        ("none", lambda: (nested(),), "jagged.*combiner.*padded"),
        ("sum", lambda: (nested(), torch.tensor([0])), "offsets.*beside jagged"),
        ("none", lambda: (torch.eye(2, dtype=torch.int64).to_sparse(),), "torch.sparse_coo.*strided"),
        ("sum", lambda: (torch.eye(2, dtype=torch.int64).to_sparse(),), "torch.sparse_coo.*strided"),
        ("none", lambda: (torch.empty(2, dtype=torch.int64, device="meta"),), "meta.*no values"),
        ("sum", lambda: (Keyed({"user": [[1]], "item": [[2]]}),), "Keyed.*SparseEmbeddings"),
    ],
)
def test_ids_that_have_no_rows_of_their_own_are_refused(combiner: str, given, message: str) -> None:
    embedding = make(combiner=combiner)
    for call in (embedding, embedding.prefetch):
        with pytest.raises(ConfigError, match=message):
            call(*given())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_have_the_dtype_of_the_module(dtype: torch.dtype) -> None:
    embedding = make(combiner="sum").to(dtype)
    found = embedding([[1, 2], [3]])
    assert found.dtype is dtype
    assert torch.equal(found, make(combiner="sum")([[1, 2], [3]]).to(dtype))
    found.sum().backward()
    assert embedding.lookup.take().rows.dtype == np.float32
    assert embedding.float()([[1]]).dtype is torch.float32
    fields = fleet.SparseEmbeddings({"user": 4}).to(dtype)
    assert fields({"user": torch.tensor([1])})["user"].dtype is dtype
