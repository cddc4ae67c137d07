"""Workers: the members of a job, the place of this worker among them, and the calls in which they meet.

It imports nothing of the library but private helpers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fleet.job.axes import Axes
from fleet.job.broken_exchange import UncaughtErrors, explained
from fleet.job.listener import Listeners
from fleet.job.logical_workers import LogicalWorkers
from fleet.job.roll_call import RollCall
from fleet.job.wrapped_model import WrappedModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fleet.role_maker.record import RoleRecord


def never() -> bool:
    """Returns False."""
    return False


@dataclass(eq=False, kw_only=True)
class Workers:
    """The workers of one job as this one sees them.

    Attributes:
        record: the role of this process.
        device: the device of this worker.
        collective: whether all workers take each step together; False in a job with parameter servers.
        process_group: the group of all workers; ``None`` in a single process, and with servers.
        meet_workers: runs the rendezvous of a job with servers; takes the device of the tensors to exchange.
        meet_at_server: returns whether all workers have met at a server, which they can in some jobs.
        axes: the place of this worker along every axis, and the process groups of axes.
        mesh: the workers by axis, one dim for each axis above 1; ``None`` where there is at most dp.
        models: the wrapped models, to which the session adds; errors name their parameters.
        num_steps: steps that distributed optimizers have made.
        listeners: the listeners of the job.
        logical: the logical workers of a reproducible job; ``None`` in any other.
        has_tables: whether parameter servers hold tables of it, or may do so later.
        closed: whether the job is over.
    """

    record: RoleRecord
    device: torch.device
    collective: bool = True
    process_group: dist.ProcessGroup | None = None
    meet_workers: Callable[..., dist.ProcessGroup] | None = None
    meet_at_server: Callable[[], bool] = never
    axes: Axes = field(default_factory=lambda: Axes({}, 0))
    mesh: DeviceMesh | None = None
    models: Sequence[WrappedModel] = ()
    num_steps: int = 0
    listeners: Listeners = field(default_factory=Listeners)
    logical: LogicalWorkers | None = None
    has_tables: bool = False
    closed: bool = False
    _host_group: dist.ProcessGroup | None = None
    _roll_call: RollCall | None = None
    _uncaught: UncaughtErrors | None = None

    # ---- who and where ----------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """Rank of this worker in the job."""
        return self.record.global_rank

    @property
    def world_size(self) -> int:
        """Number of workers in the job."""
        return self.record.world_size

    @property
    def local_rank(self) -> int:
        """Rank of this worker on its node."""
        return self.record.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of workers on this node."""
        return self.record.local_world_size

    @property
    def data_rank(self) -> int:
        """Which of :attr:`data_replicas` this worker belongs to; workers of one model copy have the same."""
        return self.axes.data_rank if self.collective else self.global_rank

    @property
    def data_replicas(self) -> int:
        """How many workers, or groups of workers that hold one model copy, train on different rows."""
        return self.axes.data_replicas if self.collective else self.world_size

    @property
    def who(self) -> str:
        """This worker, as messages begin."""
        place = self.axes.described() if self.collective else ""
        return f"[rank {self.global_rank} of {self.world_size}{f', {place}' if place else ''}]"

    # ---- with whom --------------------------------------------------------------------------------------------------

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """A process group that moves CPU tensors; the first access must come at the same point on every worker."""
        if self._host_group is None and self.meet_workers is not None:
            self._host_group = self.meet_workers()
        if self._host_group is None and self.process_group is not None:
            # A group of NCCL alone, which another library started, moves no CPU tensors.
            takes_cpu = "gloo" in dist.get_backend_config(self.process_group)
            self._host_group = self.process_group if takes_cpu else dist.new_group(backend="gloo")
        return self._host_group

    @property
    def has_group(self) -> bool:
        """Whether this worker shares a process group with others."""
        return self.process_group is not None or self._host_group is not None

    @property
    def roll_call(self) -> RollCall | None:
        """Where the workers compare the calls that all must make; None in a single process or without a group."""
        # Made at the first use: it starts a thread, and a job with servers has a store only once its workers have met.
        if self._roll_call is None and self.world_size > 1 and self.has_group and not self.closed:
            self._roll_call = RollCall.start(self.global_rank, self.world_size, lambda: self.num_steps)
            self._uncaught = UncaughtErrors(self.models, self._roll_call, self.who)
        return self._roll_call

    def meet(self, call: str) -> None:
        """Returns when every worker has made ``call``; raises when one does not, and says where it is."""
        if self.roll_call is not None:
            self.listeners.tell("workers_meet", call)
            self.roll_call.meet(call)

    def leave_roll_call(self) -> None:
        """Tells the others that this worker has ended."""
        if self._roll_call is not None and self._uncaught is not None:
            self._roll_call.close()
            self._uncaught.close()
            self._roll_call = self._uncaught = None  # they hold the store, whose server is a thread

    def release_groups(self) -> None:
        """Releases every process group."""
        self.process_group = self._host_group = self.mesh = None
        self.axes.release()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Turns a torch error inside the context into its explanation for the job."""
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise

    def explain(self, error: RuntimeError, model: WrappedModel | None = None) -> None:
        """Raises an explanation of torch's ``error`` for the job; returns where ``error`` says enough itself.

        ``model`` is the model that ran; by default all are looked at.
        """
        if meaning := explained(error, self.models if model is None else [model], self.roll_call, self.who):
            raise meaning from error

    def beat(self, pause: bool = False) -> None:
        """Reports that this worker is alive, and with ``pause`` that it may be silent until the next step."""
        self.listeners.tell("beat", pause)
