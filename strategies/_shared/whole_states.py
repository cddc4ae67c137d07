"""WholeStates: the whole state of a model whose parts lie on workers along mp and pp, and parts of a whole state.

[Note: One state for every mesh]
Names and shapes of a whole state do not depend on the mesh. A tensor that is divided (it has a :class:`Layout`) is
joined from its parts; a stage's entries travel along pp from the first stage that holds them, so a tied parameter,
which has one name on several stages, is there once; a DTensor of sharding is gathered first. One tensor travels at a
time: a worker holds its own part, the largest tensor, and what it keeps. Every worker of a group goes through the same
list, which is exchanged before, so nobody waits for an entry that another worker does not have.

[Note: Experts are stages too]
Workers along ep hold different experts under different names, as stages hold different layers. Where experts are
divided, "stage" below therefore means the place along pp and ep together, and an undivided entry is that of the first.

[Note: Order over stages]
With a pipeline the entries of all stages stand in the order of one process: names that begin with a number, the index
of the layer in the whole model, go by that number; others come before them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fleet.errors import CheckpointError
from fleet.job.axes import MODEL_AXES, Axes
from fleet.strategies._shared.exchanged_texts import broadcast_bits, gather_texts
from fleet.strategies._shared.parameter_layout import Layout, layouts_in
from fleet.strategies._shared.parts import is_part, local
from fleet.strategies._shared.through_host import full_tensor

_NUMBER = "value"  # the kind of an entry that is no tensor
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class WholeEntry:
    """One entry of a whole state.

    Attributes:
        name: its key, unique in the state.
        stage: the first stage that holds it.
        kind: torch's name of the type ("float32"), or "value" for what is no tensor.
        shape: of the whole tensor.
        value: what is no tensor.
    """

    name: str
    stage: int
    kind: str
    shape: tuple[int, ...] = ()
    value: Any = None

    @property
    def dtype(self) -> torch.dtype:
        """The type of the tensor."""
        found: torch.dtype = getattr(torch, self.kind)
        return found


class WholeStates:
    """Joins and cuts states on a mesh.

    Args:
        axes: the place of this worker.
        device: where tensors travel.
    """

    def __init__(self, axes: Axes, device: torch.device) -> None:
        self._axes, self.device = axes, device
        self._along = ("pp", "ep") if axes.experts else ("pp",)

    @property
    def stage(self) -> int:
        """The stage of this worker; see [Note: Experts are stages too]."""
        return self._axes.rank(*self._along)

    @property
    def has_stages(self) -> bool:
        """Whether workers hold different layers."""
        return self._axes.size(*self._along) > 1

    @property
    def has_experts(self) -> bool:
        """Whether workers hold different experts."""
        return bool(self._axes.experts)

    def is_divided(self, layouts: Iterable[Layout]) -> bool:
        """Returns whether a worker's own state is only a part, given the ``layouts`` in it."""
        return self.has_stages or any(layout.parts > 1 for layout in layouts)

    def place(self, layouts: Iterable[Layout], inner: Mapping[str, int] | None = None) -> dict[str, int] | None:
        """Returns which part of how many this worker holds, and along which axes; ``None`` where it holds all.

        ``inner`` is the same for the parts that sharding makes of it.
        """
        axes = [axis for axis in self._along if self._axes.size(axis) > 1]
        axes += sorted({layout.axis for layout in layouts if layout.parts > 1})
        if not axes:
            return None if inner is None else dict(inner)
        rank, degree = 0, 1
        for axis in axes:
            size = self._axes.size(axis)
            rank, degree = rank * size + self._axes.rank(axis), degree * size
        if inner is not None:
            rank, degree = rank * inner["degree"] + inner["rank"], degree * inner["degree"]
        return {"rank": rank, "degree": degree, **{axis: self._axes.size(axis) for axis in axes}}

    # ---- lists ------------------------------------------------------------------------------------------------------

    def said(self, what: Any) -> list[Any]:
        """Returns what a worker of each stage says, in the order of the stages; a collective call.

        Raises CheckpointError on every worker when the workers of one stage say different things.
        """
        together = self._along if self._axes.experts else MODEL_AXES
        group = self._axes.group(*together)
        text = json.dumps(what)
        if group is None:
            return [json.loads(text)]
        texts = gather_texts(text, group, self.device)
        found: dict[int, str] = {}
        for place, (rank, other) in enumerate(zip(self._axes.ranks(*together), texts, strict=True)):
            stage = place if self._axes.experts else self._axes.coordinate(rank).get("pp", 0)
            if found.setdefault(stage, other) != other:
                raise CheckpointError(
                    f"The workers of one copy of the model hold different entries: rank {rank} "
                    f"({self._axes.described(rank)}) differs from its peers along mp. Build the same layers on all of "
                    "them, and make the same steps."
                )
        return [json.loads(found[stage]) for stage in sorted(found)]

    def entries(self, state: Mapping[str, Any], layouts: Mapping[str, Layout]) -> list[WholeEntry]:
        """Returns the entries of the whole state that ``state`` is a part of, in order; a collective call."""
        own = [described(name, value, layouts.get(name), self.has_stages) for name, value in state.items()]
        found: dict[str, WholeEntry] = {}
        said = self.said(own)
        for stage, rows in enumerate(said):
            for name, kind, shape, value in rows:
                found.setdefault(name, WholeEntry(name, stage, kind, tuple(shape), value))
        return [found[name] for name in self.in_order(interleaved([[row[0] for row in rows] for rows in said]))]

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Returns ``names`` in the order of one process; see [Note: Order over stages]."""
        return in_layer_order(names) if self._axes.size("pp") > 1 else list(names)

    def names(self, module: nn.Module) -> list[str]:
        """Returns the names of the whole state of ``module``; with a pipeline a collective call."""
        own = list(module.state_dict())
        if not self.has_stages:
            return own
        return self.in_order(interleaved(self.said(own)))

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def gathered(self, own: Tensor | None, entry: WholeEntry, layout: Layout | None, keep: bool) -> Tensor | None:
        """Returns the whole tensor of ``entry`` on the host, ``None`` without ``keep``; a collective call.

        Args:
            own: this worker's part; ``None`` where its stage has none.
            entry: what is asked for.
            layout: of ``own``.
            keep: whether this worker wants it.
        """
        group = self._axes.group(*self._along)
        whole = None
        if self.joins(entry, own is not None, layout):
            assert own is not None
            whole = self._joined(own.detach(), layout, keep or group is not None)
        if group is not None:
            if whole is None:
                whole = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
            whole = whole.to(self.device).contiguous()
            broadcast_bits(whole, self._axes.ranks(*self._along)[entry.stage], group)
        return whole.to("cpu", copy=True) if keep and whole is not None else None

    def joins(self, entry: WholeEntry, is_held: bool, layout: Layout | None) -> bool:
        """Returns whether this worker's part of ``entry`` is needed: it is its stage's, or other workers join it."""
        return entry.stage == self.stage or (bool(self._axes.experts) and is_held and layout is not None)

    def _joined(self, own: Tensor, layout: Layout | None, wanted: bool) -> Tensor | None:
        """Returns the whole of ``own``: what sharding divided, then what ``layout`` did; a collective call."""
        if is_part(own):
            own = full_tensor(own)
        if layout is None or layout.parts == 1 or tuple(own.shape) != layout.shape:
            return own
        group, ranks = self._axes.group(layout.axis), self._axes.ranks(layout.axis)
        whole = torch.empty(layout.whole, dtype=own.dtype, device=self.device) if wanted else None
        for index, source in enumerate(ranks):
            is_mine = source == self._axes.global_rank
            part = own.to(self.device).contiguous() if is_mine else torch.empty_like(own, device=self.device)
            part = part.contiguous()
            broadcast_bits(part, source, group)
            if whole is not None:
                layout.put(part, whole, index)
        return whole

    def model(self, state: Mapping[str, Any], layouts: Mapping[str, Layout], keep: bool) -> dict[str, Any]:
        """Returns the whole state that ``state``, a module's own, is a part of; a collective call."""
        found: dict[str, Any] = {}
        for entry in self.entries(state, layouts):
            if entry.kind == _NUMBER:
                found[entry.name] = state.get(entry.name, entry.value)
                continue
            own, layout = state.get(entry.name), layouts.get(entry.name)
            found[entry.name] = self.gathered(own, entry, layout, keep)
        return found if keep else {}

    def misfit(self, state: Mapping[str, Any], entries: Sequence[WholeEntry]) -> str:
        """Returns why ``state`` is not a whole state with these ``entries``, or an empty string."""
        wanted = {entry.name: entry.shape for entry in entries if entry.kind != _NUMBER}
        missing = [name for name in wanted if not isinstance(state.get(name), Tensor)]
        strangers = [name for name, value in state.items() if isinstance(value, Tensor) and name not in wanted]
        shapes = [name for name in wanted if name not in missing and tuple(state[name].shape) != wanted[name]]
        found = [
            f"{what}: {names[:8]!r}"
            for what, names in (("missing", missing), ("not of this model", strangers), ("of another shape", shapes))
            if names
        ]
        return f"load_full_state_dict(): {'; '.join(found)}. It was saved from another model." if found else ""

    def parts_from(
        self, source: int, group: Any, state: Mapping[str, Any], own: Mapping[str, Any], layouts: Mapping[str, Layout],
        entries: Sequence[WholeEntry],
    ) -> Iterator[dict[str, Tensor]]:  # fmt: skip
        """Yields this worker's parts of the whole ``state`` of the rank ``source``, some at a time; a collective call.

        ``group`` is that of all workers.
        """
        held: dict[str, Tensor] = {}
        size = 0
        for entry in entries:
            if entry.kind == _NUMBER:
                continue
            if self._axes.global_rank == source:
                whole = state[entry.name].detach().to(self.device, entry.dtype).contiguous()
            else:
                whole = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
            broadcast_bits(whole, source, group)
            if entry.name not in own:
                continue
            part = cut(whole, layouts.get(entry.name))
            held[entry.name] = part.to(local(own[entry.name]).device)
            size += part.numel() * part.element_size()
            if size > _CHUNK_BYTES:
                yield held
                held, size = {}, 0
        yield held


def described(name: str, value: Any, layout: Layout | None, travels: bool = True) -> list[Any]:
    """Returns name, type, whole shape and value of an entry, as JSON can hold them; the value only if it ``travels``.

    Raises CheckpointError for a value that cannot travel.
    """
    if isinstance(value, Tensor):
        divided = layout is not None and tuple(value.shape) == layout.shape
        shape = layout.whole if layout is not None and divided else value.shape
        return [name, str(value.dtype).removeprefix("torch."), list(shape), None]
    if not travels or value is None or isinstance(value, bool | int | float | str):
        return [name, _NUMBER, [], value if travels else None]
    raise CheckpointError(
        f"full_state_dict(): the entry {name!r} is a {type(value).__name__}; tensors, numbers and texts can be "
        "gathered. Save what local_state_dict() returns on each worker."
    )


def cut(whole: Tensor, layout: Layout | None) -> Tensor:
    """Returns this worker's part of a ``whole`` tensor, a copy; without layout the tensor itself.

    Example:
        >>> cut(torch.arange(4), Layout("mp", 0, 2, 1, (4,)))
        tensor([2, 3])
    """
    if layout is None or layout.parts == 1 or tuple(whole.shape) != layout.whole:
        return whole
    return layout.part(whole)


def cut_state(state: Mapping[str, Any], layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """Returns ``state``, in which tensors that have a layout are whole or parts already, with parts."""
    return {
        name: cut(value, layouts.get(name)) if isinstance(value, Tensor) and not is_part(value) else value
        for name, value in state.items()
    }


def interleaved(lists: Sequence[Sequence[str]]) -> list[str]:
    """Returns the names of all ``lists`` once, each before what follows it in its list and after those of lists before.

    Example:
        >>> interleaved([["a", "experts.0", "b"], ["a", "experts.1", "b"]])
        ['a', 'experts.0', 'experts.1', 'b']
    """
    found = list(lists[0]) if lists else []
    for names in lists[1:]:
        known, place = set(found), len(found)
        for name in reversed(names):
            if name in known:
                place = found.index(name)
            else:
                found.insert(place, name)
    return found


def in_layer_order(names: Iterable[str]) -> list[str]:
    """Returns ``names``, those that begin with the index of a layer by that index, behind the others.

    Example:
        >>> in_layer_order(["10.weight", "2.weight", "2.bias", "shared.weight"])
        ['shared.weight', '2.weight', '2.bias', '10.weight']
    """

    def place(name: str) -> int:
        first = name.partition(".")[0]
        return int(first) if first.isdecimal() else -1

    return sorted(names, key=place)


def layouts_of(module: nn.Module) -> dict[str, Layout]:
    """Returns the layouts in ``module`` of what is divided among more than one worker, by name."""
    return {name: layout for name, layout in layouts_in(module).items() if layout.parts > 1}
