"""MemoryEstimate: what ``fleet.estimate_memory`` returns, and the table it prints."""

from __future__ import annotations

from dataclasses import dataclass, field

_MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory of one worker while it trains, in bytes.

    Each kind is the most that it takes at any time. The kinds are not largest at the same moment, so ``total_bytes``,
    the peak, is below their sum; ``at_peak`` says what the peak is made of.

    Attributes:
        parameters_bytes: this worker's parameters, and those it gathers from others for a while.
        buffers_bytes: buffers such as the running statistics of batch norm.
        gradients_bytes: gradients; with data parallel the buckets, which are the gradients.
        optimizer_state_bytes: momentum and the like, and what strategies keep from step to step.
        activations_bytes: the batch, and what forward makes, results and the loss included.
        communication_bytes: buffers of gathering, reducing and converting between workers.
        temporary_bytes: what backward and step() make and let go.
        total_bytes: the peak of the sum.
        at_peak: kind (``"parameters"`` and so on) to bytes at the moment of the peak; the values add up to the total.
        peak_phase: ``"setup"``, ``"forward"``, ``"backward"`` or ``"step"``.
        device: ``"cpu"`` or ``"cuda"``.
        world_size: number of workers.
        not_modelled: what the numbers leave out or may have wrong, in sentences; empty when there is nothing to say.
    """

    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int
    communication_bytes: int
    temporary_bytes: int
    total_bytes: int
    at_peak: dict[str, int]
    peak_phase: str
    device: str
    world_size: int
    not_modelled: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        """Returns the table, in MiB, and under it what is not modelled."""
        who = "the only worker" if self.world_size == 1 else f"one of {self.world_size} workers"
        lines = [f"Memory of {who} ({self.device}), in MiB", "", f"{'':<16}{'largest':>12}{'at the peak':>14}"]
        for kind, size in self.at_peak.items():
            largest = getattr(self, f"{kind}_bytes")
            lines.append(f"{kind.replace('_', ' '):<16}{largest / _MIB:>12.1f}{size / _MIB:>14.1f}")
        lines.append(f"{'peak':<16}{'':>12}{self.total_bytes / _MIB:>14.1f}  in {self.peak_phase}")
        if self.not_modelled:
            lines += ["", "Not in these numbers:", *(f"- {sentence}" for sentence in self.not_modelled)]
        return "\n".join(lines)
