"""The whole life of a job on this node: say what will run, meet the others, run, restart, exit code.

The loop is the same on one node and on many::

    generation = membership.join(...)      who are the peers, and which of them are we
    specs      = plan_processes(...)       what this node starts
    result     = supervisor.run(specs)     how it ended here
    outcome    = membership.settle(result) what that means for the job

Everything that must not outlive the launcher is opened in :func:`run`, in the order in which it has to close.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fleet._addresses import means_itself, split_endpoint
from fleet.env import Environment
from fleet.errors import FleetError, LaunchError
from fleet.launch.cli.elastic import needs_etcd, split_hook
from fleet.launch.cli.texts import (
    announce,
    copy_command_lines,
    job_line,
    node_line,
    run_pod_line,
    start_messages,
    watching_pod_line,
)
from fleet.launch.membership.generation import (
    Alone,
    Generation,
    LeftJobError,
    Outcome,
    StoppedBySignalError,
    taken_name,
)
from fleet.launch.page.job_view import JobView
from fleet.launch.page.open_page import open_page
from fleet.launch.plan.interfaces import interface_to
from fleet.launch.plan.peers import peer_from_json, peer_to_json
from fleet.launch.plan.port_hold import hold_ports
from fleet.launch.plan.ports import make_peer
from fleet.launch.plan.process_plan import plan_processes
from fleet.launch.plan.records import GroupResult, LaunchConfig, Peer, ProcessSpec
from fleet.launch.processes.gpu_log import write_gpu_log
from fleet.launch.processes.guardian import MARK_VARIABLE, Guardian, make_mark
from fleet.launch.processes.hook import run_hook
from fleet.launch.processes.job_files import write_job_files
from fleet.launch.processes.log_folder import own_log_folder
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.profile_report import show_profile
from fleet.launch.processes.report import failure_report, first_failure_line, oom_kill_count
from fleet.launch.processes.signals import SignalInbox
from fleet.launch.processes.supervisor import Supervisor
from fleet.launch.processes.watch import open_watch
from fleet.launch.processes.worker_file import PREEMPTED

if TYPE_CHECKING:
    from fleet.launch.membership.engine import Engine

Membership: TypeAlias = "Alone | Engine"


def run(config: LaunchConfig, environment: Environment) -> int:
    """Runs the job of ``config`` on this node and returns the launcher's exit code.

    Args:
        config: what the user asked for, validated.
        environment: what the processes inherit.

    Returns:
        0 when every worker of the job ended with 0; the exit code of the process that failed first; 128 + the signal
        when one ended the launcher.
    """
    _open_standard_descriptors()
    mark = make_mark(config.pod_id, environment.inherited().get(MARK_VARIABLE))
    guardian = Guardian.start(mark)
    try:
        with (
            SignalInbox() as signals,
            _log_folder(config),
            _launch_log(config) as log,
            _scratch_folder(config),
            open_page(config, log) as view,
        ):
            supervisor = Supervisor(
                log=log,
                signals=signals,
                guardian=guardian,
                mark=mark,
                inherited=environment.inherited(),
                grace_s=config.grace_s,
            )
            code = _run_logged(config, environment, log, signals, supervisor, mark, view)
            if view is not None:
                view.ended(code)
            return code
    finally:
        guardian.dismiss()


def _open_standard_descriptors() -> None:
    """Fills closed standard descriptors, so that no pipe or socket of ours becomes somebody's standard output."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


@contextlib.contextmanager
def _log_folder(config: LaunchConfig) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(own_log_folder(config.log_dir, keep=not config.log_overwrite))
        except OSError as error:
            raise LaunchError(
                f"--log_dir {config.log_dir} cannot be written: {error.strerror}. Choose another folder."
            ) from error
        yield


@contextlib.contextmanager
def _launch_log(config: LaunchConfig) -> Iterator[LaunchLog]:
    log = LaunchLog(config.log_level, verbose="log_style" in config.given)
    try:
        try:
            log.open_file(config.log_dir / f"{config.job_id}.{config.pod_name}.log")
        except OSError as error:
            raise LaunchError(
                f"--log_dir {config.log_dir} cannot be written: {error.strerror}. Choose another folder."
            ) from error
        yield log
    finally:
        log.close()


@contextlib.contextmanager
def _scratch_folder(config: LaunchConfig) -> Iterator[None]:
    try:
        config.scratch_path.mkdir(mode=0o700, parents=True)
    except FileExistsError as error:  # its processes would be ended as ours
        raise LaunchError(taken_name(config.pod_id)) from error
    try:
        yield
    finally:
        shutil.rmtree(config.scratch_path, ignore_errors=True)


def _run_logged(
    config: LaunchConfig,
    environment: Environment,
    log: LaunchLog,
    signals: SignalInbox,
    supervisor: Supervisor,
    mark: str,
    view: JobView | None,
) -> int:
    """Runs the job; whatever ends it is said in the log, with the exit code as the last line."""
    announce(config, log)
    try:
        config, membership = _open_membership(config, environment, log, signals)
        try:
            with write_gpu_log(config, log):
                code = JobLoop(config, environment, log, signals, supervisor, membership, mark, view).run()
        finally:
            membership.close()
    except (StoppedBySignalError, LeftJobError) as error:
        log.info(f"{error}")
        code = error.exit_code
    except FleetError as error:
        log.error(f"{error}")
        code = error.exit_code if isinstance(error, LaunchError) else 1
    if config.profile:
        show_profile(config, log)
    log.info(f"Exit code {code}")
    return code


def _open_membership(
    config: LaunchConfig, environment: Environment, log: LaunchLog, signals: SignalInbox
) -> tuple[LaunchConfig, Membership]:
    if needs_etcd(config):
        from fleet.launch.membership.etcd_meeting import open_on_etcd

        return open_on_etcd(config, environment, log, signals)
    if config.max_nodes == 1 or config.static_peers or (config.servers and config.master is None):
        peers = tuple(peer_to_json(peer) for peer in config.static_peers)
        alone = Alone(max_restarts=config.group_restarts, peers=peers, node_rank=max(config.node_rank, 0))
        return config, alone
    from fleet.launch.membership.meeting import open_meeting

    meeting, master = open_meeting(config, log, signals)
    if config.master is None:
        lines = copy_command_lines(config, master, _secret_path(config))
        log.count_shown(len(lines))
        _print(lines)
    return config, meeting


def _secret_path(config: LaunchConfig) -> Path | None:
    """Returns a file of this user's with the job's secret where standard output may end up in one; None: it may not.

    A secret of the user's own is nowhere written.
    """
    if config.secret_is_users or (sys.stdout is not None and sys.stdout.isatty()):
        return None
    path = config.scratch_path / "secret"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{config.secret}\n")
    return path


def _print(lines: Sequence[str]) -> None:
    """Prints to standard output and not to the log: the copy command may hold the job's secret."""
    with contextlib.suppress(OSError):  # nobody reads; the job goes on
        print("\n".join(lines), flush=True)


class JobLoop:
    """Runs one generation after the other until the membership gives the exit code."""

    def __init__(
        self,
        config: LaunchConfig,
        environment: Environment,
        log: LaunchLog,
        signals: SignalInbox,
        supervisor: Supervisor,
        membership: Membership,
        mark: str,
        view: JobView | None = None,
    ) -> None:
        self._config, self._environment, self._log, self._signals = config, environment, log, signals
        self._supervisor, self._membership, self._mark, self._view = supervisor, membership, mark, view
        self._oom_kills_before = oom_kill_count()
        self._preempted = False
        self._restarts = 0

    def run(self) -> int:
        """Returns the exit code of the job."""
        is_first = True
        while True:
            outcome = self._run_generation(is_first)
            if self._signals.received and not self._preempted:
                # It came while the processes were being stopped for another reason.
                return 128 + self._signals.received[0]
            if not outcome.restart:
                return outcome.exit_code
            if self._signals.received:  # it came once the workers had saved themselves for another node
                return PREEMPTED
            is_first = False

    def _run_generation(self, is_first: bool) -> Outcome:
        config = self._config
        own = make_peer(config)
        with hold_ports(config, own) as held:
            generation = self._membership.join(peer_to_json(own))
            peers = [peer_from_json(data) for data in generation.peers]
            config = _with_interface(config, own, peers)
            specs = plan_processes(
                config, peers, generation.node_rank, generation.number, generation.restarts, self._environment
            )
            specs = [held.hand_on(spec) for spec in specs]
            self._announce_pod(generation, peers, specs, is_first)
            self._run_hook()
            held.release()
            result = self._supervisor.run(
                specs,
                news=self._membership.news,
                watch=open_watch(config, self._log, len(peers), self._view),
                ends_servers=not self._has_unknown_workers(),
                replacements=config.replacements,
                started=lambda: (self._log.opening if is_first else self._log.info)(watching_pod_line(config, specs)),
                ending=lambda result: self._membership.announce_end(result, _failure_line(result, own)),
            )
        self._preempted = result.preempted
        return self._settle(result, own)

    def _announce_pod(
        self, generation: Generation, peers: Sequence[Peer], specs: Sequence[ProcessSpec], is_first: bool
    ) -> None:
        config, own = self._config, peers[generation.node_rank]
        if is_first:
            self._log.opening(job_line(config, len(peers)))
            self._log.file_only(node_line(config, own.host, generation.node_rank))
            *tables, where = start_messages(config, specs) or [""]
            for table in tables:
                self._log.detail(table, prefix=False)
            if where:
                self._log.opening(where, prefix=False)
        elif generation.restarts != self._restarts:
            self._log.info(f"Restart {generation.restarts} of {config.max_restart}")
        else:
            size = "1 node" if len(peers) == 1 else f"{len(peers)} nodes"
            self._log.info(f"The job goes on with {size}; this one has rank {generation.node_rank}")
        self._restarts = generation.restarts
        if self._view is not None:
            self._view.begin(own.host, f"node {generation.node_rank} of {len(peers)}")
        write_job_files(config.log_dir, specs)
        say = self._log.opening if is_first else self._log.info
        say(run_pod_line(config, specs))

    def _run_hook(self) -> None:
        words = split_hook(self._config.elastic_pre_hook, "--elastic_pre_hook")
        if words:
            run_hook(words, {**self._environment.inherited(), MARK_VARIABLE: self._mark}, self._log, self._signals)

    def _has_unknown_workers(self) -> bool:
        """Whether workers of other launchers use this node's servers, and nobody tells when those are done."""
        return self._membership.news is None and not self._config.is_single_node

    def _settle(self, result: GroupResult, own: Peer) -> Outcome:
        outcome = self._membership.settle(result)
        if result.first_failure is not None:
            self._report(result, own, outcome)
        elif result.exit_code == 0 and outcome.exit_code == 0 and not result.interrupted:
            self._log.info("Pod completed")
        return outcome

    def _report(self, result: GroupResult, own: Peer, outcome: Outcome) -> None:
        assert result.first_failure is not None
        if outcome.restart:
            self._log.warning(_failure_line(result, own))
            if self._view is None:
                return
        report = failure_report(
            result.first_failure,
            role_size=_role_size(result.first_failure.spec),
            host=own.host,
            log_start_bytes=result.log_start_bytes,
            oom_kills=oom_kill_count() - self._oom_kills_before,
            ended_before=result.ended_before,
        )
        if self._view is not None:
            text = "\n".join(text for _, text in report)
            self._view.failed(result.first_failure, text, restarts=outcome.restart)
        for level, text in () if outcome.restart else report:
            if level:
                self._log.write(level, text)
            else:
                self._log.plain(text)


def _with_interface(config: LaunchConfig, own: Peer, peers: Sequence[Peer]) -> LaunchConfig:
    """Returns ``config`` with the interface at which the other nodes reach this one.

    Raises LaunchError when some nodes gave an address that means another machine on each.
    """
    if config.is_single_node:
        return config
    listed = [split_endpoint(endpoint, "the list")[0] for endpoint in (*config.servers, *config.workers)]
    hosts = list(dict.fromkeys([*(peer.host for peer in peers), *listed]))
    here = [host for host in hosts if means_itself(host)]
    if here and len(here) == len(hosts) and _meets_elsewhere(config):
        raise LaunchError(
            f"The nodes of the job meet at {config.master}, and all of them have the address {here[0]}, which means a "
            "different machine on each. Give each launcher --host=ADDRESS, at which the other nodes reach it."
        )
    if here and len(here) < len(hosts):
        raise LaunchError(
            f"The nodes of the job have the addresses {', '.join(hosts)}, and {here[0]} means a different machine on "
            "each. Give the launcher there --host=ADDRESS, at which the other nodes reach it."
        )
    return replace(config, interface=interface_to(own.host, [host for host in hosts if host != own.host]))


def _meets_elsewhere(config: LaunchConfig) -> bool:
    """Returns whether the master's address is no loopback one and nobody said that all nodes are on this machine."""
    if config.master is None or config.arguments.get("host") is not None:
        return False
    return "://" not in config.master and not means_itself(split_endpoint(config.master, "--master")[0])


def _failure_line(result: GroupResult, own: Peer) -> str:
    """Returns the sentence about the first failure; empty when there was none."""
    if result.first_failure is None:
        return ""
    return first_failure_line(result.first_failure, role_size=_role_size(result.first_failure.spec), host=own.host)


def _role_size(spec: ProcessSpec) -> int:
    """Returns how many processes of the role of ``spec`` the whole job has."""
    if spec.role == "worker":
        return int(spec.environment.get("PADDLE_TRAINERS_NUM", "1"))
    listed = {**spec.overflow, **spec.environment}.get("PADDLE_PSERVERS_IP_PORT_LIST", "")
    return len([endpoint for endpoint in listed.split(",") if endpoint]) or 1
