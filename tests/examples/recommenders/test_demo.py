"""make demo-recommend: the brake is pulled for the bad day alone, readers and training go back, and a page says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.examples.recommenders.example import EXAMPLE, example_module
from tests.examples.scripts import ROOT, train

BAD_DAY = 2
SHOP = "simulated:users=2000,items=2500,days=5,impressions=200000,seed=5"


def told(at: float, kind: str, **facts: Any) -> dict[str, Any]:
    return {"at": 1e9 + at, "kind": kind, **facts}


def story_of_a_bad_day() -> Any:
    """Returns 20 seconds: wrong data from 6 on, the brake at 10, replicas back at 10.2 and 10.5, the release at 13."""
    events = [told(0, "day", day=0, broken=False), told(5, "marked", name="day-0"), told(6, "day", day=1, broken=True)]
    events += [told(10, "brake", version="day-0", value=0.2, best=0.3), told(12, "went_back", version="day-0")]
    events += [told(13, "marked", name="day-0-1"), told(13, "released"), told(13.1, "day", day=1, broken=False)]
    events += [told(20, "score", value=0.35, version=None, today=2)]
    for tenth in range(50, 195):
        for replica, back in (("first", 102), ("second", 105)):
            version = "day-0" if back <= tenth < 132 else None
            events.append(told(tenth / 10, "answer", replica=replica, ms=3.0, age_s=0.5, step=tenth, version=version))
        events.append(told(tenth / 10, "hits", value=0.3, recall=0.99, today=2, version=None))
    return example_module("story").Story(sorted(events, key=lambda one: one["at"]), 25.0)


def test_a_story_tells_how_long_each_part_took() -> None:
    facts = story_of_a_bad_day().facts()
    assert facts["wrong data to brake"] == "4.0 s"
    assert facts["brake to both replicas back"] == "0.20 s, 0.50 s"
    assert facts["answers that were newer after that"] == "0"
    assert facts["brake to training back"] == "2.0 s"
    assert facts["brake to release"] == "3.0 s"
    assert facts["recall at the brake"] == "0.200; version day-0 has 0.300"
    assert facts["index against the exact answer"] == "recall 0.990, at least 0.990"


def test_a_newer_answer_before_the_release_is_counted() -> None:
    story = story_of_a_bad_day()
    leaking = next(one for one in story.answers if one["at"] > 11 and one["replica"] == "second")
    leaking["version"] = None
    assert story.leaks() == 1


def test_the_page_needs_no_network(folder: Path, tmp_path: Path) -> None:
    days = example_module("days").Days(folder)
    items = days.catalogue.item.tolist()
    page = tmp_path / "index.html"
    portraits = [{"history": items[:3], "shown": items[3:5], "clicked": items[5]}]
    example_module("page").write_page(page, story_of_a_bad_day(), days, portraits)
    text = page.read_text()
    assert text.count("<figure>") == 4
    assert text.count('class="chip"') == 6
    assert text.count('<rect class="bad" x="300.0" width="300.0"') == 4
    assert text.count('<rect class="brake" x="500.0" width="150.0"') == 4
    assert "http" not in text
    assert "<script" not in text
    assert "nan" not in text.lower().split("<body>")[1]


@pytest.mark.parametrize(("high", "top", "ticks"), [(0.27, 0.3, 4), (0.101, 0.15, 4), (7.0, 8.0, 5), (1234, 1500, 4)])
def test_ticks_are_round(high: float, top: float, ticks: int) -> None:
    found, values = example_module("page").round_ticks(high)
    assert (found, len(values), values[-1]) == (top, ticks, top)


def test_make_runs_it() -> None:
    recipe = (ROOT / "Makefile").read_text().split("\ndemo-recommend:")[1].split("\n\n")[0]
    assert "examples/recommenders/demo.py output/demo-recommend" in recipe


@pytest.mark.slow
def test_a_bad_day_is_braked_and_no_other(tmp_path: Path) -> None:
    """Issue 43, acceptance 2."""
    options = ("--data", SHOP, "--bad-day", str(BAD_DAY), "--clicks", "200", "--workers", "2", "--batch-size", "128")
    output = train([sys.executable, str(EXAMPLE / "demo.py"), str(tmp_path / "demo"), *options], tmp_path, 900)
    events = [json.loads(line) for line in (tmp_path / "demo/events.jsonl").read_text().splitlines()]
    events.sort(key=lambda one: one["at"])

    def of(kind: str) -> list[dict[str, Any]]:
        return [one for one in events if one["kind"] == kind]

    (brake,) = of("brake")
    (bad,) = [one for one in of("day") if one["broken"]]
    assert bad["day"] == BAD_DAY
    assert brake["at"] > bad["at"]
    assert brake["version"] == f"day-{BAD_DAY - 1}"
    assert [one["day"] for one in of("day")] == [0, 1, BAD_DAY, BAD_DAY, 3]
    (back,), (released,) = of("went_back"), of("released")
    assert back["version"] == brake["version"]
    for replica in ("first", "second"):
        during = [one["version"] for one in of("answer") if one["replica"] == replica and
                  brake["at"] <= one["at"] < released["at"]]  # fmt: skip
        first = during.index(brake["version"])
        assert set(during[first:]) == {brake["version"]}  # nothing newer comes through
        last = [one for one in of("answer") if one["replica"] == replica][-1]
        assert last["version"] is None
    newest = [one for one in of("score") if one["version"] is None]
    assert newest[-1]["value"] > brake["value"] + 0.05, newest
    page = (tmp_path / "demo/index.html").read_text()
    assert page.count("<figure>") == 4
    assert page.count('class="card user"') == 5
    assert "brake to both replicas back" in output
    assert "answers that were newer after that: 0" in output
