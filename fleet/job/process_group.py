"""Starts the process group: one store, in which every rank announces itself; absent ranks are named at the timeout.

[Note: Whose store]
Under torchrun the agent already serves the store at MASTER_ADDR:MASTER_PORT, and every worker is a client. Everywhere
else rank 0 serves it, on a socket bound to the master's address only. torch's own server listens on all interfaces,
so the socket is created here.
"""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fleet.common.addresses import means_itself
from fleet.env import Environment, export
from fleet.errors import ConfigError, RendezvousError
from fleet.launch.plan.interfaces import interface_to

_REPORT_EVERY_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where this process joins the rendezvous, and as which rank.

    ``prefix`` keeps generations apart in a store that outlives them. ``agent_store`` is True when the launcher serves
    the store itself (torchrun). ``rejoins`` says that failed processes restart one by one under the same prefix: each
    waits until rank 0 has restarted, too. Timeouts are in seconds: ``wait_s`` for the peers to join,
    ``operation_s`` for every later collective. ``num_nodes`` of 1 keeps everything on this machine.
    """

    global_rank: int
    world_size: int
    host: str
    port: int
    backend: str
    prefix: str = ""
    agent_store: bool = False
    rejoins: bool = False
    wait_s: float = 900.0
    operation_s: float = 1800.0
    device: torch.device | None = None
    num_nodes: int = 1


def start_process_group(meeting: Meeting, say: Callable[[str], None]) -> dist.ProcessGroup:
    """Starts the default process group and returns it; an existing one is returned as it is.

    Raises:
        RendezvousError: not every rank joined within ``meeting.wait_s`` seconds; the message lists the absent ones.
        ConfigError: workers share a GPU, and NCCL is to connect them or does already.
    """
    if dist.is_initialized():
        _check_backend(meeting)
    else:
        # This module binds the default group of its import time as an argument's default, and the first
        # DistributedDataParallel imports it. Imported now, it holds no group, and the group can end before Python does.
        importlib.import_module("torch.distributed.nn.functional")
        if meeting.num_nodes > 1:
            _choose_interface(meeting.host)
        store = dist.PrefixStore(f"fleet/{meeting.prefix}", meet(meeting, say))
        device = None  # that NCCL is bound to; a group of gloo that is bound to one cannot make further groups
        if meeting.device is not None and meeting.device.type == "cuda" and "nccl" in meeting.backend:
            device = meeting.device
            check_cards(store, meeting, f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}")
        dist.init_process_group(
            meeting.backend,
            store=store,
            rank=meeting.global_rank,
            world_size=meeting.world_size,
            timeout=timedelta(seconds=meeting.operation_s),
            device_id=device,
        )
    group = dist.group.WORLD
    if group is None:
        raise AssertionError("init_process_group left no default group")
    return group


def start_group_of_one() -> None:
    """Gives torch.distributed a group of this process alone, as scripts expect that call it; Fleet's job has none.

    It waits for nothing, and takes a few milliseconds. One that runs already stays.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def is_in_group() -> bool:
    """Returns whether a process group runs that :func:`start_group_of_one` did not start."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    store = _get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return not isinstance(store, dist.HashStore)


def _check_backend(meeting: Meeting) -> None:
    """Raises ConfigError where NCCL connects workers that are to share GPUs through gloo."""
    on_gpu = meeting.device is not None and meeting.device.type == "cuda"
    if on_gpu and meeting.backend == "gloo" and "nccl" in str(dist.get_backend_config()):
        raise ConfigError(
            "PADDLE_DISTRI_BACKEND is gloo (the launcher chooses it where workers share a GPU), and the process group "
            "that was started before fleet.init() is NCCL's. Call fleet.init() first (TrainingArguments of "
            "transformers starts such a group, too), or set PADDLE_DISTRI_BACKEND=nccl, which needs a GPU for each "
            "worker."
        )


def check_cards(store: dist.Store, meeting: Meeting, own: str) -> None:
    """Raises ConfigError where workers share a GPU, which NCCL refuses without saying so; ``own`` names this one's."""
    names = [f"fleet/card/{rank}" for rank in range(meeting.world_size)]
    store.set(names[meeting.global_rank], own)
    # multi_get() waits until every rank has set its card.
    cards = store.multi_get(names)
    if len(set(cards)) == len(cards):
        return
    shared = [rank for rank, card in enumerate(cards) if cards.count(card) > 1]
    raise ConfigError(
        f"[rank {meeting.global_rank} of {meeting.world_size}] workers {shared} share GPUs with others, and NCCL needs "
        "a GPU for each worker. Start fewer workers on each machine, or set PADDLE_DISTRI_BACKEND=gloo and, for each "
        "worker, FLAGS_selected_gpus to the number of its GPU; without the latter workers of gloo run on the CPU."
    )


def _choose_interface(master: str) -> None:
    """Sets gloo's and NCCL's interface to the one towards ``master``, where neither the user nor the launcher set it.

    Otherwise gloo takes the address of the host's own name, which Debian and Ubuntu map to 127.0.1.1.
    """
    environment = Environment()
    if (interface := interface_to("", [master])) is not None:
        names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        export({name: value for name, value in names.items() if not environment.has(name)})


def meet(meeting: Meeting, say: Callable[[str], None]) -> dist.Store:
    """Returns the store after every rank has announced itself in it."""
    # The store is opened only once its server answers, so an absent rank 0 is reported here, in Fleet's words.
    deadline = time.monotonic() + meeting.wait_s
    serves = meeting.global_rank == 0 and not meeting.agent_store
    if not serves:
        _wait_for_server(meeting, deadline, say)
    store = _open_store(meeting, serves)
    names = [f"fleet/arrived/{meeting.prefix}/{rank}" for rank in range(meeting.world_size)]
    # A count above 1: this rank has joined in this store before, so the store belongs to the meeting before a restart.
    while meeting.rejoins and not serves and store.add(f"{names[meeting.global_rank]}/came", 1) > 1:
        store = _store_of_next_meeting(meeting, store, deadline, say)
    store.set(names[meeting.global_rank], "1")
    _wait_for_ranks(store, names, meeting, deadline, say)
    return store


def restarted_key(rank: int) -> str:
    """Returns the key under which ``rank`` tells those who joined its predecessor that it was restarted."""
    return f"fleet/restarted/{rank}"


def _store_of_next_meeting(
    meeting: Meeting, store: dist.Store, deadline: float, say: Callable[[str], None]
) -> dist.Store:
    """Returns the store that rank 0 opens after its restart; this rank has already joined once in ``store``."""
    who = f"[rank {meeting.global_rank} of {meeting.world_size}]"
    say(f"{who} restarted, and the others have not ended yet; waiting for all to rejoin")
    while True:
        try:
            store.set(restarted_key(meeting.global_rank), "1")
        except dist.DistError:
            break  # rank 0, which served it, has ended
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"{who} restarted, and after {meeting.wait_s:g} s rank 0 still trains with its predecessor. Restart "
                "all of them. FLAGS_stop_check_timeout sets the time to wait, in seconds."
            )
        time.sleep(0.1)
    _wait_for_server(meeting, deadline, say)
    return _open_store(meeting, serves=False)


def _open_store(meeting: Meeting, serves: bool) -> dist.Store:
    listener = _listen(meeting.host, meeting.port, meeting.num_nodes) if serves else None
    return dist.TCPStore(
        meeting.host,
        meeting.port,
        world_size=None,
        is_master=serves,
        timeout=timedelta(seconds=meeting.operation_s),
        wait_for_workers=False,
        multi_tenant=True,
        # The store owns and closes the descriptor from here on.
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def _listen(host: str, port: int, num_nodes: int = 1) -> socket.socket:
    """Returns a listening socket bound to the address of ``host``, or to every address if that is not ours.

    A master behind address translation (a Kubernetes service) has an address that no interface holds. The name of this
    machine resolves to loopback here (127.0.1.1 on Debian), and to its real address on the other nodes.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if num_nodes > 1 and means_itself(str(address[0])) and not means_itself(host):
        address = ("::" if family == socket.AF_INET6 else "0.0.0.0", port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != 99:  # EADDRNOTAVAIL
                raise
            listener.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise RendezvousError(
            f"Rank 0 cannot listen on {host}:{port}: {error.strerror}. "
            "Another job may use this port; give the launcher another --master or --start_port."
        ) from error
    return listener


def _wait_for_server(meeting: Meeting, deadline: float, say: Callable[[str], None]) -> None:
    endpoint = f"{meeting.host}:{meeting.port}"
    report_at = time.monotonic() + _REPORT_EVERY_S
    pause_s = 0.01
    while True:
        try:
            socket.create_connection((meeting.host, meeting.port), timeout=2.0).close()
            return
        except OSError:
            now = time.monotonic()
        if now >= deadline:
            raise RendezvousError(
                f"[rank {meeting.global_rank} of {meeting.world_size}] no answer at {endpoint} within "
                f"{meeting.wait_s:g} s. Absent ranks: [0], which serves the rendezvous. Is it running, and can this "
                "host reach it? FLAGS_stop_check_timeout sets the time to wait, in seconds."
            )
        if now >= report_at:
            say(f"server not ready, wait {_REPORT_EVERY_S:g} sec to retry... not ready endpoints:['{endpoint}']")
            report_at = now + _REPORT_EVERY_S
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.25)


def _wait_for_ranks(
    store: dist.Store, names: list[str], meeting: Meeting, deadline: float, say: Callable[[str], None]
) -> None:
    report_at = time.monotonic() + _REPORT_EVERY_S
    pause_s = 0.002
    who = f"[rank {meeting.global_rank} of {meeting.world_size}]"
    absent = list(range(meeting.world_size))
    try:
        while not store.check(names):
            now = time.monotonic()
            if now >= report_at or now >= deadline:
                absent = [rank for rank, name in enumerate(names) if not store.check([name])]
                if absent and now >= deadline:
                    raise RendezvousError(
                        f"{who} absent ranks after {meeting.wait_s:g} s: {absent}. Look at their logs; "
                        "FLAGS_stop_check_timeout sets the time to wait, in seconds."
                    )
                say(f"waiting for {len(absent)} of {meeting.world_size} ranks: not ready ranks {absent}")
                report_at = now + _REPORT_EVERY_S
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.1)
    except dist.DistError as error:
        # Rank 0 serves the rendezvous and gave up first.
        raise RendezvousError(
            f"{who} rank 0 left the rendezvous before every rank had joined; absent ranks when last seen: {absent}. "
            "See its log."
        ) from error
