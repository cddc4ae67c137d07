"""Writes the Parquet files of a simulated shop; README.md describes them.

python examples/recommenders/simulate.py shop --users 20000 --days 7 --impressions 1000000 --seed 0
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from simulator.files import simulate, write_shop
from simulator.settings import Settings


def main() -> None:
    """Simulates, writes, and prints how much there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder for the files; it is made")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help=f"default: {field.default}")
    args = vars(parser.parse_args())
    folder = args.pop("folder")
    try:
        shop = simulate(Settings(**args))
        write_shop(shop, folder)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    shown = shop.shown
    counts = f"{shown.click.size} impressions, {shown.click.sum():.0f} clicks, {shown.purchase.sum():.0f} purchases"
    print(f"{folder}: {counts}")


if __name__ == "__main__":
    main()
