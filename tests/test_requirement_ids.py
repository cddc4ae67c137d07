"""Every requirement on launching (000) and on elastic jobs (004) is cited by a test, by its id."""

from __future__ import annotations

import re

from tests.helpers.sources import ROOT

LAUNCH = {f"000-{number:02d}" for number in range(1, 31)} | {"000-03b", "000-03c"}
ELASTIC = {f"004-{number:02d}" for number in range(1, 21)}


def test_each_id_is_cited() -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if str(path) != __file__]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    cited = set(re.findall(r"\b00[04]-\d\d[a-z]?\b(?!-)", text))
    assert (LAUNCH | ELASTIC) - cited == set()
    assert cited - LAUNCH - ELASTIC == set(), "an id that does not exist"
