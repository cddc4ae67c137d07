"""Report: what ``python -m fleet verify`` found, for the terminal, as JSON and for the page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["equal", "differs", "not_comparable"]

LOCAL = {
    "localsgd": "each worker updates by itself, and the parameters are averaged every k-th step",
    "adaptive_localsgd": "each worker updates by itself, and the parameters are averaged every k-th step",
    "dgc": "only the largest gradients are exchanged",
}  # options that train each worker by itself for a while
HALF = ("amp", "fp16_allreduce", "qat")  # options that round to 16 bits or fewer

EXIT_CODES: dict[Outcome, int] = {"equal": 0, "differs": 1, "not_comparable": 2}

CAUSES = (
    "sampler-without-set-epoch",
    "no-distributed-sampler",
    "batchnorm-statistics",
    "accumulation-loss-count",
    "dropout-seeded-alike",
    "parameter-in-no-optimizer",
    "tied-weights-apart",
    "gradients-clipped-per-part",
    "buffer-not-synchronised",
    "collective-on-one-rank",
    "learning-rate-scaled-twice",
    "model-in-evaluation-mode",
    "option-changed-nothing",
    "samples-left-out",
    "samples-seen-twice",
    "initial-weights-differ",
    "gradients-not-averaged",
    "gradients-summed",
    "gradients-changed-by-worker",
    "loss-over-own-batch",
    "optimizer-of-other-parameters",
    "loss-sum-instead-of-mean",
    "scheduler-stepped-unevenly",
    "ranks-take-different-numbers-of-steps",
    "unseeded-randomness",
    "bits-depend-on-processes",
    "unknown",
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One difference and its likely cause.

    ``cause`` is one of :data:`CAUSES`, ``sentence`` says it in words. ``expected`` is what one process had and
    ``received`` what the workers had: a number that stands for a tensor is its norm. ``step`` counts updates from 1,
    and 0 is before the first one. ``where`` is a place in the user's files, or ``""``.
    """

    cause: str
    sentence: str
    step: int | None = None
    rank: int | None = None
    module: str = ""
    tensor: str = ""
    expected: Any = None
    received: Any = None
    difference: float | None = None
    where: str = ""

    def __post_init__(self) -> None:
        if self.cause not in CAUSES:
            raise ValueError(f"{self.cause!r} is none of the causes of fleet.verify.report.CAUSES.")

    @property
    def is_of_norms(self) -> bool:
        """Whether ``expected`` and ``received`` are norms of a tensor; a loss and a rate are numbers of their own."""
        return bool(self.tensor) and self.tensor not in ("loss", "learning rate") and self.difference is not None


@dataclass(kw_only=True)
class Report:
    """The result of one comparison; the first finding is the first difference.

    ``warnings`` make no number wrong, and leave the outcome as it is.

    ``per_step`` has a row for each update: ``step``, ``loss_one``, ``loss_many``, and the largest relative differences
    ``outputs``, ``gradients`` and ``parameters`` (``None`` where nothing was compared). ``first`` has a row for each
    tensor that the first difference was found among: ``tensor``, and the norms ``expected`` and ``received``. ``about``
    says what was run: script, command, date, versions. Times are seconds.
    """

    outcome: Outcome
    steps: int
    workers: int
    tolerance: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    per_step: list[dict[str, Any]] = field(default_factory=list)
    first: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 equal, 1 differs, 2 could not be compared."""
        return EXIT_CODES[self.outcome]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as values that JSON has."""
        return {**asdict(self), "exit_code": self.exit_code}


def described_options(options: Iterable[str], why: str) -> dict[str, Any]:
    """Returns the tolerance of each of the ``options``, and the reason; ``why`` is the reason of the rest."""
    made = {}
    for name in options:
        if name in LOCAL:
            made[name] = {"tolerance": "differs by design", "why": LOCAL[name]}
        elif name in HALF:
            made[name] = {"tolerance": "16 bit", "why": "numbers are rounded to 16 bits or fewer"}
        else:
            made[name] = {"tolerance": "order of sums", "why": why}
    return made
