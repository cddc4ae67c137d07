"""To a group: the workers of a job as the other end of a plan, in the place of a folder.

[Note: A gather]
Every worker posts the entries of its state, in order, and the boxes that it holds. The union is an index in which the
"file" of a piece is the rank of a worker. Then every worker goes through the same list: a piece that some worker keeps
and lacks is sent by its first holder. One piece travels at a time.

[Note: Errors of one worker]
A worker that fails between two posts says so in the next one, in which the others are: all of them raise. So what can
fail stands before a post, and nothing between a post and the sending that follows it.

[Note: Stages]
Workers along pp hold different layers, and workers along ep different experts under different names. "Stage" means the
place along pp, or along both where experts are divided. With a pipeline, names that begin with the index of a layer go
by that index; others come before them, as in one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.checkpoint.boxes import box_slices, copy_from
from fleet.checkpoint.index import Index, Piece, TensorEntry
from fleet.checkpoint.items import Item, SavedTensors, StateSource, Wanted
from fleet.errors import CheckpointError
from fleet.job.axes import MODEL_AXES, Axes
from fleet.strategies._shared.exchanged_texts import broadcast_bits, gather_texts
from fleet.strategies._shared.parameter_layout import Layout

VALUE = "value"  # the type of an entry that is not a tensor
# The workers of one copy of the model, with all shards of its parameters or their state.
_COPY_OF_SHARDS = ("pp", "sharding", "sep", "cp", "mp")


class ForeignError(CheckpointError):
    """A worker of a group has failed for another reason than the state; raised on all workers of the group."""


@contextmanager
def as_damage(name: str) -> Iterator[None]:
    """Raises CheckpointError where the block meets content of ``name`` that has another form than a save writes."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name} is damaged ({type(error).__name__}: {error})") from error


class StateGroup:
    """Workers that exchange states.

    Args:
        ranks: of the workers, in order; one rank alone exchanges nothing.
        group: their process group; ``None`` for the default one.
        device: where tensors travel.
    """

    def __init__(self, ranks: Sequence[int], group: Any, device: torch.device) -> None:
        self.ranks = tuple(ranks)
        self.group = group
        self.device = device
        self.rank = dist.get_rank() if len(ranks) > 1 else ranks[0]
        self._has_ended = False  # by an error that all workers know

    @classmethod
    def of_everyone(cls, device: torch.device) -> StateGroup:
        """Returns the group of all processes; of this process alone before the process group is started."""
        return cls(range(dist.get_world_size()) if dist.is_initialized() else (0,), None, device)

    def post(self, what: Any, error: Exception | None = None) -> list[Any]:
        """Returns the posts of all workers, JSON, in the order of the ranks; a collective call.

        Raises CheckpointError on every worker where one has an ``error``, ForeignError where it is no CheckpointError.
        """
        is_foreign = error is not None and not isinstance(error, CheckpointError)
        problem = "" if error is None else f"{type(error).__name__}: {error}" if is_foreign else f"{error}"
        text = json.dumps([problem, is_foreign, what])
        texts = [text] if len(self.ranks) == 1 else gather_texts(text, self.group, self.device)
        posts = [json.loads(found) for found in texts]
        for rank, (problem, is_foreign, _) in zip(self.ranks, posts, strict=True):
            if problem:
                # Every worker raises here, so together() must not post the error a second time.
                self._has_ended = True
                message = f"{problem.rstrip('.')} (worker {rank})." if len(self.ranks) > 1 else problem
                raise (ForeignError if is_foreign else CheckpointError)(message) from error
        return [posted for _, _, posted in posts]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs the block, which may post; an error of one worker is raised on all, see [Note: Errors of one worker]."""
        self._has_ended = False
        try:
            yield
        except Exception as error:
            if not self._has_ended and len(self.ranks) > 1:
                self.post(None, error)
            raise
        self.post(None)

    def to_first(self, own: Tensor | None, source: int, sizes: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Returns on the first worker the tensor that the worker ``source`` holds, ``None`` elsewhere.

        The worker's own tensor keeps its memory; others may be on the host.
        """
        first = self.ranks[0]
        if self.rank == first == source:
            return own
        if self.rank == source and own is not None and own.numel():
            sent = own.detach().to(self.device).contiguous()
            dist.send(sent.view(-1).view(torch.uint8), first, group=self.group)
        if self.rank != first:
            return None
        received = torch.empty(tuple(sizes), dtype=dtype, device=self.device)
        if received.numel():
            dist.recv(received.view(-1).view(torch.uint8), source, group=self.group)
        return received

    def gather(
        self, rows: Iterable[Sequence[Any]], items: Mapping[str, Item], posts: Sequence[dict[str, Any]]
    ) -> Iterator[Any]:
        """Yields the entries ``rows``: values, and whole tensors on the host, ``None`` for workers that keep none.

        A collective call; see [Note: A gather].

        Args:
            rows: see :func:`described`; in an order that is the same on every worker.
            items: this worker's items, by name.
            posts: the posts of all workers: ``stage``, ``entries``, ``boxes``, and whether they ``keep`` whole tensors.
        """
        index = _union(posts, self.ranks)
        keepers = {rank for rank, post in zip(self.ranks, posts, strict=True) if post["keep"]}
        for name, kind, _, value in rows:
            own = {(box.offsets, tuple(box.view.shape)): box.view for box in items[name].boxes} if name in items else {}
            yield value if kind == VALUE else self._whole(index.tensors[name], own, keepers)

    def _whole(self, entry: TensorEntry, own: Mapping[Any, Tensor], keepers: Collection[int]) -> Tensor | None:
        holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for piece in entry.pieces:
            holders.setdefault((piece.offsets, piece.sizes), []).append(int(piece.file))
        keeps = self.rank in keepers
        everything = ((0,) * len(entry.shape), entry.shape)
        # Where all keepers hold the whole, nothing travels. The copy keeps the result apart from training.
        if keeps and everything in own and set(keepers) <= {*holders.get(everything, ())}:
            return own[everything].detach().to("cpu", copy=True)
        dtype = getattr(torch, entry.dtype)
        whole = torch.empty(entry.shape, dtype=dtype, device="cpu") if keeps else None
        for (offsets, sizes), ranks in holders.items():
            numbers = own.get((offsets, sizes)) if self.rank in ranks else None
            place = None if whole is None else whole[box_slices(offsets, sizes)]
            # A broadcast is collective: all workers decide alike, by the holders and keepers that all know.
            if not set(keepers) <= {*ranks}:
                sent = self._piece(numbers if ranks[0] == self.rank else None, place, sizes, dtype)
                broadcast_bits(sent, ranks[0], self.group)
                numbers = sent if numbers is None else numbers
            if place is not None and numbers is not None and numbers is not place:
                place.copy_(numbers)
        return whole

    def _piece(self, own: Tensor | None, place: Tensor | None, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the tensor to send, or to receive into: ``place`` itself where a broadcast can write to it."""
        if own is not None:
            return own.detach().to(self.device).contiguous()
        if place is not None and place.is_contiguous() and self.device.type == "cpu":
            return place
        return torch.empty(tuple(sizes), dtype=dtype, device=self.device)


class StateMesh:
    """The place of this worker on the mesh of a job, as far as states go.

    Args:
        axes: the place.
        device: where tensors travel.
    """

    def __init__(self, axes: Axes, device: torch.device) -> None:
        self.axes = axes
        self.device = device
        self._along = ("pp", "ep") if axes.experts else ("pp",)

    @property
    def stage(self) -> int:
        """The stage of this worker; see [Note: Stages]."""
        return self.axes.rank(*self._along)

    @property
    def has_stages(self) -> bool:
        """Whether workers hold different layers or experts."""
        return self.axes.size(*self._along) > 1

    def is_divided(self, layouts: Iterable[Layout]) -> bool:
        """Returns whether a worker's own state is only a part, given the ``layouts`` in it."""
        return self.has_stages or any(layout.parts > 1 for layout in layouts)

    def place(self, layouts: Iterable[Layout], inner: Mapping[str, int] | None = None) -> dict[str, int] | None:
        """Returns rank and number of this worker's part, and its axes; ``None`` where it holds the whole.

        ``inner`` is the place of its shard among those into which sharding divides the part.
        """
        axes = [axis for axis in self._along if self.axes.size(axis) > 1]
        axes += sorted({layout.axis for layout in layouts if layout.parts > 1})
        if not axes:
            return None if inner is None else dict(inner)
        rank = 0
        degree = 1
        parts = [(self.axes.rank(axis), self.axes.size(axis)) for axis in axes]
        for place, size in [*parts, *([(inner["rank"], inner["degree"])] if inner is not None else [])]:
            rank = rank * size + place
            degree *= size
        return {"rank": rank, "degree": degree, **{axis: self.axes.size(axis) for axis in axes}}

    def copy_group(self, shards: Any = None) -> StateGroup:
        """Returns the workers that hold one copy of the model together; with experts, all workers.

        ``shards`` is the process group over which sharding divides the state; ``None`` where it does not.
        """
        if shards is not None and self.axes.size("sharding") == 1:  # of group_sharded_parallel(), beside the mesh
            return StateGroup(dist.get_process_group_ranks(shards), shards, self.device)
        along = tuple(self.axes.degrees) if self.axes.experts else _COPY_OF_SHARDS if shards else MODEL_AXES
        return StateGroup(self.axes.ranks(*along), self.axes.group(*along), self.device)

    def by_stage(self, posts: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the post of the first worker of each stage, in the order of the stages.

        Raises CheckpointError, alike on every worker, where workers of one stage and copy hold different entries.
        """
        posted = dict(zip(ranks, posts, strict=True))
        # With experts, workers of one copy rightly hold different entries.
        copies = [] if self.axes.experts else self.axes.all_ranks(*MODEL_AXES)
        for copy in copies:
            first: dict[int, Any] = {}
            for rank in (rank for rank in copy if rank in posted):
                what = [posted[rank]["entries"], posted[rank].get("groups")]
                if first.setdefault(posted[rank]["stage"], what) != what:
                    raise CheckpointError(
                        f"The workers of one copy of the model hold different entries: rank {rank} "
                        f"({self.axes.described(rank)}) differs from its peers along mp. Build the same layers on all "
                        "of them, and make the same steps."
                    )
        stages = {post["stage"]: post for post in reversed(posts)}
        return [stages[stage] for stage in sorted(stages)]

    def in_order(self, lists: Sequence[Sequence[str]]) -> list[str]:
        """Returns the names of all stages once, in the order of one process; see [Note: Stages]."""
        names = interleaved(lists)
        return in_layer_order(names) if self.axes.size("pp") > 1 else names

    def names(self, own: Sequence[str]) -> list[str]:
        """Returns the names of the whole state, given this stage's ``own``; with stages a collective call.

        Raises CheckpointError where the workers of one stage have different names.
        """
        if not self.has_stages:
            return list(own)
        group = self.copy_group()
        posts = group.post({"stage": self.stage, "entries": list(own)})
        return self.in_order([post["entries"] for post in self.by_stage(posts, group.ranks)])


def described(name: str, value: Any, item: Item | None, travels: bool = True) -> list[Any]:
    """Returns name, type, whole shape and value of an entry, as JSON holds them; the value only if it ``travels``.

    Raises CheckpointError for a value that cannot travel.
    """
    if item is not None:
        return [name, f"{value.dtype}".removeprefix("torch."), list(item.shape), None]
    if not travels or value is None or isinstance(value, bool | int | float | str):
        return [name, VALUE, [], value if travels else None]
    raise CheckpointError(
        f"full_state_dict(): the entry {name!r} is a {type(value).__name__}; tensors, numbers and texts can be "
        "gathered. Save what local_state_dict() returns on each worker."
    )


def boxes_of(items: Iterable[Item]) -> dict[str, Any]:
    """Returns the boxes of ``items`` by name, as JSON holds them."""
    return {item.name: [[list(box.offsets), list(box.view.shape)] for box in item.boxes] for item in items}


def _union(posts: Sequence[dict[str, Any]], ranks: Sequence[int]) -> Index:
    """Returns the index of the entries and boxes in all ``posts``.

    A box that several stages hold, as of a tied parameter, comes from the first stage.

    Raises CheckpointError where workers mean different tensors by one name, or no worker holds some part.
    """
    first: dict[tuple[str, str], int] = {}  # by name and box: the first stage that holds it
    for post in posts:
        for name, box in ((name, f"{box}") for name, boxes in post["boxes"].items() for box in boxes):
            first[name, box] = min(post["stage"], first.get((name, box), post["stage"]))
    records = []
    for rank, post in zip(ranks, posts, strict=True):
        record = Index()
        for name, kind, shape, _ in post["entries"]:
            if kind != VALUE:
                boxes = [box for box in post["boxes"][name] if first[name, f"{box}"] == post["stage"]]
                pieces = [Piece(f"{rank}", 0, tuple(at), tuple(sizes)) for at, sizes in boxes]
                record.tensors[name] = TensorEntry(kind, tuple(shape), pieces)
        records.append(record)
    return Index.merged(records)


def interleaved(lists: Sequence[Sequence[str]]) -> list[str]:
    """Returns the names of all ``lists`` once, in an order that keeps the order of each list.

    Example:
        >>> interleaved([["a", "experts.0", "b"], ["a", "experts.1", "b"]])
        ['a', 'experts.0', 'experts.1', 'b']
    """
    found = list(lists[0]) if lists else []
    for names in lists[1:]:
        known = set(found)
        place = len(found)
        # From the end: a new name goes right before the known name that follows it in its own list.
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


class GroupSource(StateSource):
    """A saved state that the first worker of a group reads for all of them; every call but ``entry`` is collective.

    Args:
        index: what the state holds, the same on every worker.
        path: how errors name the state.
        group: the workers.
        read: returns a whole tensor by its name, on the first worker.
        saved: the checkpoint on the first worker, where it lies in a folder.
    """

    def __init__(
        self, index: Index, path: str, group: StateGroup, read: Callable[[str], Tensor] | None = None,
        saved: SavedTensors | None = None,
    ) -> None:  # fmt: skip
        super().__init__(index, path)
        self._group = group
        self._saved = saved
        self._read = saved.whole if saved is not None else read

    def verify_all(self, wanted: Iterable[Wanted]) -> None:
        """Verifies, on the first worker, the tensors that any worker wants. Raises CheckpointError on all workers."""
        names = self._names(dict(self._in_order(wanted)))
        self._first(partial(_verify, names))

    def are_equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Returns for each of ``pairs`` whether the two tensors are equal."""
        everyones = [[tuple(pair) for pair in posted] for posted in self._group.post(list(pairs))]
        # Each worker may ask for other pairs, so the first worker compares those of all.
        asked = list(dict.fromkeys(pair for posted in everyones for pair in posted))
        found = dict(zip(asked, self._first(lambda saved: saved.are_equal(asked)) or (), strict=True)) if asked else {}
        return [found[pair] for pair in pairs]

    @torch.no_grad()
    def fill_all(self, wanted: Iterable[Wanted]) -> None:
        """Fills the boxes of all ``wanted``: one whole tensor after the other travels to all workers."""
        with self._group.together():
            mine = dict(self._in_order(wanted))
            for name in self._names(mine):
                entry = self.known(name)
                if self._read is not None:
                    whole = self._read(name).detach().to(self._group.device).contiguous()
                else:
                    whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=self._group.device)
                # The read may have failed on the first worker: this post tells the others before they wait for it.
                self._group.post(None)
                broadcast_bits(whole, self._group.ranks[0], self._group.group)
                copy_from(Piece("", 0, (0,) * whole.dim(), tuple(whole.shape)), whole, mine.get(name, []))

    def close(self) -> None:
        """Closes the files."""
        if self._saved is not None:
            self._saved.close()

    def _names(self, mine: Mapping[str, Any]) -> list[str]:
        """Returns the names that any worker wants, in the order of the index."""
        asked = {name for posted in self._group.post(list(mine)) for name in posted}
        return [name for name in self.index.tensors if name in asked]

    def _first(self, call: Callable[[SavedTensors], Any]) -> Any:
        """Returns the result of ``call`` on the first worker. Raises its error on all workers."""
        result = None
        error = None
        try:
            with as_damage(self._path):
                result = None if self._saved is None else call(self._saved)
        except Exception as caught:
            error = caught
        return self._group.post(result, error)[0]


def _verify(names: Iterable[str], saved: SavedTensors) -> None:
    for name in names:
        saved.verify(name)
