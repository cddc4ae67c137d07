"""StorageTracker: the storages that are alive at each moment of a step, and their kinds.

[Note: Kinds]
A storage is recorded when an operation returns it and forgotten when nothing holds it any more, whether in Python or
in autograd's graph. Its last kind counts: a gradient is an anonymous result of backward until it is accumulated, so the
record of a run is read only after the run.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("parameters", "buffers", "gradients", "optimizer_state", "activations", "communication", "temporary")
# Forward makes activations; the results of other phases are temporary until they are marked.
PHASES = ("setup", "forward", "backward", "step")

_READS_A_VALUE = (torch.ops.aten._local_scalar_dense.default,)


@dataclass(eq=False)
class Block:
    """A piece of memory: its size and its kind, which may still change."""

    size_bytes: int
    kind: str


@dataclass(frozen=True)
class Usage:
    """The memory of a run: the most of each kind at any time, and each kind at the moment of the largest sum."""

    largest: dict[str, int]
    at_peak: dict[str, int]
    peak_bytes: int
    peak_phase: str


class StorageTracker(TorchDispatchMode):
    """Records the storages that operations make, while it is active; see [Note: Kinds].

    Args:
        device_type: storages on other devices are not recorded.
        rounding_bytes: allocations are multiples of this; torch's CUDA allocator uses 512.

    Attributes:
        phase: one of ``PHASES``, to which new records belong.
        saw_sparse: whether an operation returned a tensor without a storage, which is not counted.
    """

    def __init__(self, device_type: str, rounding_bytes: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "setup"
        self.saw_sparse = False
        self._device_type = device_type
        self._rounding_bytes = rounding_bytes
        self._blocks: dict[int, Block] = {}
        self._references: dict[int, Any] = {}
        self._events: list[tuple[Block, bool, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and records its results."""
        if func in _READS_A_VALUE and self.phase == "step":
            # Fake tensors have no values. Optimizers read their step count, and 1 is a count.
            return 1.0 if args[0].dtype.is_floating_point else 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return result

    def see(self, tensor: Tensor) -> Block | None:
        """Returns the block of ``tensor``, recorded when it is new; ``None`` where it is not counted."""
        if tensor.layout != torch.strided:
            self.saw_sparse = True
            return None
        if tensor.device.type != self._device_type:
            return None
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = Block(self.rounded(storage.nbytes()), self._usual_kind())
            self._references[key] = weakref.ref(storage, partial(self._forget, key, found))
            self._events.append((found, True, self.phase))
        return found

    def mark(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Sets the kind of the storages of ``tensors``."""
        for tensor in tensors:
            block = None if tensor is None else self.see(tensor)
            if block is not None:
                block.kind = kind

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Counts the storages of ``tensors`` as nothing; the caller holds blocks in their place."""
        for tensor in tensors:
            block = self.see(tensor)
            if block is not None:
                block.size_bytes = 0

    def hold(self, size_bytes: int, kind: str) -> Block:
        """Records memory that no tensor of this run stands for, until it is released."""
        block = Block(self.rounded(size_bytes), kind)
        self._events.append((block, True, self.phase))
        return block

    def release(self, block: Block) -> None:
        """Records the end of a held block."""
        self._events.append((block, False, self.phase))

    def pass_by(self, size_bytes: int, kind: str) -> None:
        """Records memory that is taken and given back at this moment."""
        self.release(self.hold(size_bytes, kind))

    def rounded(self, size_bytes: int) -> int:
        """Returns the memory of an allocation of ``size_bytes``."""
        return -(-size_bytes // self._rounding_bytes) * self._rounding_bytes

    def usage(self) -> Usage:
        """Returns the usage since the start."""
        now = dict.fromkeys(KINDS, 0)
        largest = dict(now)
        at_peak = dict(now)
        total = peak = 0
        peak_phase = "setup"
        for block, begins, phase in self._events:
            size = block.size_bytes if begins else -block.size_bytes
            now[block.kind] += size
            total += size
            largest[block.kind] = max(largest[block.kind], now[block.kind])
            if total > peak:
                peak = total
                at_peak = dict(now)
                peak_phase = phase
        return Usage(largest, at_peak, peak, peak_phase)

    def _usual_kind(self) -> str:
        # In backward, gradient mode is on only where a recomputed module runs forward again.
        is_forward = self.phase == "forward" or (self.phase == "backward" and torch.is_grad_enabled())
        return "activations" if is_forward else "temporary"

    def _forget(self, key: int, block: Block, reference: Any) -> None:
        # A new storage may already have the address of the old one.
        if self._references.get(key) is reference:
            del self._references[key], self._blocks[key]
        self._events.append((block, False, self.phase))
