"""``python -m fleet.ps rollback FOLDER VERSION``: takes all readers of a folder back to a version, or lets them go."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from fleet.ps.publishing.versions import list_versions, publisher_folder, read_brake, release, roll_back

_ABOUT = """Takes every fleet.ps.Reader of FOLDER, where fleet.ps.publish writes, back to VERSION within a second; it
stays there until --release. Without VERSION it lists the versions that fleet.mark_version has made."""


def run(argv: Sequence[str]) -> int:
    """Rolls back, releases or lists; returns 0, or 2 for a wrong call. Raises FleetError where it cannot."""
    parser = argparse.ArgumentParser(prog="python -m fleet.ps rollback", description=_ABOUT)
    parser.add_argument("folder", metavar="FOLDER", help="the folder of fleet.ps.publish")
    parser.add_argument("version", metavar="VERSION", nargs="?", help="a name from the list")
    parser.add_argument("--release", action="store_true", help="let readers follow the newest rows again")
    try:
        arguments = parser.parse_args(list(argv))
        if arguments.release and arguments.version is not None:
            parser.error("--release takes no VERSION")
    except SystemExit as stop:
        return int(stop.code or 0)
    if arguments.release:
        left = release(arguments.folder)
        where = "had the newest rows already" if left is None else f"leave version {left!r} for the newest rows"
        print(f"readers of {arguments.folder} {where}")
    elif arguments.version is not None:
        found = roll_back(arguments.folder, arguments.version)
        print(f"readers of {arguments.folder} go back to version {found.name!r}, step {found.step}")
        if found.save is not None:
            print(f"fleet.load_model({found.save!r}) takes the training back to it")
    else:
        _list(arguments.folder)
    return 0


def _list(source: str) -> None:
    folder = publisher_folder("roll_back", source)
    braked = read_brake(folder)
    for version in list_versions(folder):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(version.marked_at))
        extras = [f"save {version.save}"] * (version.save is not None) + ["program"] * version.model
        here = ["<- readers are here"] * (version.name == braked)
        print(f"{version.name:20} {when}  step {version.step}  {', '.join(extras)} {' '.join(here)}".rstrip())
    if braked is None:
        print("readers have the newest rows")
