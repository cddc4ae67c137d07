"""The page of a report: the outcome first, the first difference with its place, no resource, no markup let in."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fleet.verify.page.report_page import page_text, write_page
from fleet.verify.report import Finding, Report

FIRST = {
    "cause": "gradients-clipped-per-part",
    "sentence": "Worker 1 clips by the norm of its own shard.",
    "step": 3,
    "rank": 1,
    "module": "layers.0",
    "tensor": "layers.0.weight.grad",
    "expected": 0.0123,
    "received": 0.0246,
    "difference": 0.0123,
    "where": "train.py:41 `clip(model)`",
}
SECOND = {"cause": "sampler-without-set-epoch", "sentence": "Each epoch has the order of the first.", "step": 5}
HOSTILE = "<script>alert('x')</script>\"><img src=http://elsewhere.example/x onerror=alert(1)>"


def report(**fields: Any) -> dict[str, Any]:
    """Returns what ``Report.to_json`` writes of a run that differs."""
    row = {"step": 1, "loss_one": 2.0, "loss_many": 2.5, "gradients": 1e-7, "buffers": None}
    made = {
        "outcome": "differs",
        "exit_code": 1,
        "steps": 6,
        "workers": 2,
        "tolerance": 1e-6,
        "findings": [FIRST, SECOND],
        "notes": ["batch norm takes the statistics of each worker"],
        "timings": {"script_s": 3.0, "ratio": 2.5},
        "options": {"amp": {"tolerance": 8e-3, "why": "bfloat16 keeps 8 bits"}},
        "per_step": [row, {**row, "step": 2, "loss_one": 1.0, "gradients": 0.5}],
    }
    return {**made, **fields}


class Page(HTMLParser):
    """Collects the texts of a page in order, its tags and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and "style" not in self.open and "title" not in self.open:
            self.texts.append(data.strip())


def test_the_first_line_says_how_it_ended() -> None:
    for outcome, said in (("equal", "Equal"), ("differs", "Differs"), ("not_comparable", "Could not be compared")):
        page = Page(page_text(report(outcome=outcome)))
        assert page.texts[0] == said
        assert "2 workers against 1 process, 6 steps" in page.texts[1]
        assert page.open == []


def test_the_first_difference_comes_before_everything_else() -> None:
    texts = Page(page_text(report())).texts
    place = texts.index("First difference")
    assert texts[place + 1] == FIRST["sentence"]
    assert texts[place + 2 : place + 4] == ["line", FIRST["where"]]
    facts = dict(zip(texts[place + 2 : place + 20 : 2], texts[place + 3 : place + 21 : 2], strict=True))
    assert facts["step"] == "3"
    assert facts["worker"] == "1"
    assert facts["expected"] == "0.0123"
    assert texts.index("All findings") > place
    assert SECOND["sentence"] in texts


def test_findings_options_steps_notes_and_time_are_there() -> None:
    texts = Page(page_text(report())).texts
    for said in (
        "amp",
        "0.008",
        "bfloat16 keeps 8 bits",
        "loss, one process",
        "1e-07",
        "3.00 s",
        "2.5",
        *report()["notes"],
    ):
        assert said in texts, said
    assert Page(page_text(report())).tags.count("polyline") == 3  # both losses, and the gradients


def test_a_report_is_written_to_a_file(tmp_path: Path) -> None:
    made = Report(
        outcome="differs",
        steps=4,
        workers=2,
        tolerance={"text": "float32", "relative": 1e-6},
        findings=[Finding(**FIRST)],
    )  # type: ignore[arg-type]
    write_page(made, tmp_path / "verify.html")
    texts = Page((tmp_path / "verify.html").read_text(encoding="utf-8")).texts
    assert texts[:2] == ["Differs", ": 2 workers against 1 process, 4 steps, 1 finding"]
    assert "Compared within float32: relative 1e-06." in texts
    assert FIRST["sentence"] in texts


def test_the_page_says_what_was_run_and_draws_the_first_difference() -> None:
    about = {"command": "python -m fleet verify a.py -- --x '<b>'", "date": "2026-01-02 03:04", "torch": "2.13"}
    tensors = [{"tensor": "layers.0.weight", "expected": 2.0, "received": 1.0}]
    page = Page(page_text(report(about=about, first=tensors)))
    assert page.texts[2] == about["command"]
    assert "2026-01-02 03:04" in page.texts[3]
    assert "torch 2.13" in page.texts[3]
    assert page.tags.count("rect") == 2
    assert "Norms of the gradients at update 3" in page.texts


def test_an_equal_run_has_no_findings() -> None:
    texts = Page(page_text(report(outcome="equal", findings=[]))).texts
    assert not {"First difference", "All findings", "Why"} & set(texts)


def test_a_run_that_ended_before_its_first_step_has_a_page() -> None:
    empty = report(outcome="not_comparable", per_step=[], options={}, notes=[], timings={}, tolerance=None, steps=0)
    texts = Page(page_text({**empty, "findings": [{"cause": "unknown", "sentence": "It never stepped."}]})).texts
    assert texts[2:4] == ["Why", "It never stepped."]
    assert len(Page(page_text({"outcome": "equal", "steps": 1, "workers": 2})).texts) == 2


def test_nothing_that_a_script_says_becomes_markup() -> None:
    hostile = dict.fromkeys(FIRST, HOSTILE)
    options = {HOSTILE: {HOSTILE: HOSTILE}}
    rows = [{"step": 1, f"loss {HOSTILE}": 1.0, HOSTILE: 0.5}]
    page = page_text(
        report(
            findings=[hostile, hostile], notes=[HOSTILE, {HOSTILE: [HOSTILE]}], options=options, per_step=rows,
            timings={HOSTILE: HOSTILE}, tolerance=HOSTILE,
        )
    )  # fmt: skip
    read = Page(page)
    assert not {"script", "img"} & set(read.tags)
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert page.count("&lt;script&gt;") >= 8


def test_the_page_needs_nothing_else_and_follows_the_browser() -> None:
    page = page_text(report())
    read = Page(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(read.tags)
    assert not {"src", "href"} & {name for name, _ in read.attributes}
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert re.search(r"prefers-color-scheme: dark", page)
    assert ("content", "width=device-width, initial-scale=1") in read.attributes


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_shown_and_not_drawn(value: float) -> None:
    rows = [{"step": 1, "loss_one": 1.0, "gradients": value}, {"step": 2, "loss_one": value, "gradients": 1.0}]
    read = Page(page_text(report(per_step=rows)))
    assert f"{value:g}" in read.texts
    assert read.tags.count("circle") == 2
