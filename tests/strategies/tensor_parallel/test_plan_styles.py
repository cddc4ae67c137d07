"""The words of a plan."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError
from fleet.strategies.tensor_parallel.plan_styles import STYLES, SYNONYMS, PlanStyle, read_style


def test_every_style_and_every_synonym_is_read() -> None:
    """Issue 12, 1: the words of Hugging Face's plans are accepted."""
    for word in STYLES:
        assert read_style("a", word if word != "divide" else "divide:n").kind == word
    for word, meaning in SYNONYMS.items():
        assert read_style("a", word) == read_style("a", meaning)


def test_what_stands_behind_the_colon() -> None:
    assert read_style("a", "column:3") == PlanStyle("column", 3)
    assert read_style("a", "column:3").sections_of(12) == (4, 4, 4)
    assert read_style("a", "colwise: 8, 4,4") == PlanStyle("column", 3, (8, 4, 4))
    assert read_style("a", "divide:n_heads, width").attributes == ("n_heads", "width")
    assert read_style("a", "column").sections_of(12) == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"\['a'\] = 3: a plan maps a pattern of module names to text"),
        ("colum", "there is no such style. Did you mean 'column'"),
        ("column:x", "a number of equal pieces"),
        ("column:0", "a number of equal pieces"),
        ("vocab:2", "a number of equal pieces"),
        ("divide", "name the attributes"),
        ("grouped_gemm", "not offered, because experts"),
        ("mla_kv_a_proj", "not offered"),
    ],
)
def test_other_words_are_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_style("a", value)
