"""The sizes of the simulated shop."""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 10  # positions
DAY_S = 86_400
START_S = 1_735_689_600  # 2025-01-01, 00:00 UTC
TOPICS = 16
AGES = 6


@dataclass(frozen=True, slots=True)
class Settings:
    """How large the shop is.

    Attributes:
        users: people who visit.
        items: articles over all days; each is on sale on some of them.
        days: days; the last one is the test.
        impressions: rows, over all days.
        seed: decides everything: the same seed gives the same rows.

    Raises:
        ValueError: a number is too small for pages of different items, or for a day of training before the test.
    """

    users: int = 20_000
    items: int = 10_000
    days: int = 7
    impressions: int = 1_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"users": 1, "items": 500, "days": 2, "impressions": 100 * PAGE, "seed": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"--{name} {getattr(self, name)}: at least {value} is needed.")
