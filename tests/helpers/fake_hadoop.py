"""A stand-in for ``hadoop fs`` over a local folder, with failures on demand.

Started as ``hadoop fs [-Dkey=value ...] -command arguments``. The folder ``root`` beside ``bin`` is the file system;
``calls.log`` gets one line for each start; the first line of ``failures`` (``EXIT MESSAGE``, or ``hang``) is used up
by the next start.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]


def fail_on_demand() -> None:
    """Ends the process as the first line of ``failures`` says, once."""
    path = HOME / "failures"
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines:
        return
    path.write_text("\n".join(lines[1:]))
    if lines[0] == "hang":
        time.sleep(30)
    code, _, message = lines[0].partition(" ")
    if message:
        print(message, file=sys.stderr)
    sys.exit(int(code))


def place(path: str) -> Path:
    """Returns where a path of the file system really is."""
    return HOME / "root" / path.lstrip("/")


def say_absent(command: str, path: str) -> None:
    """Ends as Hadoop does for a path that does not exist."""
    print(f"{command}: `{path}': No such file or directory", file=sys.stderr)
    sys.exit(1)


def listing(path: str) -> None:
    """Prints a listing as ``hadoop fs -ls`` does."""
    real = place(path)
    entries = sorted(real.iterdir()) if real.is_dir() else [real]
    print(f"Found {len(entries)} items")
    for entry in entries:
        kind, size = ("drwxr-xr-x", 0) if entry.is_dir() else ("-rw-r--r--", entry.stat().st_size)
        name = f"{path.rstrip('/')}/{entry.name}" if real.is_dir() else path
        print(f"{kind}   3 user group {size:>10} 2026-01-01 00:00 {name}")


def copy(source: Path, target: Path) -> None:
    """Copies as ``-put`` and ``-get`` do: into a folder that exists, else to the name."""
    target = target / source.name if target.is_dir() else target
    shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)


def main() -> None:
    """Runs one command."""
    arguments = sys.argv[1:]
    with open(HOME / "calls.log", "a") as log:
        log.write("\t".join(arguments) + "\n")
    print("2026-01-01 00:00:00,000 WARN util.NativeCodeLoader: Unable to load native library", file=sys.stderr)
    fail_on_demand()
    assert arguments.pop(0) == "fs"
    command, *rest = [argument for argument in arguments if not argument.startswith("-D")]
    paths = [argument for argument in rest if not (argument.startswith("-") and len(argument) == 2)]
    first = place(paths[0])
    if command == "-test":
        sys.exit(0 if (first.is_dir() if rest[0] == "-d" else first.exists()) else 1)
    if command in ("-ls", "-cat", "-rm", "-mv", "-get") and not first.exists():
        say_absent(command[1:], paths[0])
    if command == "-ls":
        listing(paths[0])
    elif command == "-cat":
        sys.stdout.write(first.read_text())
    elif command == "-mkdir":
        first.mkdir(parents=True, exist_ok=True)
    elif command == "-touchz":
        first.touch()
    elif command == "-rm":
        shutil.rmtree(first) if first.is_dir() else first.unlink()
    elif command == "-mv":
        os.rename(first, place(paths[1]))
    elif command == "-put":
        copy(Path(paths[0]), place(paths[1]))
    elif command == "-get":
        if "-f" in rest:  # of Hadoop 3; 2.7 has -p, -ignoreCrc and -crc
            sys.exit("-get: Illegal option -f")
        if Path(paths[1]).is_file():
            sys.exit(f"get: `{paths[1]}': File exists")
        copy(first, Path(paths[1]))
    else:
        sys.exit(f"unknown command {command}")


if __name__ == "__main__":
    main()
