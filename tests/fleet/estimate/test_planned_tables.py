"""Tables as text: what they become, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.errors import ConfigError, FleetError
from fleet.estimate.planned_tables import table_of, tables_of
from fleet.ps import SparseTable
from fleet.ps.files.table_files import save_table
from tests.fleet.ps._tables import make_rows


def test_a_table_in_words() -> None:
    first, second = tables_of(["name=ads,dim=16,rule=adam,ids=20e6", "dim=8,ids=100,max_rows=50"])
    assert (first.config.name, first.config.rule.name, first.ids, first.rows) == ("ads", "adam", 20_000_000, 20_000_000)
    assert first.row_bytes == 4 * (3 * 16 + 1)
    assert (second.config.name, second.config.rule.name) == ("1", "adagrad")
    assert second.on_server(1).rows == 50
    assert second.on_server(4).rows == 25


def test_a_file_of_tables_has_the_keys_of_sparse_table_configs(tmp_path: Path) -> None:
    file = tmp_path / "tables.yaml"
    file.write_text(
        "ads: {dim: 9, ids: 1e6, sparse_optimizer: adagrad}\n"
        "users: {dim: 4, ids: 1000, rule: sgd, entry: 'count_filter_entry:10', admitted: 0.1}\n"
        "pages: {dim: 4, ids: 1000, rule: sgd, entry: 'probability_entry:0.25'}\n"
    )
    ads, users, pages = tables_of([], str(file))
    assert ads.config.rule.name == "shared_adagrad"
    assert ads.config.accessor is not None
    assert ads.row_bytes == 4 * (9 + 2) + 24
    assert (users.rows, users.waits, users.on_server(1).waiting) == (100, True, 900)
    assert (pages.rows, pages.waits, pages.on_server(1).waiting) == (250, False, 0)


def test_bytes_of_a_save(tmp_path: Path) -> None:
    planned = table_of({"dim": 6, "ids": 50_000, "accessor": "SparseAccessor", "max_rows": 10**6, "name": "t"})
    table = SparseTable(planned.config)
    make_rows(table, range(50_000))
    save_table(table, tmp_path)
    size = sum(path.stat().st_size for path in (tmp_path / "t").glob("*.rows"))
    assert planned.saved_bytes(1) == pytest.approx(size, rel=0.03)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dim=16", "has no ids. Write ids="),
        ("ids=16", "has no dim"),
        ("dim16,ids=3", "KEY=VALUE"),
        ("dim=16,ids=many", "ids is 'many'"),
        ("dim=16,ids=-3", "ids is -3"),
        ("dim=0,ids=3", "dim is 0"),
        ("dim=[,ids=3", "cannot be read"),
        ("dim=16,ids=3,rule=adamm", "Did you mean 'adam'"),
        ("dim=16,ids=3,admited=0.5", "Did you mean 'admitted'"),
        ("dim=16,ids=3,admitted=2", "admitted is 2"),
        ("dim=16,ids=3,entry=some", "the entry 'some'"),
        ("dim=16,ids=3,accessor=Ctr", "the accessor 'Ctr'"),
        ("dim=16,ids=3,rows=disk", "memory_bytes"),
    ],
)
def test_wrong_words(text: str, said: str) -> None:
    with pytest.raises(FleetError, match=said.replace("[", r"\[")):
        tables_of([text])


@pytest.mark.parametrize("text", ["- 3\n", "ads: 3\n", "ads: {dim: [\n"])
def test_wrong_files(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tables.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--tables"):
        tables_of([], str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        tables_of([], str(tmp_path / "absent.yaml"))
