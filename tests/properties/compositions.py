"""Runs compositions of model, loop, strategies and workers, and compares each with plain torch in one process.

``python -m tests.properties.compositions --draws 5000 --seed 0 [--series invariant] [--only NUMBER]`` runs them
without pytest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.properties.draws import Composition, Judgement, draw, expectation, invariant, judge, planned, smaller
from tests.properties.pool import Pool
from tests.properties.script import script_of

SIZES = (1, 2, 4)
SERIES = {made.__name__: made for made in (draw, invariant, planned)}
# Without pytest, whose fork server has what tests/conftest.py names.
PRELOAD = ["torch.nn.parallel", "torch.distributed.fsdp", "fleet.facade", "tests.properties.pool"]


@dataclass
class Report:
    """What became of the draws: how many had each outcome, and the faults with a small composition that shows each."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[Composition, str, Composition]] = field(default_factory=list)
    took_s: float = 0.0

    def script(self, place: int) -> str:
        """Returns a script that shows a fault."""
        _, fault, small = self.faults[place]
        return script_of(small, fault, expectation(small))

    def __str__(self) -> str:
        """Returns the outcomes, and for each fault the draw and its reduced form."""
        lines = [f"{dict(self.outcomes)} in {self.took_s:.0f} s"]
        lines += [f"  {count} x {reason}" for reason, count in self.refusals.most_common() if count]
        for made, fault, small in self.faults:
            lines += [f"FAULT {made}", f"  {fault}", f"  small: {small}"]
        return "\n".join(lines)


@contextmanager
def pools() -> Iterator[dict[int, Pool]]:
    """Yields a pool for each number of workers; all of them are stopped at the end."""
    made = {workers: Pool(workers) for workers in SIZES}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield made
    finally:
        torch.set_num_threads(threads)
        for pool in made.values():
            pool.stop()


def run(
    numbers: Iterable[int],
    seed: int,
    *,
    drawn: Callable[[int, int], Composition] = draw,
    shrinks: bool = True,
    most_faults: int = 20,
    tell: bool = False,
) -> Report:
    """Runs the draws of ``numbers`` that ``drawn`` makes; stops when there are ``most_faults``."""
    report, start = Report(), time.monotonic()
    with pools() as at:
        for number in numbers:
            made = drawn(number, seed)
            found = run_one(made, at)
            report.outcomes[found.outcome] += 1
            report.refusals[found.reason[:70]] += bool(found.reason)
            if found.fault:
                small = shrunk(made, at) if shrinks else made
                report.faults.append((made, found.fault, small))
                if tell:
                    print(f"FAULT {made}\n  {found.fault[:900]}\n  small: {small}", flush=True)
            if len(report.faults) >= most_faults:
                break
    report.took_s = time.monotonic() - start
    return report


def run_one(made: Composition, at: dict[int, Pool]) -> Judgement:
    """Trains a composition in its pool, and meanwhile in plain torch here; returns what became of it."""
    at[made.workers].send(made.sent())
    try:
        expected = expectation(made)
    except (KeyError, RuntimeError) as error:  # the rule of a strategy has no meaning for this optimizer
        expected, reason = [], repr(error)
    results = at[made.workers].results()
    if not expected and not results[0]["outcome"].startswith("refused"):
        return Judgement("trained", f"plain torch cannot do this: {reason}; {results[0]['outcome']}")
    return judge(made, results, expected)


def shrunk(made: Composition, at: dict[int, Pool], most: int = 12) -> Composition:
    """Returns a smaller composition that fails as well."""
    tried = 0
    changed = True
    while changed and tried < most:
        changed = False
        for candidate in smaller(made):
            tried += 1
            if run_one(candidate, at).fault:
                made, changed = candidate, True
                break
            if tried >= most:
                break
    return made


def main() -> None:
    """Runs the draws that the command line asks for; writes a script for each fault where it names a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--series", choices=SERIES, default="draw")
    parser.add_argument("--only", type=int, help="one draw")
    parser.add_argument("--most-faults", type=int, default=1000)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--scripts", type=Path, help="folder for a script of each fault")
    asked = parser.parse_args()
    multiprocessing.set_forkserver_preload(PRELOAD)
    numbers = range(asked.start, asked.draws) if asked.only is None else [asked.only]
    report = run(
        numbers,
        asked.seed,
        drawn=SERIES[asked.series],
        shrinks=not asked.no_shrink,
        most_faults=asked.most_faults,
        tell=True,
    )
    print(report)
    for place, (made, _, _) in enumerate(report.faults if asked.scripts else []):
        (asked.scripts / f"draw_{made.number}.py").write_text(report.script(place))


if __name__ == "__main__":
    main()
