"""The layout of the mesh: CommunicateTopology (arithmetic on ranks) and HybridCommunicateGroup (the groups)."""

from __future__ import annotations

import itertools
import zlib
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fleet.errors import ConfigError, NotInitializedError, did_you_mean
from fleet.job.axes import AXES
from fleet.job.running import running_session

if TYPE_CHECKING:
    from fleet.job.session import Session

# Fleet's names of the axes in this class, and ours in the options.
_AXIS_NAMES = {"dp": "data", "pp": "pipe", "sharding": "sharding", "sep": "sep", "cp": "context", "mp": "model"}
_DEFAULT_NAMES = ("data", "pipe", "sharding", "sep", "context", "model")


class CommunicateTopology:
    """The ranks of a job as a grid with one dimension for each axis; ranks are consecutive along the last axis.

    Args:
        hybrid_group_names: the axes, outermost first.
        dims: the number of workers along each.

    Raises:
        ConfigError: the two do not match.

    Example:
        >>> CommunicateTopology(["data", "sharding"], [2, 2]).get_comm_list("data")
        [[0, 2], [1, 3]]
    """

    def __init__(
        self, hybrid_group_names: Sequence[str] = _DEFAULT_NAMES, dims: Sequence[int] = (1, 1, 1, 1, 1, 1)
    ) -> None:
        names = list(hybrid_group_names)
        sizes = list(dims)
        if len(names) != len(sizes) or len(set(names)) != len(names) or any(size < 1 for size in sizes):
            raise ConfigError(
                f"CommunicateTopology(hybrid_group_names={names!r}, dims={sizes!r}) takes different names and one "
                "number of at least 1 for each."
            )
        self._dims = dict(zip(names, sizes, strict=True))
        self.coordinate = namedtuple("Coordinate", names)  # type: ignore[misc]  # the names are known only here
        self._coordinates = list(itertools.starmap(self.coordinate, itertools.product(*(range(s) for s in sizes))))

    def get_hybrid_group_names(self) -> list[str]:
        """Returns the axes, the outermost first."""
        return list(self._dims)

    def get_dim(self, axis_name: str) -> int:
        """Returns the number of workers along an axis."""
        return self._dims[self._known(axis_name)]

    get_dim_size = get_dim

    def world_size(self) -> int:
        """Returns the number of workers."""
        return len(self._coordinates)

    def get_rank(self, **coordinate: int) -> int:
        """Returns the rank at a coordinate, given for every axis by name."""
        if set(coordinate) != set(self._dims):
            raise ConfigError(f"get_rank() takes a coordinate for each of {', '.join(self._dims)}, got {coordinate!r}.")
        for axis, place in coordinate.items():
            self._check_place(axis, place)
        return self._coordinates.index(tuple(coordinate[axis] for axis in self._dims))

    def get_coord(self, rank: int) -> Any:
        """Returns the coordinate of ``rank`` along each axis, as a named tuple."""
        if not 0 <= rank < self.world_size():
            raise ConfigError(f"get_coord(rank={rank!r}): ranks are 0 to {self.world_size() - 1}.")
        return self._coordinates[rank]

    def get_axis_list(self, axis_name: str, index: int) -> list[int]:
        """Returns the ranks whose coordinate along the axis is ``index``, in order."""
        place = list(self._dims).index(self._known(axis_name))
        self._check_place(axis_name, index)
        return [rank for rank, coordinate in enumerate(self._coordinates) if coordinate[place] == index]

    def get_comm_list(self, axis_name: str) -> list[list[int]]:
        """Returns the groups along an axis: ranks that differ only in their coordinate along it, in that order.

        The groups come in the order of their first ranks.
        """
        return self.get_fused_comm_list([axis_name])

    def get_fused_comm_list(self, axis_names: Sequence[str]) -> list[list[int]]:
        """Returns the groups along several axes taken as one."""
        places = [list(self._dims).index(self._known(axis)) for axis in axis_names]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(self._coordinates):
            others = tuple(at for place, at in enumerate(coordinate) if place not in places)
            groups.setdefault(others, []).append(rank)
        return list(groups.values())

    def get_fused_ranks(self, fused_axis: Sequence[str]) -> list[list[int]]:
        """Returns the groups along several axes taken as one; Fleet's name."""
        return self.get_fused_comm_list(fused_axis)

    def get_rank_from_stage(self, global_rank: int, **places: int) -> int:
        """Returns the rank with the coordinates of ``global_rank``, except for the axes named in ``places``."""
        return self.get_rank(**{**self.get_coord(global_rank)._asdict(), **places})

    def _known(self, axis_name: str) -> str:
        if axis_name not in self._dims:
            near = did_you_mean(str(axis_name), self._dims)
            raise ConfigError(f"The topology has no axis {axis_name!r}.{near} Axes: {', '.join(self._dims)}.")
        return axis_name

    def _check_place(self, axis_name: str, index: int) -> None:
        size = self._dims[self._known(axis_name)]
        if not 0 <= index < size:
            raise ConfigError(f"The axis {axis_name!r} has coordinates 0 to {size - 1}, got {index!r}.")


class ParallelMode:
    """The ways to train in parallel, as numbers of ``get_parallel_mode()``."""

    DATA_PARALLEL = 0
    TENSOR_PARALLEL = 1
    PIPELINE_PARALLEL = 2
    SHARDING_PARALLEL = 3
    SEGMENT_PARALLEL = 4


class _CallableNumber(int):
    """A rank that works both as Paddle's attribute ``group.rank`` and as torch's call ``group.rank()``."""

    def __call__(self) -> int:
        return int(self)


class CommunicateGroup:
    """A process group with Paddle's attributes; the calls of ``torch.distributed`` take it as a group.

    ``id`` is a number that is equal on all its workers.

    For code that needs torch's own object (``DistributedDataParallel``), pass ``process_group``, which is ``None`` in a
    single process after ``fleet.init()`` without ``is_collective=True``.
    """

    def __init__(self, ranks: Sequence[int], global_rank: int, process_group: dist.ProcessGroup | None) -> None:
        self.ranks = list(ranks)
        self.process_group = process_group
        self.nranks = self.world_size = len(self.ranks)
        # Not hash(): Python salts it for strings in every process, and workers must agree on the id.
        self.id = zlib.crc32(repr(self.ranks).encode())
        self.rank = _CallableNumber(self.get_group_rank(global_rank))

    def get_group_rank(self, rank: int) -> int:
        """Returns the index in this group of a rank of the job; -1 when it is outside."""
        return self.ranks.index(rank) if rank in self.ranks else -1

    def is_member(self) -> bool:
        """Returns True: a worker only gets the groups that it belongs to."""
        return True

    def __getattr__(self, name: str) -> Any:
        # A copy is looked at before it has attributes; without this check the lookup would recurse.
        if name.startswith("__") or "process_group" not in self.__dict__:
            raise AttributeError(name)
        if self.process_group is None:
            raise AttributeError(
                f"CommunicateGroup has no {name!r}: a single process has no process group, and nothing to exchange. "
                "Call torch.distributed where group.nranks > 1."
            )
        return getattr(self.process_group, name)

    @property  # type: ignore[misc]  # object's can be assigned
    def __class__(self) -> type:
        """The class for ``isinstance``: also ProcessGroup, which torch's collectives check their group for."""
        return CommunicateGroup if self.__dict__.get("process_group") is None else dist.ProcessGroup

    def __eq__(self, other: object) -> bool:
        other = other.process_group if isinstance(other, CommunicateGroup) else other
        # torch looks its groups up in dictionaries, and must find this one under the group inside.
        return other is self.process_group

    def __hash__(self) -> int:
        return hash(self.process_group)

    def __repr__(self) -> str:
        return f"CommunicateGroup(rank={int(self.rank)}, ranks={self.ranks})"


# The name of a group, and the axes of the mesh that it lies along.
_GROUPS: dict[str, tuple[str, ...]] = {
    **{fleet_name: (axis,) for axis, fleet_name in _AXIS_NAMES.items()},
    "expert": ("ep",),
    "moe_sharding": ("moe_sharding",),
    "cp_sharding": ("sharding",),
    "cp_mp": ("cp", "mp"),
    "dp_sep": ("dp", "sep"),
    "pp_mp": ("pp", "mp"),
}


class HybridCommunicateGroup:
    """This worker's coordinate along every axis of the mesh, and the process groups; ``fleet`` creates it.

    For each axis ``data``, ``model``, ``pipe`` (its group and rank: ``stage``), ``sharding``, ``sep`` and ``context``
    there is ``get_<axis>_parallel_rank()``, ``get_<axis>_parallel_world_size()``, ``get_<axis>_parallel_group()`` and
    ``get_<axis>_parallel_group_src_rank()``; the same for ``expert`` and ``moe_sharding``, the axes of the experts, and
    for the groups of two axes ``cp_sharding``, ``cp_mp``, ``dp_sep`` and ``pp_mp``. The group of an axis with degree 1
    is this worker alone. A group has ``nranks``, ``ranks`` and ``rank``; ``torch.distributed`` takes it.

    Where experts are divided, the context axis is a part of the sharding axis, as in Fleet: the getters of ``sharding``
    cover both, and ``with_context_parallel=True`` leaves the context axis out.

    Attributes:
        global_rank: the rank of this worker in the job.
        nranks: the number of workers.
        stage_id: this worker's stage of the pipeline.
        is_first_stage: whether that is the first.
        is_last_stage: whether that is the last.

    Args:
        topology: the layout of the running job.
        hybrid_configs: accepted.
        session: has the mesh, whose groups are used; ``None`` is the running one.

    Raises:
        ConfigError: ``topology`` differs from the layout of the job.

    Example:
        >>> group = fleet.get_hybrid_communicate_group()
        >>> dist.all_reduce(tensor, group=group.get_sharding_parallel_group())
    """

    # The getters of each group, which _add_getters makes.
    get_data_parallel_rank: Callable[[], int]
    get_data_parallel_world_size: Callable[[], int]
    get_data_parallel_group: Callable[[], CommunicateGroup]
    get_data_parallel_group_src_rank: Callable[[], int]
    get_pipe_parallel_rank: Callable[[], int]
    get_pipe_parallel_world_size: Callable[[], int]
    get_pipe_parallel_group: Callable[[], CommunicateGroup]
    get_pipe_parallel_group_src_rank: Callable[[], int]
    get_sharding_parallel_group: Callable[[], CommunicateGroup]
    get_sharding_parallel_group_src_rank: Callable[[], int]
    get_sep_parallel_rank: Callable[[], int]
    get_sep_parallel_world_size: Callable[[], int]
    get_sep_parallel_group: Callable[[], CommunicateGroup]
    get_sep_parallel_group_src_rank: Callable[[], int]
    get_context_parallel_rank: Callable[[], int]
    get_context_parallel_world_size: Callable[[], int]
    get_context_parallel_group: Callable[[], CommunicateGroup]
    get_context_parallel_group_src_rank: Callable[[], int]
    get_model_parallel_rank: Callable[[], int]
    get_model_parallel_world_size: Callable[[], int]
    get_model_parallel_group: Callable[[], CommunicateGroup]
    get_model_parallel_group_src_rank: Callable[[], int]
    get_expert_parallel_rank: Callable[[], int]
    get_expert_parallel_world_size: Callable[[], int]
    get_expert_parallel_group: Callable[[], CommunicateGroup]
    get_expert_parallel_group_src_rank: Callable[[], int]
    get_moe_sharding_parallel_rank: Callable[[], int]
    get_moe_sharding_parallel_group: Callable[[], CommunicateGroup]
    get_moe_sharding_parallel_group_src_rank: Callable[[], int]
    get_cp_sharding_parallel_rank: Callable[[], int]
    get_cp_sharding_parallel_world_size: Callable[[], int]
    get_cp_sharding_parallel_group: Callable[[], CommunicateGroup]
    get_cp_sharding_parallel_group_src_rank: Callable[[], int]
    get_cp_mp_parallel_rank: Callable[[], int]
    get_cp_mp_parallel_world_size: Callable[[], int]
    get_cp_mp_parallel_group: Callable[[], CommunicateGroup]
    get_cp_mp_parallel_group_src_rank: Callable[[], int]
    get_dp_sep_parallel_rank: Callable[[], int]
    get_dp_sep_parallel_world_size: Callable[[], int]
    get_dp_sep_parallel_group: Callable[[], CommunicateGroup]
    get_dp_sep_parallel_group_src_rank: Callable[[], int]
    get_pp_mp_parallel_rank: Callable[[], int]
    get_pp_mp_parallel_world_size: Callable[[], int]
    get_pp_mp_parallel_group: Callable[[], CommunicateGroup]
    get_pp_mp_parallel_group_src_rank: Callable[[], int]

    def __init__(
        self, topology: CommunicateTopology, hybrid_configs: Any = None, *, session: Session | None = None
    ) -> None:
        session = session or _running()
        _check_layout(topology, session.degrees)
        self._topology = topology
        self._session = session
        self._axes = session.job.axes
        self._alone: dist.ProcessGroup | None = None
        self.global_rank = session.job.global_rank
        self.nranks = session.job.world_size
        self.stage_id = self._axes.rank("pp")
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self._axes.size("pp") - 1

    def topology(self) -> CommunicateTopology:
        """Returns the layout of the ranks."""
        return self._topology

    def get_hybrid_group_names(self) -> list[str]:
        """Returns the axes, the outermost first."""
        return self._topology.get_hybrid_group_names()

    def get_global_rank(self) -> int:
        """Returns the rank of this worker in the job."""
        return self.global_rank

    def get_parallel_mode(self) -> int | None:
        """Returns the :class:`ParallelMode` number of the innermost way of dividing the model that is in use.

        A job of one worker has none.
        """
        size = self._axes.size
        if size("pp") > 1:
            return ParallelMode.PIPELINE_PARALLEL
        if size("mp") > 1:
            return ParallelMode.TENSOR_PARALLEL
        if size("sep") > 1:
            return ParallelMode.SEGMENT_PARALLEL
        if size(*self._along("sharding")) > 1:
            return ParallelMode.SHARDING_PARALLEL
        if size("cp") > 1:
            return ParallelMode.SEGMENT_PARALLEL
        return ParallelMode.DATA_PARALLEL if size("dp") > 1 else None

    def get_check_parallel_group(self, sharding: bool = False) -> CommunicateGroup:
        """Returns the workers that must agree on whether a gradient is inf or nan, and on the norm of divided ones.

        Args:
            sharding: True takes the workers with this one's sharding coordinate, False those with its data coordinate.
        """
        apart = self._along("sharding") if sharding else ("dp",)
        return self._communicate_group(tuple(axis for axis in _AXIS_NAMES if axis not in apart))

    check_parallel_group = get_check_parallel_group

    def get_stage_id(self) -> int:
        """Returns this worker's stage of the pipeline."""
        return self.stage_id

    def get_num_stages(self) -> int:
        """Returns the number of stages of the pipeline."""
        return self._axes.size("pp")

    def get_p2p_groups(self) -> None:
        """Returns ``None``: torch's point-to-point operations need no two-rank groups."""
        return

    def get_rank_from_stage(self, stage_id: int, **places: int) -> int:
        """Returns the rank that is stage ``stage_id`` of this worker's pipeline."""
        return self._topology.get_rank_from_stage(self.global_rank, pipe=stage_id, **places)

    def create_fuse_group(self, fused_strategy_list: Sequence[str]) -> tuple[list[int], CommunicateGroup]:
        """Makes the groups along several axes taken as one; every worker calls it at the same point.

        Args:
            fused_strategy_list: the names of the axes in the topology, such as ``["data", "sharding"]``.

        Returns:
            The ranks of this worker's group, and the group.
        """
        lists = self._topology.get_fused_comm_list(fused_strategy_list)
        ranks = next(group for group in lists if self.global_rank in group)
        # Groups of one worker or of all exist without a collective call; every worker takes the same branch.
        if len(ranks) in (1, self.nranks):
            group = self._process_group(len(ranks))
        else:
            group, _ = dist.new_subgroups_by_enumeration(lists)
        return ranks, CommunicateGroup(ranks, self.global_rank, group)

    def rank(self, axis: str) -> int:
        """Returns the coordinate of this worker along ``axis``."""
        return self._axes.rank(*self._along(axis))

    def world_size(self, axis: str) -> int:
        """Returns the number of workers along ``axis``."""
        return self._axes.size(*self._along(axis))

    def ranks(self, axis: str) -> list[int]:
        """Returns the ranks of this worker's group along ``axis``."""
        return list(self._axes.ranks(*self._along(axis)))

    def communicate_group(self, axis: str) -> CommunicateGroup:
        """Returns this worker's group along ``axis``, with Paddle's attributes."""
        return self._communicate_group(self._along(axis))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Returns this worker's process group along ``axis``; ``None`` in a single process that is not collective.

        One worker may call it alone: every group of several workers was created when the job started.
        """
        return self.communicate_group(axis).process_group

    def get_sharding_parallel_rank(self, with_context_parallel: bool = False) -> int:
        """Returns this worker's coordinate along the sharding axis.

        Args:
            with_context_parallel: where experts are divided, leave the context axis out.
        """
        return self.rank("cp_sharding" if with_context_parallel else "sharding")

    def get_sharding_parallel_world_size(self, with_context_parallel: bool = False) -> int:
        """Returns the number of workers along the sharding axis.

        Args:
            with_context_parallel: where experts are divided, leave the context axis out.
        """
        return self.world_size("cp_sharding" if with_context_parallel else "sharding")

    def get_moe_sharding_parallel_world_size(self) -> int:
        """Returns the number of workers that hold the same experts; 0, as in Fleet, where experts are not divided."""
        return self.world_size("moe_sharding") if self._axes.experts else 0

    def _along(self, name: str) -> tuple[str, ...]:
        if name not in _GROUPS:
            near = did_you_mean(str(name), _GROUPS)
            raise ConfigError(f"The mesh has no axis {name!r}.{near} Axes: {', '.join(_GROUPS)}.")
        if name == "sharding" and self._axes.experts:
            return ("sharding", "cp")  # plan_experts() makes context a part of sharding
        return _GROUPS[name]

    def _communicate_group(self, axes: tuple[str, ...]) -> CommunicateGroup:
        ranks = self._axes.ranks(*axes)
        several = 1 < len(ranks) < self.nranks and self._session.job.process_group is not None
        group = self._axes.group(*axes) if several else self._process_group(len(ranks))
        return CommunicateGroup(ranks, self.global_rank, group)

    def _process_group(self, num_workers: int) -> dist.ProcessGroup | None:
        """Returns the group of all workers, or of this one alone."""
        job = self._session.job
        everyone = job.process_group
        if everyone is None and job.world_size == 1:
            return dist.group.WORLD  # of one process, in a collective job
        if everyone is None or num_workers == self.nranks:
            return everyone
        if self._alone is None:
            # Only this worker calls it: without local synchronization torch waits for all the others.
            made: Any = dist.new_group([self.global_rank], use_local_synchronization=True)
            self._alone = made
        return self._alone


def _add_getters() -> None:
    """Adds the getters of each group under Fleet's names."""
    for axis in _GROUPS:
        prefix = f"get_{axis}_parallel"

        # The axis is bound as a default: a closure would see the last one of the loop.
        def rank(self: HybridCommunicateGroup, _axis: str = axis) -> int:
            return self.rank(_axis)

        def world_size(self: HybridCommunicateGroup, _axis: str = axis) -> int:
            return self.world_size(_axis)

        def group(self: HybridCommunicateGroup, _axis: str = axis) -> CommunicateGroup:
            return self.communicate_group(_axis)

        def source(self: HybridCommunicateGroup, _axis: str = axis) -> int:
            return self.ranks(_axis)[0]

        found = {"rank": rank, "world_size": world_size, "group": group, "group_src_rank": source}
        for name, getter in found.items():
            getter.__name__ = f"{prefix}_{name}"
            # A getter that the class defines takes an argument more, or differs in its value.
            if getter.__name__ not in vars(HybridCommunicateGroup):
                setattr(HybridCommunicateGroup, getter.__name__, getter)


_add_getters()


def _running() -> Session:
    session = running_session()
    if session is None:
        raise NotInitializedError("HybridCommunicateGroup() needs a running job: call fleet.init(...) before it.")
    return session


def _check_layout(topology: CommunicateTopology, degrees: Mapping[str, int]) -> None:
    """Raises ConfigError unless ``topology`` lays the workers out as ``degrees`` do."""
    asked = [(name, topology.get_dim(name)) for name in topology.get_hybrid_group_names()]
    own = [(_AXIS_NAMES[axis], degree) for axis, degree in degrees.items()]
    # An axis of one worker moves no rank, so it may stand anywhere or be absent.
    found, expected = ({name: size for name, size in pairs if size > 1} for pairs in (asked, own))
    if list(found.items()) != list(expected.items()):
        raise ConfigError(
            f"HybridCommunicateGroup({found or 'one worker'}): the job is laid out as {expected or 'one worker'}. Set "
            "hybrid_configs and hybrid_parallel_order, and take fleet.get_hybrid_communicate_group()."
        )


def communicate_group(session: Session) -> HybridCommunicateGroup:
    """Returns the coordinates of this worker in the mesh of ``session``.

    Raises NotInitializedError in a parameter-server job, which has no mesh.
    """
    if not session.degrees:
        raise NotInitializedError(
            "fleet.get_hybrid_communicate_group() needs a collective job: fleet.init(is_collective=True)."
        )
    assert set(session.degrees) == set(AXES)
    names = [_AXIS_NAMES[axis] for axis in session.degrees]
    return HybridCommunicateGroup(CommunicateTopology(names, list(session.degrees.values())), session=session)
