"""The facts of a demonstration, from its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from events import Event

REPLICAS = ("first", "second")
SETTLED_S = 2.0  # after the beginning of a day, until its first rows are published
Points = list[tuple[float, float]]


class Story:
    """What happened, in seconds since the first day of training began.

    Args:
        events: all of them, in time order.
        total_s: the whole demonstration, with the start of its processes.
    """

    def __init__(self, events: Sequence[Event], total_s: float) -> None:
        self.began = events[0]["at"]
        self.events = events
        self.total_s = total_s
        self.answers = self.of("answer")
        self.hits = self.of("hits")
        self.braked = [(brake["at"], self._after("released", brake["at"])) for brake in self.of("brake")]

    def of(self, kind: str) -> list[Event]:
        """Returns the events of a kind, with the seconds since the beginning as their time."""
        return [{**one, "at": one["at"] - self.began} for one in self.events if one["kind"] == kind]

    def points(self, kind: str, value: str, **only: Any) -> Points:
        """Returns a value of events over time, of those that have these facts."""
        chosen = [one for one in self.of(kind) if all(one[name] == wanted for name, wanted in only.items())]
        return [(one["at"], one[value]) for one in chosen]

    def bad_data(self) -> list[tuple[float, float]]:
        """Returns when the job trained on wrong impressions: until its day was marked, or it went back."""
        return [(begin, end) for begin, end, broken in self.days() if broken]

    def days(self) -> list[tuple[float, float, bool]]:
        """Returns when each day was trained, from and to, and whether its impressions were wrong."""
        ends = sorted(one["at"] for kind in ("marked", "went_back") for one in self.of(kind))
        return [
            (one["at"], next((end for end in ends if end > one["at"]), self.end()), one["broken"])
            for one in self.of("day")
        ]

    def end(self) -> float:
        """Returns the time of the last event."""
        return float(self.events[-1]["at"] - self.began)

    def back_s(self, replica: str) -> float:
        """Returns the seconds from the brake to the replica's first answer with the good version."""
        began, _ = self.braked[0]
        version = self.of("brake")[0]["version"]
        back = [one["at"] for one in self.answers if one["replica"] == replica and one["version"] == version]
        return float(next((at for at in back if at >= began), float("nan")) - began)

    def leaks(self) -> int:
        """Returns how many answers of a replica that was back had newer rows before the release."""
        found = 0
        for replica in {one["replica"] for one in self.answers}:
            for brake, (began, released) in zip(self.of("brake"), self.braked, strict=True):
                answers = [one for one in self.answers if one["replica"] == replica and began <= one["at"] < released]
                back = [one["version"] == brake["version"] for one in answers]
                found += back[back.index(True) :].count(False) if True in back else 0
        return found

    def facts(self) -> dict[str, str]:
        """Returns the figures, by their names."""
        latency = [one["ms"] for one in self.answers]
        training = [(begin + SETTLED_S, end) for begin, end, _ in self.days()]
        fresh = [
            one["age_s"]
            for one in self.answers
            if one["version"] is None and any(begin <= one["at"] < end for begin, end in training)
        ]
        recalls = [one["recall"] for one in self.hits]
        marked = [one["name"] for one in self.of("marked")]
        found = {
            "whole demonstration": f"{self.total_s:.0f} s",
            "versions marked": ", ".join(marked),
            "answers for one user": f"{len(latency)}, {_p50_p99(latency, 'ms')}",
            "age of their rows while a day is trained": _p50_p99(fresh, "s"),
            "index against the exact answer": f"recall {np.mean(recalls):.3f}, at least {min(recalls):.3f}",
        }
        for brake, (began, released) in zip(self.of("brake"), self.braked, strict=True):
            bad = [day for day, _ in self.bad_data() if day < began]
            found |= {
                "recall at the brake": f"{brake['value']:.3f}; version {brake['version']} has {brake['best']:.3f}",
                "wrong data to brake": f"{began - bad[-1]:.1f} s" if bad else "there was none",
                "brake to both replicas back": ", ".join(f"{self.back_s(one):.2f} s" for one in REPLICAS),
                "answers that were newer after that": str(self.leaks()),
                "brake to training back": f"{self._after('went_back', began) - began:.1f} s",
                "brake to release": f"{released - began:.1f} s",
            }
        last = [one for one in self.of("score") if one["version"] is None][-1]
        return found | {"recall at the end": f"{last['value']:.3f}"}

    def lines(self) -> list[str]:
        """Returns the figures as lines."""
        return [f"{name:>40}: {value}" for name, value in self.facts().items()]

    def _after(self, kind: str, at: float) -> float:
        return next((one["at"] for one in self.of(kind) if one["at"] >= at), self.end())


def _p50_p99(values: Sequence[float], unit: str) -> str:
    if not values:
        return "none"
    middle, most = np.percentile(values, [50, 99])
    return f"p50 {middle:.1f} {unit}, p99 {most:.1f} {unit}"
