"""LogicalWorkers: the V workers of a reproducible job, which its N processes host in turns.

[Note: Turns]
A job of V logical workers computes what V processes would, on any number N <= V of them. Process ``n`` hosts a block of
logical ranks and runs their batches one after the other: one batch is one turn, and one turn of each of the V makes a
round. A loop over ``ElasticSampler.batches`` or ``fleet.elastic.logical_ranks`` begins a turn with each of its items,
and ends it where the loop asks for the next one.

    process 0 hosts 0, 1, 2    turn 0  turn 1  turn 2 | turn 0 ...
    process 1 hosts 3, 4, 5    turn 3  turn 4  turn 5 | turn 3 ...
    process 2 hosts 6, 7       turn 6  turn 7         | turn 6 ...
                               ---- round 0 --------- | round 1

No state of a logical worker has to move when the number of processes changes. Its random numbers follow from the job's
seed, the round and its rank: the generators are started anew with each turn, and with a seed that all workers share
between two rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from fleet.common.derived_seeds import derived_seed, seed_generators
from fleet.errors import ConfigError


def hosted_ranks(num_logical: int, num_hosts: int, host: int) -> range:
    """Returns the logical ranks of ``host``: blocks that are as even as possible, the first ones larger.

    Example:
        >>> [list(hosted_ranks(8, 3, host)) for host in range(3)]
        [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    size, larger = divmod(num_logical, num_hosts)
    begin = host * size + min(host, larger)
    return range(begin, begin + size + (host < larger))


def hosted_blocks(num_logical: int, num_hosts: int) -> list[range]:
    """Returns the logical ranks of each host, see :func:`hosted_ranks`."""
    return [hosted_ranks(num_logical, num_hosts, host) for host in range(num_hosts)]


class LoopOverRanks:
    """A loop that goes over logical ranks, and not over batches."""


class LogicalWorkers:
    """The logical workers of a job, and whose turn it is on this process; see [Note: Turns].

    Args:
        num: the number of logical workers.
        num_hosts: the number of processes.
        host: the number of this process.
        rounds_per_update: the rounds whose gradients make one update.

    Attributes:
        ranks: the logical ranks of this process.
        seed: the job's seed, from which all random numbers follow.
        round: the number of rounds that have ended.
        first_round: the round with which the present update has begun.
        place: the index in ``ranks`` of the present turn, or between turns of the next one.
        count: the weight of the present batch in means over an update: 1, or as ``fleet.mean`` was told.
        is_counted: whether ``fleet.mean`` was told so, in this turn.
        is_open: whether a turn has begun and not ended.
        is_scheduled: whether a scheduler of torch has set learning rates since the present update began.
        order: a digest of the order of the samples, the same on all processes; 0 without a sampler.
        kernels: the processor, versions and threads on which the bits of this process depend, by name.
        loop: the data of the loop that ends the present turn.
        begins: called with the logical rank when a turn begins.
        ends: called when a turn ends; they may raise.
    """

    def __init__(self, num: int, num_hosts: int, host: int, rounds_per_update: int = 1) -> None:
        self.num = num
        self.num_hosts = num_hosts
        self.host = host
        self.rounds_per_update = rounds_per_update
        self.ranks = hosted_ranks(num, num_hosts, host)
        self.seed = torch.initial_seed()
        self.round = 0
        self.first_round = 0
        self.place = 0
        self.count = 1.0
        self.is_counted = False
        self.is_open = False
        self.is_scheduled = False
        self.order = 0
        self.kernels: dict[str, str] = {}
        self.loop: object = None
        self.begins: list[Callable[[int], None]] = []
        self.ends: list[Callable[[], None]] = []
        self._known_seed = self.seed  # of torch's generator, unless the script has seeded it since

    @property
    def rank(self) -> int:
        """The logical rank of the present turn, or between turns of the next one."""
        return self.ranks[self.place]

    @property
    def is_last(self) -> bool:
        """Whether the present turn is the last one of this process in its round."""
        return self.place == len(self.ranks) - 1

    @property
    def round_in_update(self) -> int:
        """The number of the present round in its update."""
        return (self.round - self.first_round) % self.rounds_per_update

    @property
    def is_at_update(self) -> bool:
        """Whether no gradients wait for an update: every logical worker has had equally many turns."""
        return self.place == 0 and not self.is_open and self.round_in_update == 0

    @property
    def is_amid_update(self) -> bool:
        """Whether the present turn is not the last one of an update."""
        ends_update = self.is_last and self.round_in_update == self.rounds_per_update - 1
        return self.is_open and not ends_update

    def begin_turn(self, loop: object) -> int:
        """Begins the next turn, which ``loop`` ends; returns its logical rank.

        Raises ConfigError in the middle of another turn.
        """
        if self.is_open:
            raise ConfigError(
                f"A batch of logical worker {self.rank} was asked for while the loop still has another one: with "
                "'reproducible' one loop at a time goes over sampler.batches(loader) or fleet.elastic.logical_ranks()."
            )
        rank = self.rank
        self.notice_seed()
        self.draw_from(self.seed, "turn", self.round, rank)
        self.loop = loop
        self.is_open = True
        self.count = 1.0
        self.is_counted = False
        self.is_scheduled &= bool(self.place or self.round_in_update)
        for begin in self.begins:
            begin(rank)
        return rank

    def end_turn(self) -> None:
        """Ends the present turn, if there is one: the loop asks for its next batch."""
        if not self.is_open:
            return
        # A loop that is given the logical rank may seed by it.
        is_seeded = torch.initial_seed() != self._known_seed and not isinstance(self.loop, LoopOverRanks)
        if self.is_amid_update and is_seeded:
            raise ConfigError(
                f"torch.manual_seed({torch.initial_seed()}) was called in the batch of logical worker {self.rank}, "
                "which completes no update. With 'reproducible' each batch draws numbers of its own from the job's "
                "seed; a seed that counts batches, or follows from the process, would make them depend on the number "
                "of processes. Call it before the loop, between epochs, or where fleet.update_loss(loss) has returned "
                "a number."
            )
        for end in self.ends:
            end()
        self.is_open = False
        self.loop = None
        self.place += 1
        if self.place == len(self.ranks):
            self.place = 0
            self.round += 1
            self._start_common()

    def notice_seed(self) -> None:
        """Makes the seed the job's that the script has given ``torch.manual_seed()`` between two rounds."""
        if self.place == 0 and not self.is_open and torch.initial_seed() != self._known_seed:
            self.seed = torch.initial_seed()
            self._known_seed = self.seed

    def draw_from(self, *parts: int | str) -> None:
        """Starts the generators of this process from a seed that follows from ``parts``."""
        self.notice_seed()
        seed_generators(derived_seed(*parts))
        self._known_seed = torch.initial_seed()

    def seed_of(self, *parts: int | str) -> int:
        """Returns a seed that follows from the job's and ``parts``."""
        self.notice_seed()
        return derived_seed(self.seed, *parts)

    def begin_loop(self) -> None:
        """Lets another loop begin; raises ConfigError in the middle of an update, where the one before was left."""
        # A loop may be left in the last turn of an update, after step().
        if self.is_open and self.is_last:
            self.end_turn()
        if self.is_open or self.place:
            raise ConfigError(
                "A loop over logical workers begins, and with 'reproducible' the one before was left after "
                f"{self.place + self.is_open} of {len(self.ranks)} batches of an update. Leave a loop at an update: "
                "where fleet.update_loss(loss) returns a number."
            )
        self.order = 0
        self.notice_seed()

    def leave_loop(self, loop: object) -> None:
        """Ends the last turn of an update where ``loop`` is left in it, so that later draws are common."""
        if self.loop is loop and self.is_open and self.is_last:
            # A batch without its step() is refused where the next loop begins.
            with suppress(ConfigError):
                self.end_turn()

    def state(self) -> dict[str, int]:
        """Returns the numbers from which the turns go on."""
        self.notice_seed()
        return {"logical_workers": self.num, "seed": self.seed, "round": self.round}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state`, at the beginning of a round."""
        self.seed = int(state["seed"])
        self.round = int(state["round"])
        self.first_round = self.round
        self.place = 0
        self.is_open = False
        self._start_common()

    def agree_on_seed(self, seed: int) -> None:
        """Takes ``seed``, which all processes have agreed on."""
        self.seed = seed
        self._known_seed = torch.initial_seed()

    def _start_common(self) -> None:
        """Starts the generators for what lies between two rounds: the same numbers on every process."""
        self._known_seed = torch.initial_seed()  # a seed that the script has set in a turn held for that turn
        self.draw_from(self.seed, "between", self.round)
