"""``python -m fleet checkpoint``: shows the content of a checkpoint, verifies it, and converts it to another format."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.checkpoint.conversion.formats import Format, known_formats, open_state
from fleet.checkpoint.storage import explained, is_remote, open_folder
from fleet.common.command_text import plain_text, typed
from fleet.errors import CheckpointError

if TYPE_CHECKING:
    from fleet.checkpoint.conversion.whole_state import WholeState

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def run(argv: Sequence[str]) -> int:
    """Runs ``show``, ``verify`` or ``convert``; returns 0, 1 when ``verify`` finds damage, 2 for a wrong call.

    Raises CheckpointError where a checkpoint cannot be shown or converted.
    """
    try:
        arguments = _parser().parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    commands = {"show": _show, "verify": _verify, "convert": _convert}
    return commands[arguments.command](arguments)


def _parser() -> argparse.ArgumentParser:
    titles = [one.title for one in known_formats() if one.title]
    description = f"{plain_text(__doc__)} {_listed(titles)} are recognised by what is in them."
    parser = argparse.ArgumentParser(prog=typed("checkpoint"), description=description)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print what a checkpoint holds, without reading its tensors")
    show.add_argument("path", help="file, folder, or address of a remote Fleet checkpoint")
    show.add_argument("--json", action="store_true", help="print it for a program")
    verify = commands.add_parser("verify", help="read all of it; exit status 1 and the reason when something is wrong")
    verify.add_argument("path", help="file, folder, or address of a remote Fleet checkpoint")
    convert = commands.add_parser("convert", help="write the same state in another format")
    convert.add_argument("source", help="what is read; its format is recognised")
    convert.add_argument("target", help="what is written; it must not exist")
    targets = _targets()
    endings = ", ".join(f"{one.to} for {_listed(one.suffixes)}" for one in targets.values() if one.suffixes)
    by_name = endings.replace(" for ", " for a name that ends with ", 1)
    convert.add_argument(
        "--to", choices=list(targets), help=f"format of TARGET; without it, {by_name}, otherwise {next(iter(targets))}"
    )
    convert.add_argument(
        "--key", help="of a SOURCE with several entries, the one to take; of one without, the entry it becomes (model)"
    )
    convert.add_argument(
        "--max-shard-size", metavar="SIZE", type=_size, help="of a file in an hf folder (default: 5GB)"
    )
    convert.add_argument("--map", metavar="FILE", help="YAML file: names of parameters in TARGET to those in SOURCE")
    convert.add_argument(
        "--in-order", action="store_true",
        help="an optimizer in SOURCE that numbers its parameters has them in the order of the model beside it",
    )  # fmt: skip
    return parser


def _targets() -> dict[str, Format]:
    """Returns the formats that can be written, by their names."""
    return {one.to: one for one in known_formats() if one.to}


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)", text.strip().upper())
    unit = found[2] if found else "?"
    unit += "B" if unit and not unit.endswith("B") else ""
    number = float(found[1]) * {**_UNITS, "B": 1}.get(unit, 0) if found else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 5GB or 500MB")
    return int(number)


def _show(arguments: argparse.Namespace) -> int:
    state = open_state(arguments.path)
    total = sum(one.num_bytes for one in state.tensors.values())
    if arguments.json:
        print(json.dumps(_as_json(state, total), indent=2))
        return 0
    print(f"{state.label}: {state.kind}")
    if state.job:
        print("saved by " + ", ".join(f"{name}={value}" for name, value in state.job.items()))
    for note in state.notes:
        print(note)
    rows = [_row(name, one, state) for name, one in state.tensors.items()]
    rows += [(alias, f"= {name}", "", "", "") for alias, name in state.aliases.items()]
    widths = [max([len(row[column]) for row in rows] or [0]) for column in range(4)]
    for row in rows:
        print("  " + "  ".join(text.ljust(width) for text, width in zip(row, (*widths, 0), strict=True)).rstrip())
    for name, value in state.values.items():
        text = json.dumps(value)
        print(f"  {name} = {text if len(text) <= 100 else f'{text[:97]}...'}")
    counts = f"{len(state.tensors)} tensors, {len(state.aliases)} second names, {len(state.values)} values"
    print(f"{counts}, {total:,} bytes of tensors")
    return 0


def _row(name: str, one: Any, state: WholeState) -> tuple[str, str, str, str, str]:
    count = state.pieces.get(name, 1)
    pieces = f"in {count} pieces" if count > 1 else ""
    return name, one.dtype, f"{list(one.shape)}", f"{one.num_bytes:,} bytes", pieces


def _as_json(state: WholeState, total: int) -> dict[str, Any]:
    return {
        "path": state.label,
        "kind": state.kind,
        "job": state.job,
        "tensors": {
            name: {
                "dtype": one.dtype, "shape": list(one.shape), "bytes": one.num_bytes,
                **({"pieces": state.pieces[name]} if name in state.pieces else {}),
            }
            for name, one in state.tensors.items()
        },
        "aliases": state.aliases,
        "values": state.values,
        "bytes": total,
        "notes": state.notes,
    }  # fmt: skip


def _verify(arguments: argparse.Namespace) -> int:
    try:
        state = open_state(arguments.path)
        wrong = state.damage()
    except CheckpointError as error:
        wrong = [f"{error}"]
    if wrong:
        for one in wrong:
            print(one, file=sys.stderr)
        return 1
    total = sum(one.num_bytes for one in state.tensors.values())
    how = (
        "every block matches its sum" if state.damage_of_files else "all were read; this format has no sums to compare"
    )
    print(f"{state.label}: {state.kind}, {len(state.tensors)} tensors, {total:,} bytes: {how}")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    target = arguments.target.removeprefix("file://")
    to = _target_format(arguments.to, target)
    is_file = Path(target).suffix in to.suffixes
    if not target:
        raise CheckpointError(f"convert: TARGET is {arguments.target!r}, which names nothing. Name a file or a folder.")
    # Everything about the target is refused before the source is opened, which may take minutes.
    if arguments.max_shard_size is not None and (not to.shard_bytes or is_file):
        divided = ", ".join(one.to for one in _targets().values() if one.shard_bytes)
        raise CheckpointError(f"--max-shard-size divides a folder of --to {divided}; here there is one file. Omit it.")
    if is_remote(target) and not to.commits:
        remote = ", ".join(one.to for one in _targets().values() if one.commits)
        raise CheckpointError(f"convert: {target!r} is remote; only --to {remote} writes there.")
    if open_folder(target).names() if is_remote(target) else os.path.lexists(target):
        raise CheckpointError(f"convert: {target!r} exists already. Name another target, or remove it first.")
    state = open_state(arguments.source, arguments.key, _name_map(arguments.map), arguments.in_order)
    if to.is_bare and not state.is_bare:
        state = state.only(_only_model(state, to))
    _write(state, target, to, arguments.max_shard_size)
    for note in state.notes:
        print(note)
    names = state.names_outside_values() if to.is_bare else list(state.tensors)
    total = sum(state.tensors[name].num_bytes for name in names)
    print(f"{target}: {to.to}, {len(names)} tensors, {total:,} bytes, from {state.kind}")
    return 0


def _target_format(name: str | None, target: str) -> Format:
    targets = _targets()
    if name is not None:
        return targets[name]
    by_suffix = (one for one in targets.values() if Path(target).suffix in one.suffixes)
    return next(by_suffix, next(iter(targets.values())))


def _only_model(state: WholeState, to: Format) -> str:
    keys = state.keys()
    with_tensors = list(dict.fromkeys(name.partition("/")[0] for name in state.tensors))
    if "model" in keys:
        return "model"
    if len(with_tensors) == 1:
        return with_tensors[0]
    raise CheckpointError(f"convert: {state.label} has the entries {keys!r}, of which {to.to} holds one: pass --key.")


def _name_map(path: str | None) -> Mapping[str, str] | None:
    if path is None:
        return None
    import yaml

    from fleet.common.limited_yaml import MAX_TEXT, LimitedLoader
    from fleet.common.plain_files import read_small

    try:
        node = LimitedLoader(read_small(path, MAX_TEXT).decode()).get_single_node()
    except OSError as error:
        raise CheckpointError(f"--map {path}: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"--map {path} is no YAML: {error}") from error
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    if not pairs or not all(isinstance(one, yaml.ScalarNode) for pair in pairs for one in pair):
        raise CheckpointError(f"--map {path}: each line is a name in TARGET, a colon, and the name in SOURCE.")
    found: dict[str, str] = {}
    for new, old in pairs:
        if new.value in found:
            raise CheckpointError(f"--map {path}: {new.value!r} stands there twice.")
        found[new.value] = old.value
    return found


def _write(state: WholeState, target: str, to: Format, shard_bytes: int | None) -> None:
    sizes = [shard_bytes or to.shard_bytes] if to.shard_bytes else []
    # A format that commits leaves nothing behind when it fails; the others write beside the target.
    try:
        with contextlib.nullcontext(target) if to.commits else _at_once(Path(target)) as path:
            to.load().write_state(state, path, *sizes)
    except (OSError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        text = explained(error) if isinstance(error, OSError) else f"{error}"
        raise CheckpointError(f"{target!r} was not written: {text.rstrip('.')}.") from error


@contextlib.contextmanager
def _at_once(target: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``target``, renamed to it at the end; after an error nothing is left."""
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}{target.suffix}")
    try:
        yield temporary
        os.rename(temporary, target)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise
