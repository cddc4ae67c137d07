"""checks: how often a job checks itself; ``fleet.checks`` holds the checks, this file their option."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import top_level


@top_level
@dataclass(frozen=True, kw_only=True)
class CheckSettings(Config):
    """How often the workers compare their copies and their losses."""

    in_ps_job = False

    check_every: int = setting(
        500,
        "updates between two comparisons of what the workers hold as copies (parameters, learning rates and step "
        "counts), and of the losses of workers along mp, sep and cp; the first 3 updates are compared, too. 0 compares "
        "none",
        at_least=0,
    )
