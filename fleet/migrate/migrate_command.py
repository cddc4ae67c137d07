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

from fleet.errors import ConfigError

if TYPE_CHECKING:
    from fleet.migrate.script_edits import PortFinding
    from fleet.migrate.script_port import ScriptPort
    from fleet.migrate.script_source import ScriptSource

_BOM = "\ufeff"
_EPILOG = (
    "It reads scripts of Paddle Fleet (eager mode), Accelerate, DistributedDataParallel, and plain torch in one "
    "process. Exit status: 0 the whole script is moved, 1 the listed places need your hand, 2 it could not be read."
)


@dataclass(frozen=True)
class MigratedScript:
    """What became of a script.

    ``kind`` is what it was: "paddle", "accelerate", "ddp", "single" or "fleet". ``text`` is the new script.
    """

    kind: str
    text: str
    findings: list[PortFinding]

    @property
    def by_hand(self) -> list[PortFinding]:
        """The places that the user moves."""
        return [found for found in self.findings if found.by_hand]


def run(argv: Sequence[str]) -> int:
    """Prints the diff of a script and what was not moved; returns 0, 1 with places for hand work, 2 unreadable."""
    parser = argparse.ArgumentParser(prog="python -m fleet migrate", description=__doc__, epilog=_EPILOG)
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("--write", action="store_true", help="change the script, and keep the old one as SCRIPT.orig")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    try:
        arguments = parser.parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    path: Path = arguments.script
    old, encoding = _read(path)
    made = migrate(old, str(path))
    if arguments.write and made.text != old:
        _write(path, made.text, encoding)
    status = 1 if made.by_hand else 0
    diff = _diff(old, made.text, path)
    print(_as_json(path, made, diff, status) if arguments.json else _as_text(path, made, diff, arguments.write))
    return status


def migrate(text: str, name: str = "script.py") -> MigratedScript:
    """Returns the script ``text`` for this package; ``name`` is what errors call it.

    Raises ConfigError where libcst is missing, and where the text is not Python or no training script.

    Example:
        >>> migrate("from fleet import fleet").kind
        'fleet'
    """
    if find_spec("libcst") is None:
        raise ConfigError("migrate needs libcst, which is not installed: pip install 'torch-fleet[migrate]'.")
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
    """Returns what kind of script it is; raises ConfigError for one that trains nothing that is known here."""
    imported = source.imported()
    roots = {module.split(".")[0] for module in imported}
    distributed = ("torch.distributed", "torch.nn.parallel.DistributedDataParallel", "torch.multiprocessing")
    if "paddle" in roots:
        return "paddle"
    if "accelerate" in roots:
        return "accelerate"
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
        with kept.open("xb") as file:
            file.write(path.read_bytes())
    except FileExistsError:
        raise ConfigError(f"{kept} exists, and --write would replace it. Move it away first.") from None
    path.write_bytes(text.encode(encoding))


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
