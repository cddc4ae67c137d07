"""``python -m fleet migrate SCRIPT``: the diff that turns a training script into one for this package."""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.common.command_text import plain_text, typed
from fleet.common.extras import install_line
from fleet.common.plain_files import create, replace_file
from fleet.errors import ConfigError

if TYPE_CHECKING:
    from fleet.migrate.script_edits import PortFinding
    from fleet.migrate.script_port import ScriptPort
    from fleet.migrate.script_source import ScriptSource

_BOM = "\ufeff"
_EPILOG = (
    "It reads scripts of Paddle Fleet (eager mode), Accelerate, DistributedDataParallel, and plain torch in one "
    "process. It runs the new script until its second update: one process on the CPU, without network and other "
    "programs, in a folder of its own; files that it changes elsewhere are put back. Exit status: 0 the whole script "
    "is moved and ran, 1 the listed places need your hand, 2 it could not be read."
)


@dataclass(frozen=True)
class MigratedScript:
    """The result for one script.

    Attributes:
        kind: the kind of the old script: "paddle", "accelerate", "ddp", "single" or "fleet".
        text: the new script.
        findings: places for hand work, and notes.
    """

    kind: str
    text: str
    findings: list[PortFinding]

    @property
    def by_hand(self) -> list[PortFinding]:
        """The places that the user moves."""
        return [found for found in self.findings if found.by_hand]


def run(argv: Sequence[str]) -> int:
    """Prints the diff of a script and the places not moved; returns 0, 1 with places for hand work, 2 unreadable."""
    given = list(argv)
    end = given.index("--") if "--" in given else len(given)
    try:
        arguments = _parser().parse_args(given[:end])
    except SystemExit as stop:
        return int(stop.code or 0)
    path: Path = arguments.script
    old, encoding = _read(path)
    made = migrate(old, str(path))
    script_arguments = None if arguments.no_run else tuple(given[end + 1 :])
    made.findings.extend(_tried(path, old, made.text, script_arguments, arguments.timeout))
    if arguments.write and made.text != old:
        _write(path, made.text, encoding)
    status = 1 if made.by_hand else 0
    diff = _diff(old, made.text, path)
    print(_as_json(path, made, diff, status) if arguments.json else _as_text(path, made, diff, arguments.write))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed("migrate"),
        usage="%(prog)s [-h] [--write] [--json] [--no-run] [--timeout S] script [-- ARGUMENTS]",
        description=plain_text(__doc__),
        epilog=_EPILOG,
    )
    parser.add_argument("script", type=Path, help="the training script; it is run with the ARGUMENTS after --")
    parser.add_argument("--write", action="store_true", help="change the script, and keep the old one as SCRIPT.orig")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--no-run", action="store_true", help="run nothing; the exit status is then at least 1")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds for the run (default: 60)")
    return parser


def _tried(path: Path, old: str, new: str, given: tuple[str, ...] | None, timeout_s: float) -> list[PortFinding]:
    """Runs the new script for a few updates, unless ``given`` is None; returns the findings of the run."""
    from fleet.migrate.script_edits import PortFinding
    from fleet.migrate.trial_run import line_before, try_script

    if given is None:
        todo = f"Start it for a step: python -m fleet.launch {path}"
        return [PortFinding(1, path.name, "it was not run, so what the rules do not know is open", todo)]
    print(
        f"fleet migrate: runs the new {path.name} until its second update, for at most {timeout_s:g} s: one process on "
        "the CPU, without network; files that it changes are put back. --no-run leaves this out.",
        file=sys.stderr,
        flush=True,
    )
    trial = try_script(path, new.removeprefix(_BOM), given, timeout_s)
    found = [PortFinding(1, path.name, text, "", by_hand=False) for text in trial.left]
    if not trial.why:
        return [
            PortFinding(1, path.name, f"it was run in one process; updates made: {trial.updates}", "", False),
            *found,
        ]
    what = new.splitlines()[trial.line - 1].strip()[:79] if trial.line else path.name
    return [PortFinding(line_before(old, new, trial.line or 1), what, trial.why, trial.todo), *found]


def migrate(text: str, name: str = "script.py") -> MigratedScript:
    """Returns the script ``text`` moved to this package; ``name`` is its name in errors.

    Raises ConfigError where libcst is missing, and where the text is not Python or no training script.

    Example:
        >>> migrate("from fleet import fleet").kind
        'fleet'
    """
    if find_spec("libcst") is None:
        raise ConfigError(f"migrate needs libcst, which is not installed; {install_line('migrate')}.")
    try:
        return _migrated(text, name)
    except RecursionError:
        raise ConfigError(
            f"{name} has an expression or a block that is nested too deeply to be read; a sum of some hundred terms is "
            "one. Write it as a list or as several statements."
        ) from None


def _migrated(text: str, name: str) -> MigratedScript:
    import libcst

    from fleet.migrate.script_port import ScriptPort
    from fleet.migrate.script_source import ScriptSource

    mark = _BOM if text.startswith(_BOM) else ""
    try:
        ast.parse(text.removeprefix(_BOM), name)
        source = ScriptSource(text.removeprefix(_BOM))
    except (libcst.ParserSyntaxError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{name} is not Python {sys.version_info[0]}: {error}") from None
    kind = kind_of(source, name)
    on_fleet = any(module.split(".")[0] == "fleet" for module in source.imported())
    port = _ported(source, kind) if kind != "fleet" else ScriptPort(source)
    if on_fleet or not port.edits.changed:
        return MigratedScript("fleet" if on_fleet else kind, text, [f for f in port.edits.findings if f.by_hand])
    port.finish()
    made = port.edits.text()
    ast.parse(made)
    return MigratedScript(kind, mark + made, sorted(port.edits.findings, key=lambda found: found.line))


def kind_of(source: ScriptSource, name: str) -> str:
    """Returns the kind of script; raises ConfigError where it uses no library that is known here."""
    imported = source.imported()
    roots = {module.split(".")[0] for module in imported}
    distributed = ("torch.distributed", "torch.nn.parallel.DistributedDataParallel", "torch.multiprocessing")
    if "paddle" in roots:
        return "paddle"
    if "accelerate" in roots:
        return "accelerate"
    # A script on fleet may still use torch.distributed beside it, so only what starts a job counts against it.
    names = {source.called(call) for call in source.calls} | imported
    used = [n for n in names if n.startswith(distributed) or n.endswith("DistributedDataParallel")]
    starts = {"torch.distributed.init_process_group", "torch.nn.parallel.DistributedDataParallel"}
    if starts & names or (used and "fleet" not in roots):
        return "ddp"
    if "fleet" in roots:
        return "fleet"
    if roots & {"torch", "torchvision", "timm", "transformers"}:
        return "single"
    raise ConfigError(
        f"{name} imports none of torch, accelerate and paddle, so there is nothing here to move. Give the file that "
        "holds the training loop."
    )


def _ported(source: ScriptSource, kind: str) -> ScriptPort:
    from fleet.migrate.from_accelerate import port_accelerate
    from fleet.migrate.from_ddp import port_ddp
    from fleet.migrate.from_paddle_fleet import paddle_parts, port_paddle_fleet
    from fleet.migrate.from_single import OTHER_PROGRAMS, note_equal_draws, port_single
    from fleet.migrate.script_port import ScriptPort

    port = ScriptPort(source, paddle_parts(source) if kind == "paddle" else None)
    others = [module for module in source.imported() if module in OTHER_PROGRAMS]
    for module in others:
        port.edits.hand(source.module, f"{module} runs the loop itself", OTHER_PROGRAMS[module])
    if not others:
        chosen = {
            "paddle": port_paddle_fleet,
            "accelerate": port_accelerate,
            "ddp": port_ddp,
            "single": port_single,
        }
        chosen[kind](port)
        note_equal_draws(port)
    return port


def _read(path: Path) -> tuple[str, str]:
    import tokenize

    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no regular file. Give the path of the training script.")
    try:
        with path.open("rb") as file:
            encoding, _ = tokenize.detect_encoding(file.readline)
        text = path.read_bytes().decode("utf-8" if encoding == "utf-8-sig" else encoding)
    except (OSError, SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return text, "utf-8" if encoding == "utf-8-sig" else encoding


def _write(path: Path, text: str, encoding: str) -> None:
    kept = path.with_name(f"{path.name}.orig")
    try:
        with create(kept) as file:
            file.write(path.read_bytes())
    except FileExistsError:
        raise ConfigError(f"{kept} exists, and --write would replace it. Move it away first.") from None
    replace_file(path, text.encode(encoding))


def _diff(old: str, new: str, path: Path) -> str:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path.name}", f"b/{path.name}"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _as_json(path: Path, made: MigratedScript, diff: str, status: int) -> str:
    shown = {
        "script": str(path),
        "kind": made.kind,
        "status": status,
        "diff": diff,
        "by_hand": [asdict(found) for found in made.by_hand],
        "notes": [asdict(found) for found in made.findings if not found.by_hand],
    }
    return json.dumps(shown, indent=2)


def _as_text(path: Path, made: MigratedScript, diff: str, written: bool) -> str:
    parts = [diff.rstrip("\n")] if diff else ["nothing to change"]
    notes = [found for found in made.findings if not found.by_hand]
    for title, findings in (("To do by hand:", made.by_hand), ("Notes:", notes)):
        if findings:
            parts.append("\n".join([title, *(_row(path, found) for found in findings)]))
    if diff and written:
        parts.append(f"{path} is changed; the old one is {path.name}.orig. Start it with: python -m fleet.launch")
    return "\n\n".join(parts)


def _row(path: Path, found: PortFinding) -> str:
    advice = f"\n    {found.todo}" if found.todo else ""
    return f"{path}:{found.line}: {found.what}\n    {found.why}{'.' if found.why[-1] not in '.:' else ''}{advice}"
