"""Entry policies: which ids are worth a row (``paddle.distributed.CountFilterEntry`` and its siblings)."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.errors import ConfigError

# A row's count lives in 31 bits of its index entry until the row is admitted.
MAX_COUNT = 2**31 - 2


@dataclass(frozen=True)
class CountFilterEntry:
    """Admits an id at its ``count_filter``-th push; until then pulls give zeros and pushes only count.

    The push that reaches the count is applied, so 0 and 1 both admit at once.
    """

    count_filter: int

    def __post_init__(self) -> None:
        value = self.count_filter
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"CountFilterEntry({value!r}): count_filter takes an integer.")
        if not 0 <= value <= MAX_COUNT:
            raise ConfigError(f"CountFilterEntry({value!r}): count_filter must lie in [0, {MAX_COUNT}].")

    def to_attr(self) -> str:
        """Returns the attribute string, ``count_filter_entry:10``."""
        return f"count_filter_entry:{self.count_filter}"


@dataclass(frozen=True)
class ProbabilityEntry:
    """Admits each id with the given probability, decided once by a hash of (table seed, id)."""

    probability: float

    def __post_init__(self) -> None:
        value = self.probability
        if not isinstance(value, float):
            raise ConfigError(f"ProbabilityEntry({value!r}): probability takes a float.")
        if not 0.0 < value < 1.0:
            raise ConfigError(f"ProbabilityEntry({value!r}): probability must lie strictly between 0 and 1.")

    def to_attr(self) -> str:
        """Returns the attribute string, ``probability_entry:0.1``."""
        return f"probability_entry:{self.probability}"


@dataclass(frozen=True)
class ShowClickEntry:
    """Names the inputs that carry the shows and clicks of each sample; every id is admitted."""

    show_name: str
    click_name: str

    def __post_init__(self) -> None:
        for name, value in (("show_name", self.show_name), ("click_name", self.click_name)):
            if not isinstance(value, str) or not value or ":" in value:
                raise ConfigError(f"ShowClickEntry: {name} is {value!r}; it takes the name of an input without ':'.")

    def to_attr(self) -> str:
        """Returns the attribute string, ``show_click_entry:show:click``."""
        return f"show_click_entry:{self.show_name}:{self.click_name}"


Entry = CountFilterEntry | ProbabilityEntry | ShowClickEntry


def entry_from_attr(text: str) -> Entry | None:
    """Returns the policy that an attribute string names; ``none`` and an empty string give ``None``.

    Raises:
        ConfigError: the text names no policy, or its arguments cannot be read.
    """
    kind, *parts = text.split(":")
    try:
        if kind in ("", "none") and not parts:
            return None
        if kind == "count_filter_entry" and len(parts) == 1:
            return CountFilterEntry(int(parts[0]))
        if kind == "probability_entry" and len(parts) == 1:
            return ProbabilityEntry(float(parts[0]))
        if kind == "show_click_entry" and len(parts) == 2:
            return ShowClickEntry(*parts)
    except ValueError as error:
        raise ConfigError(f"the entry {text!r} cannot be read: {error}") from None
    raise ConfigError(
        f"the entry {text!r} does not exist; count_filter_entry:n, probability_entry:p or show_click_entry:show:click."
    )
