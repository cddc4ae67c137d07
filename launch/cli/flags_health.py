"""The flags of the health of workers: when one counts as hung, and how long a job may take to save itself."""

from __future__ import annotations

from typing import Any

HEALTH_FLAGS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    (
        "heartbeat_timeout",
        1800,
        "seconds without a finished step after which a worker counts as hung: its stack is shown, it is killed, and "
        "--max_restart applies; 0: never. Not given, only workers that all wait for each other are killed then, and "
        "others are reported",
        {"kind": "seconds", "env": ("FLEET_HEARTBEAT_TIMEOUT",)},
    ),
    (
        "preempt_grace",
        0,
        "seconds that SIGTERM to the launcher gives the workers to agree on a step, save a checkpoint and exit "
        "with 75; 0: they are ended at once",
        {"kind": "seconds", "env": ("FLEET_PREEMPT_GRACE",)},
    ),
)
