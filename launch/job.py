"""The whole life of a job on this node: announce the job, meet the others, run, restart, exit code.

The loop is the same on one node and on many::

    generation = membership.join(...)      the peers, and our place among them
    specs      = plan_processes(...)       the processes of this node
    result     = supervisor.run(specs)     how it ended here
    outcome    = membership.settle(result) restart, or the exit code

Everything that must not outlive the launcher is opened in :func:`run`, in the order in which it has to close.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fleet.common.addresses import means_itself, split_endpoint
from fleet.common.plain_files import create
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
    write_job_files,
)
from fleet.launch.membership.generation import (
    Alone,
    Generation,
    LeftJobError,
    StoppedBySignalError,
    taken_name,
)
from fleet.launch.page.job_view import JobView
from fleet.launch.page.page_server import open_page
from fleet.launch.plan.interfaces import interface_to
from fleet.launch.plan.peers import Peer, peer_from_json, peer_to_json
from fleet.launch.plan.ports import hold_ports, make_peer
from fleet.launch.plan.process_plan import plan_processes
from fleet.launch.plan.records import GroupResult, LaunchConfig, Note, ProcessSpec
from fleet.launch.processes.gpu_log import write_gpu_log
from fleet.launch.processes.guardian import MARK_VARIABLE, Guardian, make_mark
from fleet.launch.processes.logs import LaunchLog, is_one_place, own_log_folder
from fleet.launch.processes.profile_report import show_profile
from fleet.launch.processes.report import DETAIL, failure_report, first_failure_line, oom_kill_count
from fleet.launch.processes.signals import SignalInbox
from fleet.launch.processes.supervisor import Supervisor
from fleet.launch.processes.watch import open_watch
from fleet.launch.processes.worker_file import PREEMPTED
from fleet.launch.restarts import Outcome, RestartRule

if TYPE_CHECKING:
    from fleet.launch.membership.engine import Engine

import subprocess
from collections.abc import Mapping

Membership: TypeAlias = "Alone | Engine"
_LOOK_S = 0.5


def run(config: LaunchConfig, environment: Environment) -> int:
    """Runs the job of ``config`` on this node and returns the launcher's exit code.

    Args:
        config: the job, validated.
        environment: the variables that the processes inherit.

    Returns:
        0 when every worker of the job ended with 0; the exit code of the process that failed first; 128 + the signal
        when one ended the launcher.
    """
    _open_standard_descriptors()
    mark = make_mark(config.pod.id, environment.inherited().get(MARK_VARIABLE))
    # Before any thread: a fork beside threads may copy a lock that nobody will release.
    guardian = Guardian.start(mark)
    try:
        with (
            SignalInbox() as signals,
            _with_log_folder(config) as config,
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
                grace_s=config.processes.grace_s,
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
def _naming_log_dir(folder: Path) -> Iterator[None]:
    """Turns OSError into the error about ``--log_dir``."""
    try:
        yield
    except OSError as error:
        raise LaunchError(f"--log_dir {folder} cannot be written: {error.strerror}. Choose another folder.") from error


@contextlib.contextmanager
def _with_log_folder(config: LaunchConfig) -> Iterator[LaunchConfig]:
    """Yields ``config`` with the folder that its launcher writes in, with a note when it is not the asked one."""
    with contextlib.ExitStack() as stack:
        with _naming_log_dir(config.logs.folder):
            place = stack.enter_context(own_log_folder(config.logs.folder, keep=not config.logs.overwrites))
        if place != config.logs.folder:
            note = f"Another launcher writes its logs in {config.logs.folder}, so those of this one are in {place}."
            command = replace(
                config.command,
                arguments={**config.command.arguments, "log_dir": f"{place}"},
                notes=(Note(level="WARNING", text=note), *config.command.notes),
            )
            config = replace(config, logs=replace(config.logs, folder=place), command=command)
        yield config


@contextlib.contextmanager
def _launch_log(config: LaunchConfig) -> Iterator[LaunchLog]:
    log = LaunchLog(config.logs.level, verbose="log_style" in config.command.given)
    try:
        with _naming_log_dir(config.logs.folder):
            log.open_file(config.log_file)
        yield log
    finally:
        log.close()


@contextlib.contextmanager
def _scratch_folder(config: LaunchConfig) -> Iterator[None]:
    try:
        config.pod.scratch_path.mkdir(mode=0o700, parents=True)
    except FileExistsError as error:
        # A launcher with the same pod id has the folder: each would end the processes of the other as its own.
        raise LaunchError(taken_name(config.pod.id)) from error
    try:
        yield
    finally:
        shutil.rmtree(config.pod.scratch_path, ignore_errors=True)


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
    if config.logs.profile:
        show_profile(config, log)
    log.info(f"Exit code {code}")
    return code


def _open_membership(
    config: LaunchConfig, environment: Environment, log: LaunchLog, signals: SignalInbox
) -> tuple[LaunchConfig, Membership]:
    if needs_etcd(config):
        from fleet.launch.membership.etcd_meeting import open_on_etcd

        return open_on_etcd(config, environment, log, signals)
    if config.nodes.max == 1 or config.nodes.static_peers or (config.servers.endpoints and config.nodes.master is None):
        peers = tuple(peer_to_json(peer) for peer in config.nodes.static_peers)
        alone = Alone(rule=RestartRule.of(config), peers=peers, node_rank=max(config.nodes.rank, 0))
        return config, alone
    from fleet.launch.membership.meeting import open_meeting

    meeting, master = open_meeting(config, log, signals)
    if config.nodes.master is None:
        lines = copy_command_lines(config, master, _secret_path(config))
        log.count_shown(len(lines))
        _print(lines)
    return config, meeting


def _secret_path(config: LaunchConfig) -> Path | None:
    """Returns a file of this user's with the job's secret where standard output may end up in one; None: it may not.

    A secret of the user's own is nowhere written.
    """
    if config.pod.secret_is_users or (sys.stdout is not None and sys.stdout.isatty()):
        return None
    path = config.pod.scratch_path / "secret"
    with create(path, 0o600) as file:
        file.write(f"{config.pod.secret}\n".encode())
    return path


def _print(lines: Sequence[str]) -> None:
    """Prints to standard output and not to the log: the copy command may hold the job's secret."""
    # Standard output may be closed; the job goes on without the line.
    with contextlib.suppress(OSError):
        print("\n".join(lines), flush=True)


@dataclass
class JobLoop:
    """Runs one generation after the other until the membership gives the exit code."""

    config: LaunchConfig
    environment: Environment
    log: LaunchLog
    signals: SignalInbox
    supervisor: Supervisor
    membership: Membership
    mark: str
    view: JobView | None = None
    _oom_kills_before: int = field(default_factory=oom_kill_count)
    _preempted: bool = False
    _restarts: int = 0

    def run(self) -> int:
        """Returns the exit code of the job."""
        is_first = True
        while True:
            outcome = self._run_generation(is_first)
            if self.signals.received and not self._preempted:
                # It came while the processes were being stopped for another reason.
                return 128 + self.signals.received[0]
            if not outcome.restart:
                return outcome.exit_code
            # The signal came once the workers had saved themselves for another node: they can go on from there.
            if self.signals.received:
                return PREEMPTED
            is_first = False

    def _run_generation(self, is_first: bool) -> Outcome:
        config = self.config
        own = make_peer(config)
        # Chosen anew for each generation: another program may have taken a port since the last one.
        with hold_ports(config, own) as held:
            generation = self.membership.join(peer_to_json(own))
            peers = [peer_from_json(data) for data in generation.peers]
            config = _with_interface(config, own, peers)
            specs = plan_processes(
                config, peers, generation.node_rank, generation.number, generation.restarts, self.environment
            )
            specs = [held.hand_on(spec) for spec in specs]
            self._announce_pod(generation, peers, specs, is_first)
            self._run_hook()
            # The processes listen on the ports themselves; up to here no other launcher could choose them.
            held.release()
            result = self.supervisor.run(
                specs,
                news=self.membership.news,
                watch=open_watch(config, self.log, len(peers), self.view),
                ends_servers=not self._has_unknown_workers(),
                rule=RestartRule.of(config),
                started=lambda: (self.log.opening if is_first else self.log.info)(watching_pod_line(config, specs)),
                ending=lambda result: self.membership.announce_end(result, _failure_line(result, own)),
            )
        self._preempted = result.preempted
        return self._settle(result, own)

    def _announce_pod(
        self, generation: Generation, peers: Sequence[Peer], specs: Sequence[ProcessSpec], is_first: bool
    ) -> None:
        config = self.config
        own = peers[generation.node_rank]
        if is_first:
            self.log.opening(job_line(config, len(peers)))
            self.log.file_only(node_line(config, own.host, generation.node_rank))
            *tables, where = start_messages(config, specs) or [""]
            for table in tables:
                self.log.detail(table, prefix=False)
            if where:
                self.log.opening(where, prefix=False)
        elif generation.restarts != self._restarts:
            self.log.info(f"Restart {generation.restarts} of {config.elastic.max_restart}")
        else:
            size = "1 node" if len(peers) == 1 else f"{len(peers)} nodes"
            self.log.info(f"The job goes on with {size}; this one has rank {generation.node_rank}")
        self._restarts = generation.restarts
        if self.view is not None:
            self.view.begin(own.host, f"node {generation.node_rank} of {len(peers)}")
        write_job_files(config.logs.folder, specs)
        say = self.log.opening if is_first else self.log.info
        say(run_pod_line(config, specs))

    def _run_hook(self) -> None:
        words = split_hook(self.config.elastic.pre_hook, "--elastic_pre_hook")
        if words:
            run_hook(words, {**self.environment.inherited(), MARK_VARIABLE: self.mark}, self.log, self.signals)

    def _has_unknown_workers(self) -> bool:
        """Whether workers of other launchers use this node's servers, and nobody tells when those are done."""
        return self.membership.news is None and not self.config.nodes.is_single

    def _settle(self, result: GroupResult, own: Peer) -> Outcome:
        outcome = self.membership.settle(result)
        if result.first_failure is not None:
            self._report(result, own, outcome)
        elif result.exit_code == 0 and outcome.exit_code == 0 and not result.interrupted:
            self.log.info("Pod completed")
        return outcome

    def _report(self, result: GroupResult, own: Peer, outcome: Outcome) -> None:
        assert result.first_failure is not None
        if outcome.restart:
            self.log.warning(_failure_line(result, own))
            if self.view is None:
                return
        report = failure_report(
            result.first_failure,
            role_size=_role_size(result.first_failure.spec),
            host=own.host,
            log_start_bytes=result.log_start_bytes,
            oom_kills=oom_kill_count() - self._oom_kills_before,
            ended_before=result.ended_before,
        )
        if self.view is not None:
            text = "\n".join(text for _, text in report)
            self.view.failed(result.first_failure, text, restarts=outcome.restart)
        # A terminal that has the output of the process has its last lines already.
        is_shown = result.first_failure.spec.echo and is_one_place(1, 2)
        for level, text in () if outcome.restart else report:
            if is_shown and (not level or text == DETAIL):
                self.log.file_only(text)
            elif level:
                self.log.write(level, text)
            else:
                self.log.plain(text)


def _with_interface(config: LaunchConfig, own: Peer, peers: Sequence[Peer]) -> LaunchConfig:
    """Returns ``config`` with the interface at which the other nodes reach this one.

    Raises LaunchError when some nodes gave an address that means another machine on each.
    """
    if config.nodes.is_single:
        return config
    listed = [
        split_endpoint(endpoint, "the list")[0]
        for endpoint in (*config.servers.endpoints, *config.servers.worker_endpoints)
    ]
    hosts = list(dict.fromkeys([*(peer.host for peer in peers), *listed]))
    here = [host for host in hosts if means_itself(host)]
    if here and len(here) == len(hosts) and _meets_elsewhere(config):
        raise LaunchError(
            f"The nodes of the job meet at {config.nodes.master}, and all of them have the address {here[0]}, which "
            "means a different machine on each. Give each launcher --host=ADDRESS, at which the other nodes reach it."
        )
    if here and len(here) < len(hosts):
        raise LaunchError(
            f"The nodes of the job have the addresses {', '.join(hosts)}, and {here[0]} means a different machine on "
            "each. Give the launcher there --host=ADDRESS, at which the other nodes reach it."
        )
    interface = interface_to(own.host, [host for host in hosts if host != own.host])
    return replace(config, nodes=replace(config.nodes, interface=interface))


def _meets_elsewhere(config: LaunchConfig) -> bool:
    """Returns whether the master's address is no loopback one and nobody said that all nodes are on this machine."""
    if config.nodes.master is None or config.command.arguments.get("host") is not None:
        return False
    return "://" not in config.nodes.master and not means_itself(split_endpoint(config.nodes.master, "--master")[0])


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


def run_hook(words: Sequence[str], environment: Mapping[str, str], log: LaunchLog, signals: SignalInbox) -> None:
    """Runs the command of ``--elastic_pre_hook`` to its end; raises LaunchError with its code when it fails."""
    if not words:
        return
    try:
        hook = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise LaunchError(f"--elastic_pre_hook: {words[0]!r} cannot be started: {error.strerror}.") from error
    output = ""
    with hook:
        while hook.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output = hook.communicate(timeout=_LOOK_S)[0]
            if stops := signals.take():
                hook.kill()
                raise StoppedBySignalError(stops[0])
    for line in output.splitlines():
        log.opening(f"elastic_pre_hook: {line}")
    if hook.returncode:
        code = hook.returncode if hook.returncode > 0 else 128 - hook.returncode
        raise LaunchError(
            f"--elastic_pre_hook {words[0]!r} ended with code {code}; the workers were not started.", code
        )
