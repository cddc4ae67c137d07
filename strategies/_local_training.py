"""What localsgd and adaptive_localsgd have in common."""

from __future__ import annotations

from fleet.strategies._base import Values


def local_training_notes(option: str, options: Values, world_size: int) -> tuple[str, ...]:
    """Returns remarks on switches that have nothing to act on while ``option`` keeps gradients on their worker."""
    if world_size == 1:
        return (f"{option} changes nothing with one worker: there is nobody to average with.",)
    return tuple(
        f"{name} changes nothing while '{option}' is on: no gradient is exchanged."
        for name in ("fp16_allreduce", "use_hierarchical_allreduce")
        if options[name]
    )
