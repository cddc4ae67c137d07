"""Runs ``fleet verify`` on every case and every correct script, and writes the table of verdicts.

    python benchmarks/silent_bugs/score.py              # without the cases kept aside
    python benchmarks/silent_bugs/score.py --aside      # all of them; writes results.md
    python benchmarks/silent_bugs/score.py --only accelerate-2127 nanogpt_ddp

One script at a time. Each report is a line of the results file, under a key of the script's text and the library's, so
a run that was stopped goes on where it was, and a change of either runs the script again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from _verdicts import NOT_RUN, TOO_THIN, Row, Verdict, is_at_line, judge, table  # noqa: E402

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
RESULTS = ROOT / "output" / "silent_bugs.jsonl"
TABLE = FOLDER / "results.md"
_KEPT = ("outcome", "exit_code", "steps", "workers", "findings", "warnings", "notes", "timings")


@dataclass(frozen=True)
class Case:
    """A drawn report and the folder of its scripts; ``facts`` is its case.yaml, ``{}`` where nobody wrote it yet."""

    name: str
    url: str
    aside: bool
    folder: Path
    facts: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One script to verify, on ``workers``."""

    name: str
    script: Path
    workers: int = 2


def drawn_cases(folder: Path, drawn: dict[str, Any]) -> tuple[list[Case], list[Case]]:
    """Returns the cases of a draw, and those left out; the next replacement takes the place of one that is."""
    waiting = iter(drawn["replacements"])
    cases: list[Case] = []
    left_out: list[Case] = []
    for one in drawn["cases"]:
        is_aside = one["id"] in drawn["aside"]
        case = _case(folder, one, aside=is_aside)
        while case.facts.get("left_out"):
            left_out.append(case)
            following = next(waiting, None)
            if following is None:
                break
            case = _case(folder, following, aside=is_aside)
        else:
            cases.append(case)
    return cases, left_out


def _case(folder: Path, drawn: dict[str, str], *, aside: bool) -> Case:
    place = folder / drawn["id"]
    facts = yaml.safe_load((place / "case.yaml").read_text(encoding="utf-8")) if (place / "case.yaml").exists() else {}
    return Case(drawn["id"], drawn["url"], aside, place, facts)


def jobs_of(cases: Sequence[Case], correct: Path) -> Iterator[Job]:
    """Yields what is run: both scripts of each case, then the correct ones."""
    for case in cases:
        for kind in ("wrong", "right"):
            script = case.folder / f"{kind}.py"
            if script.exists():
                yield Job(f"{case.name}/{kind}", script, int(case.facts.get("workers", 2)))
    for script in sorted(correct.glob("[!_]*.py")):
        yield Job(script.stem, script)


def library_version() -> str:
    """Returns the versions that a report depends on, and a digest of the library's source."""
    digest = hashlib.sha256()
    for folder in ("fleet", "strategies", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return f"fleet {version('torch-fleet')} {digest.hexdigest()[:12]}, torch {version('torch')}"


def key_of(job: Job, library: str) -> str:
    """Returns the key of a job's line in the results: equal as long as its report would be."""
    text = f"{library} {job.workers} ".encode() + job.script.read_bytes()
    return hashlib.sha256(text).hexdigest()


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the lines of a results file by key; the last one of a key counts, and half a line does not."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            entry = json.loads(line)
            found[entry["key"]] = entry
    return found


def verify(job: Job, limit_s: float) -> dict[str, Any]:
    """Returns what ``fleet verify`` says of a script: its ``report``, or ``None`` and the ``failure``."""
    with tempfile.TemporaryDirectory() as place:
        said = Path(place) / "report.json"
        printed = Path(place) / "printed.txt"
        folder = Path(place) / "folder"
        folder.mkdir()
        command = [sys.executable, "-m", "fleet", "verify", "--json", str(said)]
        command += ["--nproc_per_node", str(job.workers), str(job.script)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": place}
        began = time.perf_counter()
        with (
            printed.open("wb") as output,
            subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            ) as process,
        ):
            try:
                code = process.wait(limit_s)
                failure = f"verify ended with {code} and no report: "
            except subprocess.TimeoutExpired:
                failure = f"not over after {limit_s:g} s"
            finally:
                with suppress(ProcessLookupError):  # its processes are in its session
                    os.killpg(process.pid, signal.SIGKILL)
        seconds = time.perf_counter() - began
        if said.exists():
            report = json.loads(said.read_text(encoding="utf-8"))
            return {"seconds": round(seconds, 1), "report": {name: report[name] for name in _KEPT}, "failure": ""}
        if failure.endswith(": "):
            failure += " ".join(printed.read_text(encoding="utf-8", errors="replace").splitlines()[-1:])
        return {"seconds": round(seconds, 1), "report": None, "failure": failure}


def run(
    jobs: Sequence[Job], results: Path, limit_s: float, verify: Callable[[Job, float], dict[str, Any]] = verify
) -> dict[str, dict[str, Any]]:
    """Returns the results of ``jobs`` by name; runs those that the file lacks, and those that had less time."""
    library = library_version()
    known = read_results(results)
    found: dict[str, dict[str, Any]] = {}
    results.parent.mkdir(parents=True, exist_ok=True)
    for n, job in enumerate(jobs, 1):
        key = key_of(job, library)
        entry = known.get(key)
        if entry is None or (entry["report"] is None and entry["limit_s"] < limit_s):
            print(f"{n} of {len(jobs)}  {job.name} ...", end=" ", flush=True)
            entry = {"key": key, "name": job.name, "library": library, "limit_s": limit_s, **verify(job, limit_s)}
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            outcome = entry["report"]["outcome"] if entry["report"] else entry["failure"]
            print(f"{outcome}, {entry['seconds']:.0f} s", flush=True)
        found[job.name] = entry
    return found


def row_of(case: Case, results: dict[str, dict[str, Any]]) -> Row:
    """Returns a case's row of the table."""
    engine = str(case.facts.get("engine", ""))
    if case.facts.get("thin"):
        return Row(case.name, case.url, engine, case.aside, Verdict(TOO_THIN), Verdict(""))
    wrong = judge(results.get(f"{case.name}/wrong"), case.facts.get("causes") or [])
    right = judge(results.get(f"{case.name}/right"))
    has_line = is_at_line(wrong.where, case.folder / "wrong.py", str(case.facts.get("line", "")))
    return Row(case.name, case.url, engine, case.aside, wrong, right, has_line)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is asked for, prints the table, and writes it to results.md once it is whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=FOLDER / "cases", metavar="DIR")
    parser.add_argument("--correct", type=Path, default=FOLDER / "correct", metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="ID", help="cases and correct scripts, by name")
    parser.add_argument("--aside", action="store_true", help="runs the cases kept aside, too")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="reports, one in a line")
    parser.add_argument("--limit", type=float, default=180.0, metavar="S", help="seconds for a script (default: 180)")
    given = parser.parse_args(argv)

    drawn = yaml.safe_load((FOLDER / "drawn.yaml").read_text(encoding="utf-8"))
    cases, left_out = drawn_cases(given.cases, drawn)
    open_cases = [case for case in cases if given.aside or not case.aside]
    jobs = list(jobs_of(open_cases, given.correct))
    if given.only:
        unknown = set(given.only) - {job.name.partition("/")[0] for job in jobs}
        if unknown:
            parser.error(f"--only {' '.join(sorted(unknown))}: no case or correct script has this name")
        jobs = [job for job in jobs if job.name.partition("/")[0] in given.only]
    results = run(jobs, given.results, given.limit)

    wanted = {job.name.partition("/")[0] for job in jobs}
    rows = [row_of(case, results) for case in cases if not given.only or case.name in wanted]
    correct = [(job.name, judge(results[job.name])) for job in jobs if "/" not in job.name]
    text = table(rows, correct, [(case.name, str(case.facts["left_out"])) for case in left_out])
    print("\n" + text)
    is_own = (given.cases, given.correct) == (FOLDER / "cases", FOLDER / "correct")
    was_run = [verdict.kind != NOT_RUN for row in rows for verdict in (row.wrong, row.right)]
    is_whole = given.aside and not given.only and bool(correct) and all(was_run)
    if is_own and is_whole:
        head = f"# Silent bugs: the verdict on every script\n\nFrom `score.py --aside`: {library_version()}.\n\n"
        TABLE.write_text(head + text, encoding="utf-8")
        print(f"written to {TABLE}")
    else:
        print("results.md is written only once every case and correct script was run, with --aside")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
