"""Orders: the actions of each stage of a pipeline as plain lists, and a proof that no stage waits forever.

Stage ``s`` of ``p`` has the chunks ``0 .. v - 1`` of the layers; chunk ``c`` of stage ``s`` is part ``c * p + s`` of
the model. Formulas and recorded orders: Narayanan et al., 2021, arXiv 2104.04473.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from fleet.errors import ConfigError


class MicroStep(NamedTuple):
    """A forward (``'f'``) or a backward (``'b'``) of one micro-batch through one chunk of a stage."""

    what: Literal["f", "b"]
    chunk: int
    micro: int


class StageStream(NamedTuple):
    """A one-way stream of messages between two stages: activations (``what`` is ``'f'``) or gradients (``'b'``)."""

    what: Literal["f", "b"]
    source: int
    target: int


def plan_order(
    num_stages: int, stage: int, num_micro: int, *, num_chunks: int = 1, mode: str = "1F1B"
) -> tuple[MicroStep, ...]:
    """Returns the actions of ``stage`` in one step, in order.

    Args:
        num_stages: how many stages there are.
        stage: the stage whose order is asked for.
        num_micro: how many micro-batches a step has; fewer than stages are allowed.
        num_chunks: chunks of layers per stage; above 1 the order is interleaved.
        mode: ``'1F1B'`` starts backward as early as it can, ``'F-then-B'`` runs all forwards first.

    Example:
        >>> as_text(plan_order(2, 0, 3))
        'f0;f1;b0;f2;b1;b2;'
    """
    if num_chunks == 1:
        forwards = [(0, micro) for micro in range(num_micro)]
        backwards = list(forwards)
        warm_up = num_stages - 1 - stage
    else:
        rounds = list(_rounds(num_stages, num_micro))
        forwards = [(chunk, m) for micros in rounds for chunk in range(num_chunks) for m in micros]
        backwards = [(chunk, m) for micros in rounds for chunk in reversed(range(num_chunks)) for m in micros]
        # The warm-up of the interleaved schedule in the paper above.
        warm_up = 2 * (num_stages - 1 - stage) + (num_chunks - 1) * len(rounds[0])
        if num_micro < 2 * num_stages:
            mode = "F-then-B"  # too few to alternate
    if mode == "F-then-B":
        warm_up = len(forwards)
    warm_up = min(warm_up, len(forwards))
    order = [MicroStep("f", *at) for at in forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [MicroStep("f", *forward), MicroStep("b", *backward)]
    order += [MicroStep("b", *at) for at in backwards[len(forwards) - warm_up :]]
    return tuple(order)


def _rounds(num_stages: int, num_micro: int) -> Iterator[range]:
    """Yields the micro-batches that pass a chunk together; the first round takes the remainder by the stages, too."""
    first = min(num_micro, num_stages + num_micro % num_stages)
    yield range(first)
    for start in range(first, num_micro, num_stages):
        yield range(start, start + num_stages)


def as_text(order: Iterable[MicroStep], *, num_chunks: int = 1) -> str:
    """Returns the order as Fleet's ``get_static_scheduler()`` writes it: ``'f0;f1;b0;'``, ``'f0_vp0;'``."""
    return "".join(f"{a.what}{a.micro}{f'_vp{a.chunk}' if num_chunks > 1 else ''};" for a in order)


def channel_in(action: MicroStep, stage: int, num_stages: int, num_chunks: int) -> StageStream | None:
    """Returns the stream that brings the input of ``action``; ``None`` for data and for the loss."""
    part = action.chunk * num_stages + stage
    if action.what == "f":
        return None if part == 0 else StageStream("f", (part - 1) % num_stages, stage)
    return None if part == num_chunks * num_stages - 1 else StageStream("b", (part + 1) % num_stages, stage)


def channel_out(action: MicroStep, stage: int, num_stages: int, num_chunks: int) -> StageStream | None:
    """Returns the stream that carries the result of ``action``; ``None`` for outputs and gradients of the data."""
    part = action.chunk * num_stages + stage
    if action.what == "f":
        return None if part == num_chunks * num_stages - 1 else StageStream("f", stage, (part + 1) % num_stages)
    return None if part == 0 else StageStream("b", stage, (part - 1) % num_stages)


def plan_in_flight(num_stages: int, num_micro: int, num_chunks: int) -> int:
    """Returns how many messages of one stream may be on their way before their sender waits for the first.

    One is enough without chunks. With chunks the last stage runs ahead of the first, which takes its activations only
    after a whole round.
    """
    return 1 if num_chunks == 1 else len(next(_rounds(num_stages, num_micro)))


def peer_action(action: MicroStep, stage: int, num_stages: int) -> MicroStep:
    """Returns the action of the next stage that takes what ``action`` sends."""
    step = 1 if action.what == "f" else -1
    part = action.chunk * num_stages + stage + step
    return MicroStep(action.what, part // num_stages, action.micro)


def most_live(order: Sequence[MicroStep]) -> int:
    """Returns how many inputs a stage holds at most: those whose backward is still to come."""
    live = most = 0
    for action in order:
        live += 1 if action.what == "f" else -1
        most = max(most, live)
    return most


def check_orders(orders: Sequence[Sequence[MicroStep]], *, num_chunks: int = 1) -> None:
    """Raises ConfigError unless the orders of all stages, run together, end.

    Each forward and backward must occur once, a backward after its forward. The replay is strict about waiting: a
    message leaves only once its receiver has asked for it, a receiver asks for one message ahead, and a sender waits
    when :func:`plan_in_flight` messages of a stream have not left.
    """
    num_stages = len(orders)
    for stage, order in enumerate(orders):
        _check_complete(stage, order, orders[0])
    num_micro = sum(action.what == "f" for action in orders[0]) // num_chunks
    replay = _Replay(orders, num_chunks, plan_in_flight(num_stages, num_micro, num_chunks))
    while replay.advance():
        pass
    stuck = [(stage, orders[stage][at]) for stage, at in enumerate(replay.at) if at < len(orders[stage])]
    if stuck:
        where = "; ".join(f"stage {stage} at {as_text([action], num_chunks=num_chunks)}" for stage, action in stuck)
        raise ConfigError(f"The order of {num_stages} stages would wait forever: {where}")


def _check_complete(stage: int, order: Sequence[MicroStep], first: Sequence[MicroStep]) -> None:
    seen: set[MicroStep] = set()
    for action in order:
        if action in seen:
            raise ConfigError(f"Stage {stage} runs {as_text([action])} twice.")
        if action.what == "b" and action._replace(what="f") not in seen:
            raise ConfigError(f"Stage {stage} runs {as_text([action])} before its forward.")
        seen.add(action)
    if seen != set(first) or 2 * sum(a.what == "f" for a in order) != len(order):
        raise ConfigError(f"Stage {stage} does not run each forward and each backward of every micro-batch.")


class _Replay:
    """All stages at once: ``at`` is where each stands in its order."""

    def __init__(self, orders: Sequence[Sequence[MicroStep]], num_chunks: int, in_flight: int) -> None:
        self.at = [0] * len(orders)
        self._orders = orders
        self._num_chunks = num_chunks
        self._in_flight = in_flight
        self._streams: dict[StageStream, list[MicroStep]] = {}  # messages, each as the action that receives it
        self._taken: dict[StageStream, int] = {}

    def advance(self) -> bool:
        """Lets every stage do one action if it can; returns whether one did."""
        # A list, not a generator: any() would stop at the first stage that moves.
        return any([self._step(stage) for stage in range(len(self.at))])

    def _step(self, stage: int) -> bool:
        if self.at[stage] == len(self._orders[stage]):
            return False
        action = self._orders[stage][self.at[stage]]
        num_stages = len(self.at)
        source = channel_in(action, stage, num_stages, self._num_chunks)
        target = channel_out(action, stage, num_stages, self._num_chunks)
        if source is not None:
            sent = self._streams.get(source, [])
            taken = self._taken.get(source, 0)
            if len(sent) <= taken or sent[taken] != action:
                return False
        # A message has left when its receiver, which asks for one more than it has taken, has asked for it.
        waiting = 0 if target is None else len(self._streams.get(target, [])) - self._taken.get(target, 0) - 1
        if waiting >= self._in_flight:
            return False
        if source is not None:
            self._taken[source] = self._taken.get(source, 0) + 1
        if target is not None:
            self._streams.setdefault(target, []).append(peer_action(action, stage, num_stages))
        self.at[stage] += 1
        return True
