"""Draws the cases of the benchmark from population.yaml, and writes drawn.yaml.

The draw is a function of the population and the seed: reports are put in the order of the SHA-256 of the seed and
their id, which is the same in every version of Python and stays when another report joins the population or leaves it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypedDict

import yaml

FOLDER = Path(__file__).parent
# The digits of TrainCheck's arXiv number: fixed before the first draw, and never changed after it.
SEED = 250614813
CASES = 40
ASIDE = 10
# At most a quarter of the cases may be left out, so no more replacements are ever needed.
REPLACEMENTS = CASES // 4


class Draw(TypedDict):
    """What drawn.yaml holds; every list is in the order drawn."""

    seed: int
    population: int
    cases: list[dict[str, str]]
    aside: list[str]
    replacements: list[dict[str, str]]


def ordered(ids: list[str], seed: int, purpose: str) -> list[str]:
    """Returns ``ids`` in the order that ``seed`` gives them for ``purpose``, whatever their order was."""
    return sorted(ids, key=lambda name: hashlib.sha256(f"{seed}:{purpose}:{name}".encode()).digest())


def draw(reports: list[dict[str, str]], seed: int = SEED) -> Draw:
    """Returns the cases, the ten of them that are kept aside, and the replacements; duplicates are never drawn."""
    urls = {report["id"]: report["url"] for report in reports if "duplicate_of" not in report}
    order = ordered(list(urls), seed, "cases")
    cases = order[:CASES]
    replacements = order[CASES : CASES + REPLACEMENTS]
    return {
        "seed": seed,
        "population": len(urls),
        "cases": [{"id": name, "url": urls[name]} for name in cases],
        "aside": ordered(cases, seed, "aside")[:ASIDE],
        "replacements": [{"id": name, "url": urls[name]} for name in replacements],
    }


def main() -> None:
    """Prints the draw and writes it to drawn.yaml."""
    reports = yaml.safe_load((FOLDER / "population.yaml").read_text(encoding="utf-8"))["reports"]
    text = yaml.safe_dump(draw(reports), sort_keys=False, width=118)
    (FOLDER / "drawn.yaml").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
