"""Guard: scores the newest rows on held-out samples, and pulls the brake when the score falls."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fleet.errors import ConfigError
from fleet.ps.publishing.versions import Version, publisher_folder, read_brake, roll_back
from fleet.ps.serving.follow_thread import FollowThread, check_interval
from fleet.ps.serving.reader import Reader

Metric = Callable[[Reader], Any]
OnRollBack = Callable[[Version, float, float], object]
_LOG = logging.getLogger("FLEET")


class Guard:
    """Watches the rows in a publisher's folder; :func:`guard` makes one.

    Attributes:
        scores: the metric of each version when it was last computed, by name.
    """

    def __init__(self, metric: Metric, drop: float, source: str | os.PathLike[str], on_roll_back: OnRollBack) -> None:
        self._folder = publisher_folder("guard", source)
        self._metric = metric
        self._drop = drop
        self._on_roll_back = on_roll_back
        self._checking = threading.Lock()
        self._follower = FollowThread(self.check, "fleet.ps.guard: this check failed", "fleet-guard")
        self._said_unfit = False
        self.scores: dict[str, float] = {}

    def check(self) -> Version | None:
        """Scores the newest rows; returns the version that readers were taken back to, None where they stay.

        While a brake is on, by whomever, it does nothing.

        Raises:
            ConfigError: the metric returned no number.
            Exception: the metric's; nothing was decided.
        """
        with self._checking:
            self._follower.check()
            if read_brake(self._folder) is not None:
                return None
            with Reader(self._folder) as newest:
                value = self._value(newest)
                versions = {version.name: version for version in newest.versions}
            known = {name: self.scores[name] for name in versions if name in self.scores}
            self.scores = {name: known[name] if name in known else self._score(name) for name in versions}
            self._say_unfit()
            if self._best_above(value) is None:
                return None
            # The held-out samples may be others than when these were scored: now all see the same.
            self.scores = {name: self._score(name) for name in versions}
            value = self._score(None)
            best = self._best_above(value)
            if best is None or read_brake(self._folder) is not None:
                return None
            found = roll_back(self._folder, best)
            above = f"which is more than {self._drop:g} above" if math.isfinite(value) else "which is finite"
            _LOG.warning(
                "fleet.ps.guard: the newest rows have %.6g, version %r has %.6g, %s: readers of %s are taken back to "
                "it until fleet.ps.release.",
                value, best, self.scores[best], above, self._folder,
            )  # fmt: skip
        self._on_roll_back(found, value, self.scores[best])
        return found

    def follow(self, every_s: float = 60.0) -> Guard:
        """Calls :meth:`check` every ``every_s`` seconds in a thread, until :meth:`close`; returns this guard.

        An error of the metric, of reading or of ``on_roll_back`` is logged once, and the next round tries again.
        """
        check_interval("guard.follow", every_s)
        self._follower.start(every_s)
        return self

    def close(self) -> None:
        """Ends :meth:`follow`; a brake stays as it is."""
        self._follower.stop()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _best_above(self, value: float) -> str | None:
        """Returns the version with the best score, if ``value`` is more than the drop below it."""
        finite = {name: score for name, score in self.scores.items() if math.isfinite(score)}
        if not finite:
            return None
        best = max(finite, key=lambda name: (finite[name], list(finite).index(name)))  # of equal ones the newest
        return None if math.isfinite(value) and value >= finite[best] - self._drop else best

    def _say_unfit(self) -> None:
        """Warns once where there are versions and none has a finite metric."""
        if self.scores and not any(map(math.isfinite, self.scores.values())) and not self._said_unfit:
            self._said_unfit = True
            _LOG.warning(
                "fleet.ps.guard: the metric is finite for no version (%s), so nothing can be judged and no brake is "
                "pulled. Check the metric on a Reader of one.",
                ", ".join(f"{name!r}: {score:g}" for name, score in self.scores.items()),
            )

    def _score(self, name: str | None) -> float:
        with Reader(self._folder, version=name) as reader:
            return self._value(reader)

    def _value(self, reader: Reader) -> float:
        found = self._metric(reader)
        if not isinstance(found, str | bytes | bytearray):  # float() would read them
            with suppress(TypeError, ValueError):
                return float(found)
        raise ConfigError(
            f"fleet.ps.guard: the metric returned {found!r:.80}; it returns a number, the higher the better."
        )


def guard(
    metric: Metric,
    drop: float,
    source: str | os.PathLike[str],
    *,
    on_roll_back: OnRollBack | None = None,
) -> Guard:
    """Returns a guard that takes readers back to the best version when the newest rows fall below it.

    Each :meth:`Guard.check` computes the metric of the newest rows and of versions that it has not met yet. When the
    newest rows are more than ``drop`` below the best of the kept versions, all are scored again, on what the metric's
    samples are now; if it still holds, readers go back to the best one (:func:`fleet.ps.roll_back`), the log
    has both numbers, and ``on_roll_back`` is called. A metric that is not finite counts as a fall; where it is finite
    for no version, nothing can be judged, and the log says so once.

    Args:
        metric: called with a :class:`fleet.ps.Reader` of the rows to judge; returns a number, the higher the better,
            such as the AUC of a :class:`fleet.ps.Predictor` on held-out samples.
        drop: how far below the best version the newest rows may be, in the metric's unit, 0 or more.
        source: the folder of ``fleet.ps.publish``.
        on_roll_back: called with the version, the metric of the newest rows, and that of the version.

    Raises:
        ConfigError: an argument is wrong, or no publisher has written to the folder.

    Example:
        >>> def auc(reader):                                                             # doctest: +SKIP
        ...     return area(fleet.ps.Predictor("model", reader)(ids), labels)
        >>> guard = fleet.ps.guard(auc, 0.02, "rows").follow(every_s=10)                 # doctest: +SKIP
    """
    if not callable(metric) or not (on_roll_back is None or callable(on_roll_back)):
        raise ConfigError(
            f"fleet.ps.guard(metric={metric!r:.80}, on_roll_back={on_roll_back!r:.80}): metric is a function of a "
            "Reader, on_roll_back one of a version and two numbers, or None."
        )
    number = isinstance(drop, int | float) and not isinstance(drop, bool)
    if not number or not 0 <= drop < math.inf:
        raise ConfigError(f"fleet.ps.guard(drop={drop!r}) takes a number from 0: what the metric may lose.")
    return Guard(metric, float(drop), source, on_roll_back or (lambda *_: None))
