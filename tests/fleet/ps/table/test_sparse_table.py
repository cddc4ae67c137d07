"""Rows: when they come, what they start with, what keeps them out, when they go (D.4, D.6, D.8)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fleet.errors import ConfigError, PSError, UnsupportedOptionError
from fleet.ps import (
    Accessor,
    CountFilterEntry,
    Initializer,
    ProbabilityEntry,
    Rule,
    ShowClickEntry,
    SparseTable,
    SparseTableConfig,
    documented_accessor,
    servers_of_keys,
)
from fleet.ps.table.entry import entry_from_attr
from tests.fleet.ps._tables import rows_of
from tests.fleet.ps.reference_store import table_of

SGD = Rule("sgd", {"learning_rate": 1.0})
ONE = np.array([1])


@pytest.fixture(params=[True, False], ids=["kernels", "twins"])
def use_kernels(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def _table(use_kernels: bool, dim: int = 4, **settings: object) -> SparseTable:
    settings = {"rule": SGD, "initializer": Initializer("constant", 0.5), **settings}
    return table_of(SparseTableConfig("t", dim, **settings), use_kernels)  # type: ignore[arg-type]


def _ones(table: SparseTable, n: int = 1) -> np.ndarray:
    return np.ones((n, table.layout.num_weights), np.float32)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize(
    "accessor", [None, Accessor(zero_init=False), Accessor("UnitAccessor", embedx_threshold=5, zero_init=False)]
)
def test_a_pull_shows_what_the_first_push_begins_with_and_makes_no_row(
    use_kernels: bool, kind: str, accessor: Accessor | None
) -> None:
    """Decision 8: the model trains on the weights it pulled."""
    table = _table(use_kernels, dim=6, initializer=Initializer(kind, -1.0, 1.0), accessor=accessor)
    keys = np.array([3, -7, 3, 2**62])
    pulled = table.pull(keys)
    assert pulled[:, -table.layout.num_weights :].any()
    assert (table.num_rows, table.contains(keys).any(), len(rows_of(table))) == (0, False, 0)
    assert table.pull_counts == (4, 0)
    table.push(np.unique(keys), 0 * _ones(table, 3), np.zeros(3, np.float32))
    np.testing.assert_array_equal(table.pull(keys), pulled)
    assert table.num_rows == 3


def test_pull_without_create_leaves_no_trace(use_kernels: bool) -> None:
    """D.4: a missing row reads as zeros."""
    table = _table(use_kernels)
    assert table.pull(ONE, create=False).tolist() == [[0.0] * 4]
    assert table.num_rows == 0


def test_create_on_push(use_kernels: bool) -> None:
    """D.4: Paddle's order: zeros until the first push, which updates embed only; embedx is created after it."""
    table = _table(use_kernels, accessor=Accessor(), create_on="push")
    assert table.pull(ONE).tolist() == [[0.0] * 4]
    assert table.num_rows == 0
    table.push(ONE, _ones(table))
    assert table.pull(ONE).tolist() == [[-1.0, 0.5, 0.5, 0.5]]
    table.push(ONE, _ones(table))
    assert table.pull(ONE).tolist() == [[-2.0, -0.5, -0.5, -0.5]]


def test_embedx_waits_for_the_score(use_kernels: bool) -> None:
    """D.4: the embedx part exists from embedx_threshold on; update first, then extend; score weighs clicks."""
    table = _table(use_kernels, accessor=Accessor(embedx_threshold=1.3))
    for expected in ([-1, 0, 0, 0], [-2, 0.5, 0.5, 0.5], [-3, -0.5, -0.5, -0.5]):
        table.pull(ONE)
        # score of one push: (3 - 1) * 0.1 + 1 = 1.2
        table.push(ONE, _ones(table), np.array([3.0], np.float32), np.array([1.0], np.float32))
        assert table.pull(ONE).tolist() == [expected]


def test_counters_are_pulled_by_ctr_accessors(use_kernels: bool) -> None:
    """D.4: show and click come first; they are 64-bit inside, so that they go on counting beyond 2**24."""
    table = _table(use_kernels, dim=5, accessor=Accessor("CtrDoubleAccessor"))
    table.push(ONE, _ones(table), np.array([2.0**25], np.float32), np.array([1.0], np.float32))
    table.push(ONE, _ones(table), np.array([1.0], np.float32), np.array([0.0], np.float32))
    assert table.pull(ONE)[0, :2].tolist() == [2.0**25, 1.0]
    assert rows_of(table)[1][5][0] == 2.0**25 + 1


def test_unit_accessor_does_not_scale_by_show(use_kernels: bool) -> None:
    """D.4: the Unit kinds are Ctr with show scaling off."""
    moved = []
    for kind in ("CtrCommonAccessor", "UnitAccessor"):
        table = _table(use_kernels, accessor=Accessor(kind), rule=Rule("shared_adagrad", {"learning_rate": 1.0}))
        table.push(ONE, _ones(table), np.array([4.0], np.float32))
        moved.append(-table.pull(ONE)[0, 2])
    np.testing.assert_allclose(moved, [0.25, 1.0])


def test_count_filter(use_kernels: bool) -> None:
    """D.6: before the n-th push pulls give zeros and pushes only count; no memory for rows is taken."""
    table = _table(use_kernels, entry=CountFilterEntry(3))
    for expected in (0.0, 0.0, -0.5):
        assert table.pull(ONE).tolist() == [[0.0] * 4]
        table.push(ONE, _ones(table))
        assert table.pull(ONE).tolist() == [[expected] * 4]
    assert rows_of(table)[1][1] == 3


def test_count_filter_of_one_admits_at_once(use_kernels: bool) -> None:
    """D.6: 0 and 1 are no filter."""
    for n in (0, 1):
        assert _table(use_kernels, entry=CountFilterEntry(n)).pull(ONE)[0, 0] == 0.5


def test_probability_entry(use_kernels: bool) -> None:
    """D.6, G6: about p of the ids are admitted (not 1 - p), the same ones at every try and on every server."""
    keys = np.arange(20000)
    table = _table(use_kernels, entry=ProbabilityEntry(0.2), seed=5)
    for _ in range(3):
        table.push(keys, _ones(table, len(keys)))
    assert 0.18 < table.num_rows / len(keys) < 0.22
    other = _table(use_kernels, entry=ProbabilityEntry(0.2), seed=5)
    other.push(keys[::-1].copy(), _ones(other, len(keys)))
    assert other.contains(keys).tolist() == table.contains(keys).tolist()


def test_create_by_score(use_kernels: bool) -> None:
    """D.4: a push of score 0 makes no row, of 1 or more one, between with that probability."""
    keys = np.arange(5000)
    table = _table(use_kernels, accessor=Accessor(create_by_score=True))
    table.push(keys, _ones(table, 5000), np.zeros(5000, np.float32))
    assert table.num_rows == 0
    table.push(keys, _ones(table, 5000), np.full(5000, 3, np.float32))
    assert 0.27 < table.num_rows / 5000 < 0.33
    table.push(keys, _ones(table, 5000), np.ones(5000, np.float32), np.ones(5000, np.float32))
    assert table.num_rows == 5000


@pytest.mark.parametrize("kind", ["uniform", "normal", "truncated_normal"])
def test_initial_values_depend_on_seed_key_and_column_only(use_kernels: bool, kind: str) -> None:
    """Study 3: not on order, sub-shard, or number of servers; and they look like the distribution."""
    keys = np.random.default_rng(0).integers(-(2**60), 2**60, 3000)
    config = SparseTableConfig("t", 4, initializer=Initializer(kind, -0.5, 0.5), seed=11)
    whole = table_of(config, use_kernels).pull(keys)
    by_push = table_of(config, use_kernels)
    by_push.push(keys[::-1].copy(), np.zeros((3000, 4), np.float32))
    np.testing.assert_array_equal(by_push.pull(keys), whole)
    owners = servers_of_keys(keys, 3)
    for server in range(3):
        table = table_of(config, use_kernels)
        np.testing.assert_array_equal(table.pull(keys[owners == server]), whole[owners == server])
    other_seed = table_of(replace(config, seed=12), use_kernels)
    assert (other_seed.pull(keys) != whole).mean() > 0.99
    assert len(np.unique(whole)) > 0.99 * whole.size
    if kind == "uniform":
        assert -0.5 <= whole.min() < -0.49
        assert 0.49 < whole.max() < 0.5
        assert abs(whole.mean()) < 0.02
    else:
        assert abs(whole.mean() + 0.5) < 0.03
        limit = {"normal": 2.0, "truncated_normal": 1.0 + 1e-6}[kind]
        assert np.abs(whole + 0.5).max() <= limit if kind != "normal" else np.abs(whole + 0.5).max() > 1.5


def test_shrink_by_score_and_days(use_kernels: bool) -> None:
    """D.4, D.8: shows decay once per call; rows below the threshold or unseen too long go, the rest stays."""
    accessor = documented_accessor(delete_threshold=0.5, delete_after_unseen_days=2, embedx_threshold=0)
    table = _table(use_kernels, accessor=accessor)
    keys = np.arange(100)
    table.push(keys, _ones(table, 100), np.where(keys < 40, 1, 10).astype(np.float32))
    assert table.shrink() == 40
    assert table.num_rows == 60
    assert table.contains(keys).tolist() == (keys >= 40).tolist()
    np.testing.assert_allclose(rows_of(table)[50][5][:2], (9.8, 0))
    for _ in range(3):
        table.advance_day()
    table.push(keys[90:], _ones(table, 10))
    assert table.shrink(threshold=0) == 50
    assert sorted(table.keys().tolist()) == list(range(90, 100))
    assert table.pull(keys[90:], create=False)[:, 0].tolist() == [-2.0] * 10


def test_shrink_without_accessor(use_kernels: bool) -> None:
    """Pushes and unseen days decide; with neither given there is nothing to decide by."""
    table = _table(use_kernels)
    keys = np.arange(10)
    table.push(keys, _ones(table, 10))
    table.push(keys[5:], _ones(table, 5))
    assert table.shrink(threshold=2) == 5
    table.advance_day()
    assert table.shrink(max_unseen_days=1) == 0
    assert table.shrink(max_unseen_days=0) == 5
    with pytest.raises(ConfigError, match="no threshold"):
        table.shrink()


def test_shrink_forgets_ids_that_never_made_it(use_kernels: bool) -> None:
    """D.6: an id that waits for admission and is not seen again does not stay for ever."""
    table = _table(use_kernels, entry=CountFilterEntry(5))
    table.push(ONE, _ones(table))
    assert table.shrink(max_unseen_days=1) == 0
    for _ in range(2):
        table.advance_day()
    assert table.shrink(max_unseen_days=1) == 1


def test_unseen_days_stay_in_order_over_their_wrap(use_kernels: bool) -> None:
    """D.4: days are counted in 16 bits; a row unseen for very long never looks young."""
    table = _table(use_kernels)
    table.push(ONE, _ones(table))
    for day in range(1, 140_001):
        table.advance_day()
        if day % 9973 == 0 or day in (65535, 65536, 65537):
            assert rows_of(table)[1][0] >= min(day, 49151)


def test_extreme_keys_and_repeats(use_kernels: bool) -> None:
    """Any int64 is a key; repeated keys in a pull agree, in a push they count twice."""
    table = _table(use_kernels)
    keys = np.array([-(2**63), -1, 0, 2**63 - 1, -1])
    table.pull(keys)
    table.push(keys, _ones(table, 5))
    assert table.pull(keys)[:, 0].tolist() == [-0.5, -1.5, -0.5, -0.5, -1.5]
    assert table.num_rows == 4
    assert table.pull(np.empty(0, np.int64)).shape == (0, 4)
    table.push(np.empty(0, np.int64), _ones(table, 0))


def test_clear_and_use_again(use_kernels: bool) -> None:
    """Every row goes; the table works as a new one."""
    table = _table(use_kernels, accessor=Accessor())
    keys = np.arange(5000)
    table.push(keys, _ones(table, 5000))
    table.clear()
    assert (table.num_rows, table.keys().tolist()) == (0, [])
    table.push(keys[:3], _ones(table, 3))
    assert rows_of(table)[0][5][0] == 1
    table.close()
    table.close()
    for call in (lambda: table.pull(keys), lambda: table.num_rows, table.keys, table.advance_day):
        with pytest.raises(PSError, match="closed"):
            call()


def test_wrong_arrays_change_nothing(use_kernels: bool) -> None:
    """Bad input raises before anything is changed, and says what fits."""
    table = _table(use_kernels)
    good, row = np.array([1]), np.ones((1, 4), np.float32)
    for call in (
        lambda: table.pull(good.astype(np.int32)),
        lambda: table.pull(good[None]),
        lambda: table.pull(good, np.empty((1, 5), np.float32)),
        lambda: table.pull(good, np.empty((1, 4))),
        lambda: table.pull(good, np.empty((1, 8), np.float32)[:, ::2]),
        lambda: table.push(good, row[:, :3]),
        lambda: table.push(good, row.astype(np.float64)),
        lambda: table.push(good, row, np.ones(2, np.float32)),
        lambda: table.push(good, row, None, np.ones(1)),
        lambda: table.push(good, row, None, None, np.ones(1, np.int64)),
        lambda: table.add(good, row[:, :1]),
    ):
        with pytest.raises(ConfigError, match="take"):
            call()
    assert table.num_rows == 0


def test_arrays_without_order_are_taken(use_kernels: bool) -> None:
    """Views with strides give the same as their copies."""
    table = _table(use_kernels)
    table.push(np.arange(10)[::2], np.ones((4, 5), np.float32).T[:5])
    assert table.pull(np.arange(10), create=False)[:, 0].tolist() == [-0.5, 0] * 5


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: CountFilterEntry(1.5), "integer"),
        (lambda: CountFilterEntry(-1), "lie in"),
        (lambda: ProbabilityEntry(1.0), "strictly between"),
        (lambda: ProbabilityEntry(1), "float"),
        (lambda: ShowClickEntry("a", 3), "name of an input"),
        (lambda: Accessor("CtrAccessor"), "does not exist"),
        (lambda: Accessor(embedx_threshold=float("nan")), "finite"),
        (lambda: documented_accessor(embedx_treshold=1), "did you mean 'embedx_threshold'"),
        (lambda: Accessor("CtrCommonAccessor").check_dim(2), "at least 3"),
        (lambda: Accessor().check_dim(8, embedx_dim=8), "7 embedx"),
        (lambda: SparseTableConfig("t", 2, accessor=Accessor("CtrCommonAccessor")), "at least 3"),
        (lambda: SparseTableConfig("t", 0), "from 1 to"),
        (lambda: SparseTableConfig("t", 4, create_on="load"), "create_on"),
        (lambda: SparseTableConfig("t", 4, Rule("summary")), "dense tables only"),
        (lambda: SparseTableConfig("t", 4, embed_rule=SGD), "accessor"),
        (lambda: Initializer("uniform", 1.0, 0.0), "empty"),
        (lambda: Initializer("xavier"), "does not exist"),
        (lambda: entry_from_attr("count_filter_entry:x"), "cannot be read"),
        (lambda: entry_from_attr("count:3"), "does not exist"),
    ],
)
def test_wrong_configurations_are_refused(make: object, word: str) -> None:
    """B.11, D.4, D.6: ValueErrors that name the value and the rule."""
    with pytest.raises(ConfigError, match=f"(?i){word}"):
        make()  # type: ignore[operator]


def test_accessors_that_cannot_be_honoured() -> None:
    """Decision 5: refused with the reason."""
    for kind in ("CtrDymfAccessor", "CommMergeAccessor"):
        with pytest.raises(UnsupportedOptionError, match="refused"):
            Accessor(kind)


def test_defaults_implicit_and_documented() -> None:
    """D.4: what an unconfigured table means, and what a written-out configuration leaves away."""
    implicit, documented = Accessor(), documented_accessor()
    assert (implicit.embedx_threshold, implicit.base_threshold, implicit.show_click_decay_rate) == (0, 0, 1)
    assert (documented.embedx_threshold, documented.base_threshold, documented.delta_threshold) == (10, 1.5, 0.25)
    assert (documented.show_click_decay_rate, documented.delete_threshold) == (0.98, 0.8)
    assert implicit.delta_keep_days == documented.delta_keep_days == 16
    assert implicit.delete_after_unseen_days == documented.delete_after_unseen_days == 30


def test_attribute_strings() -> None:
    """D.6: the string forms go both ways."""
    for entry in (CountFilterEntry(3), ProbabilityEntry(0.25), ShowClickEntry("s", "c")):
        assert entry_from_attr(entry.to_attr()) == entry
    assert entry_from_attr("none") is None
