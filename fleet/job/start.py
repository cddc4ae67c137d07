"""start_session: from a role maker and options to a running session; checks everything before it starts anything."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fleet.checks.both_wrapped import BothWrapped
from fleet.checks.changed_parameters import ChangedParameters
from fleet.checks.copies import Copies
from fleet.checks.equal_states import EqualStates
from fleet.checks.exchanged_gradients import ExchangedGradients
from fleet.checks.one_loss import OneLoss
from fleet.checks.own_draws import OwnDraws
from fleet.checks.own_rows import OwnRows
from fleet.checks.raw_steps import RawSteps
from fleet.checks.same_job import SameJob
from fleet.checks.same_rows import SameRows, SameSequences
from fleet.checks.watched import Watched
from fleet.common.addresses import means_itself
from fleet.common.log import LOGGER, show_log
from fleet.elastic.health import start_health
from fleet.env import Environment
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.job.job import Job
from fleet.job.process_group import Meeting, is_in_group, start_group_of_one, start_process_group
from fleet.job.session import Session
from fleet.job.whereabouts import user_line
from fleet.options import DistributedStrategy
from fleet.profile.step_watch import StepWatch
from fleet.role_maker import PaddleCloudRoleMaker
from fleet.role_maker.record import Role
from fleet.strategies._declare.strategy_plan import Plan, plan
from fleet.trackers.run_log import RunLog
from fleet.training.batch_loops import BatchLoops
from fleet.training.update_mean import UpdateMeans

if TYPE_CHECKING:
    from fleet.role_maker import RoleMakerBase
    from fleet.role_maker.record import RoleRecord


_HOST = torch.device("cpu")


def start_session(
    role_maker: RoleMakerBase | None, collective: bool, options: DistributedStrategy, end_former: Callable[[], None]
) -> Session:
    """Returns the session of this process; its process group runs when there is more than one worker.

    ``end_former`` ends the session before, once the role and the options are known to be right.
    """
    role_maker = role_maker if role_maker is not None else PaddleCloudRoleMaker(is_collective=collective)
    record = role_maker.record
    collective = collective or role_maker.is_collective
    check_role(record, collective)
    # Without servers there is nothing for the parameter-server options to act on, whatever was passed.
    made = plan(options, record.world_size, collective=not record.server_endpoints)
    environment = Environment()
    device = torch.device("cpu") if record.kind is Role.SERVER else choose_device(record, environment)
    end_former()
    show_log()
    alone = record.world_size == 1 and not collective
    # With servers, the notes come with the optimizer and its strategy. A single process may still start a server later.
    for note in () if record.server_endpoints else made.notes:
        if not (alone and "belongs to the parameter server" in note):
            LOGGER.warning(note)
    say = LOGGER.info
    group = None if record.server_endpoints else _start_group(record, environment, device, collective)
    if record.global_rank == 0:
        LOGGER.info("fleet: %d worker(s), %s, started by %s; plan: %s", record.world_size, device, record.source, made)
    job = Job(
        record=record,
        collective=not record.server_endpoints,
        device=device,
        options=options,
        say=say,
        process_group=group,
        meet_workers=late_meeting(record, environment) if record.server_endpoints else None,
    )
    session = new_session(job, role_maker, made)
    if record.server_endpoints or alone:
        from fleet.ps_job.server_job import ServerJob  # collective jobs do not import the parameter server

        session.server_job = ServerJob(job, session.become_served)
        job.has_tables = True
    if record.with_gloo and record.kind is Role.WORKER:
        job.host_group  # noqa: B018  # the rendezvous happens now, as the environment asks
    return session


def _start_group(
    record: RoleRecord, environment: Environment, device: torch.device, collective: bool
) -> dist.ProcessGroup | None:
    """Returns the process group of all workers; ``None`` in a single process, where Fleet exchanges nothing."""
    if record.world_size > 1 or is_in_group():
        return start_process_group(meeting_of(record, environment, device), LOGGER.info)
    if collective:
        start_group_of_one()
    return None


def new_session(job: Job, role_maker: RoleMakerBase, made: Plan) -> Session:
    """Returns the session of ``job``; everything that listens to the job is there.

    They hear each point in this order: a clock starts before the checks of a step, and a step is measured before it is
    logged. SameJob compares the options of all workers before the session makes groups of them.
    """
    add = job.listeners.add
    add(SameJob(job))
    session = Session(job=job, role_maker=role_maker, plan=made)
    add(StepWatch(job))
    add(BatchLoops(job))
    watched = Watched(job)
    add(BothWrapped(job))
    add(watched)
    add(ChangedParameters(watched))
    states = EqualStates(watched)
    add(states)
    add(ExchangedGradients(watched, states.compare_optimizer))
    add(Copies(watched))
    add(OneLoss(job))
    add(RawSteps(watched))
    add(SameSequences(job))
    add(SameRows(job))
    add(OwnRows(job))
    add(OwnDraws(job))
    add(UpdateMeans(job))
    add(RunLog(job))
    start_health(job)
    return session


def late_meeting(record: RoleRecord, environment: Environment) -> Callable[..., dist.ProcessGroup] | None:
    """Returns the function that runs the rendezvous of a parameter-server job's workers; ``None`` on a server.

    The rendezvous is at PADDLE_MASTER or PADDLE_GLOO_HTTP_ENDPOINT, at the first operation on host arrays or, in
    hybrid training, in ``init_worker``. The group moves CPU tensors, and tensors of the device passed to the function.
    """
    if record.kind is not Role.WORKER or record.world_size == 1:
        return None
    if record.with_gloo and record.gloo_path is not None:
        raise UnsupportedOptionError(
            "PADDLE_GLOO_RENDEZVOUS is 2 (a shared folder), which is not supported in a parameter-server job. Use "
            "3 with PADDLE_GLOO_HTTP_ENDPOINT=host:port of worker 0."
        )
    master = environment.raw("PADDLE_MASTER") or record.master
    if master is None:
        return None
    met = replace(record, master=master)

    def meet(device: torch.device = _HOST) -> dist.ProcessGroup:
        # A launcher that restarts failed processes one by one keeps the generation, and so the keys.
        meeting = replace(meeting_of(met, environment, device), rejoins=True)
        place = user_line()
        if device == _HOST:
            meeting = replace(meeting, backend="gloo")
        return start_process_group(meeting, lambda line: LOGGER.info("%s joins the other workers: %s", place, line))

    return meet


def check_role(record: RoleRecord, collective: bool) -> None:
    """Raises ConfigError when the role cannot run here, or when the job would silently be smaller than requested."""
    if record.server_endpoints:
        if collective:
            raise ConfigError(
                "fleet.init(is_collective=True) was called with a role maker that has parameter servers "
                f"({','.join(record.server_endpoints)}). Use fleet.init(role_maker) or a collective role maker."
            )
        _check_platform(record)
        return
    if record.world_size > 1 and not collective:
        raise ConfigError(
            f"fleet.init() was called without is_collective=True, and {record.world_size} workers were started by "
            f"{record.source} with no parameter server. Call fleet.init(is_collective=True), or give it a role maker "
            "with is_collective=True."
        )
    _check_platform(record)


def _check_platform(record: RoleRecord) -> None:
    if (record.world_size > 1 or record.server_endpoints) and platform.system() == "Windows":
        raise UnsupportedOptionError(
            f"{record.world_size} workers were started on Windows; distributed training runs on Linux. "
            "One process works on Windows."
        )


def is_on_gpu(record: RoleRecord, environment: Environment) -> bool:
    """Whether the worker runs on a GPU: torch sees one, and the starter did not ask for gloo without assigning one.

    Several workers share a GPU through gloo with that GPU assigned.
    """
    return torch.cuda.is_available() and (record.backend != "gloo" or environment.has("FLAGS_selected_gpus"))


def choose_device(record: RoleRecord, environment: Environment) -> torch.device:
    """Returns the device of this worker, and makes it the current one.

    Raises ConfigError when torch cannot see the assigned GPU.
    """
    if not is_on_gpu(record, environment):
        return torch.device("cpu")
    selected = environment.list("FLAGS_selected_gpus")
    count = torch.cuda.device_count()
    if selected and not (selected[0].isdigit() and int(selected[0]) < count):
        raise ConfigError(
            f"FLAGS_selected_gpus is {selected[0]!r}, and torch sees {count} GPU(s), numbered from 0. "
            "Check CUDA_VISIBLE_DEVICES and --gpus."
        )
    index = int(selected[0]) if selected else record.local_rank % count
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def meeting_of(record: RoleRecord, environment: Environment, device: torch.device) -> Meeting:
    """Returns the rendezvous of the workers of ``record``."""
    if record.master is None:
        raise ConfigError(
            f"{record.world_size} workers were started by {record.source}, and no rendezvous address is set. "
            "Set PADDLE_MASTER=host:port, or MASTER_ADDR and MASTER_PORT."
        )
    if record.num_nodes > 1 and record.source in ("srun", "mpirun") and means_itself(record.master_host):
        raise ConfigError(
            f"{record.source} started the workers of {record.num_nodes} nodes, and the rendezvous address is "
            f"{record.master_host}, which is a different machine on each. Set MASTER_ADDR to the address or name of "
            "rank 0's node."
        )
    backend = record.backend if record.backend not in (None, "auto") else None
    if device.type == "cuda" and backend in (None, "nccl"):
        backend = "cpu:gloo,cuda:nccl"  # parts on the host, as of an offloaded optimizer, are exchanged, too
    return Meeting(
        global_rank=record.global_rank,
        world_size=record.world_size,
        host=record.master_host,
        port=record.master_port,
        backend=backend or "gloo",
        prefix=str(record.generation),
        agent_store=record.agent_store,
        wait_s=environment.float("FLAGS_stop_check_timeout"),
        operation_s=environment.float("PADDLE_PG_TIMEOUT") / 1000,
        device=device,
        num_nodes=record.num_nodes,
    )
