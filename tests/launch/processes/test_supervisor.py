"""Watching a group: order of ends, news from peers, the fallback without pidfd. Whole jobs are in test_job."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.launch.plan.records import GroupResult, ProcessSpec
from fleet.launch.processes import process as _process
from fleet.launch.processes.guardian import Guardian
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox
from fleet.launch.processes.supervisor import PeerEvent, Supervisor
from fleet.launch.processes.watch import WorkerWatch


def spec(path: Path, index: int, code: str, role: str = "worker") -> ProcessSpec:
    return ProcessSpec(
        role=role,
        index=index,
        local_index=index,
        command=(sys.executable, "-c", code),
        environment={},
        log_path=path / f"{role}log.{index}",
    )


class News:
    """Peers that want what the test says, when it says so."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.event: PeerEvent | None = None
        self.num_done = 0

    def fileno(self) -> int:
        return self.read_fd

    def say(self, event: PeerEvent) -> None:
        self.event = event
        os.write(self.write_fd, b"!")

    def take(self) -> PeerEvent | None:
        event, self.event = self.event, None
        if event is not None:
            os.read(self.read_fd, 10)
        return event

    def workers_done(self) -> None:
        self.num_done += 1
        self.say(PeerEvent("servers"))


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    mark = os.urandom(8).hex()
    guardian = Guardian.start(mark)
    with SignalInbox() as signals:
        yield Supervisor(
            log=LaunchLog("ERROR"), signals=signals, guardian=guardian, mark=mark, inherited=dict(os.environ), grace_s=5
        )
    guardian.dismiss()


SLEEP = "import time; time.sleep(60)"


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_group_ends_with_its_first_failure(
    supervisor: Supervisor, tmp_path: Path, has_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_pidfd:
        monkeypatch.setattr(_process, "_open_pidfd", lambda pid: None)
    codes = [SLEEP, "import time; time.sleep(0.3); raise SystemExit(5)", SLEEP]
    result = supervisor.run([spec(tmp_path, i, code) for i, code in enumerate(codes)])
    assert result.exit_code == 5
    assert result.first_failure is not None
    assert result.first_failure.spec.index == 1


@pytest.mark.parametrize("attempt", range(5))
def test_ends_come_in_the_order_of_death(supervisor: Supervisor, tmp_path: Path, attempt: int) -> None:
    """Eight processes killed one after the other while nobody looks: the first one killed is named."""
    specs = [spec(tmp_path, i, SLEEP) for i in range(8)]
    order = [(3 + 5 * i + attempt) % 8 for i in range(8)]

    def kill_all() -> None:
        pids = {p.spec.index: p.pid for p in group[0].processes}
        for index in order:
            os.kill(pids[index], 9)
            os.waitid(os.P_PID, pids[index], os.WEXITED | os.WNOWAIT)

    group = []
    original = supervisor._group

    def keep(news: object) -> object:
        group.append(original(None))
        return group[0]

    supervisor._group = keep  # type: ignore[method-assign, assignment]
    result = supervisor.run(specs, started=kill_all)
    assert result.first_failure is not None
    assert result.first_failure.spec.index == order[0]


def test_stop_from_the_peers(supervisor: Supervisor, tmp_path: Path) -> None:
    news = News()
    began = time.monotonic()
    started = lambda: news.say(PeerEvent("stop", 0.2))  # noqa: E731
    result = supervisor.run([spec(tmp_path, 0, SLEEP)], news=news, started=started)
    assert result.interrupted
    assert result.first_failure is None
    assert time.monotonic() - began < 2


def test_the_end_is_announced_before_anything_is_stopped(supervisor: Supervisor, tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, lambda *a: open('asked', 'w')); time.sleep(60)"
    asked = tmp_path / "asked"
    code = code.replace("'asked'", repr(str(asked)))
    seen: list[tuple[GroupResult, bool]] = []
    bad = "import time; time.sleep(0.4); raise SystemExit(3)"
    supervisor.run(
        [spec(tmp_path, 0, code), spec(tmp_path, 1, bad)], ending=lambda result: seen.append((result, asked.exists()))
    )
    assert [(result.exit_code, stopped) for result, stopped in seen] == [(3, False)]
    assert asked.exists()


def test_servers_wait_for_the_workers_of_other_nodes(supervisor: Supervisor, tmp_path: Path) -> None:
    news = News()
    result = supervisor.run([spec(tmp_path, 0, SLEEP, "server"), spec(tmp_path, 0, "pass")], news=news)
    assert (result.exit_code, news.num_done) == (0, 1)


@pytest.mark.parametrize("code", [0, 1])
def test_a_server_that_is_asked_to_end_may_finish_and_fail(
    supervisor: Supervisor, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that publishes its last rows when it is asked to end: it has the grace for it, and its error counts."""
    monkeypatch.setattr("fleet.launch.processes.supervisor.SERVER_RETURN_S", 0.5)
    done = tmp_path / "done"
    server = (
        "import signal, time; asked = []; signal.signal(15, lambda *_: asked.append(1))\n"
        f"while not asked: time.sleep(0.01)\ntime.sleep(0.3); open({str(done)!r}, 'w'); raise SystemExit({code})"
    )
    result = supervisor.run([spec(tmp_path, 0, server, "server"), spec(tmp_path, 0, "import time; time.sleep(0.3)")])
    assert done.exists()
    assert result.exit_code == code
    if code:
        assert result.first_failure is not None
        assert result.first_failure.spec.role == "server"


def test_servers_alone_run_until_they_return(supervisor: Supervisor, tmp_path: Path) -> None:
    """A node of a static list that has servers only."""
    code = "import time; time.sleep(0.5)"
    began = time.monotonic()
    assert supervisor.run([spec(tmp_path, 0, code, "server")], ends_servers=False).exit_code == 0
    assert time.monotonic() - began > 0.4


def test_a_program_that_does_not_start_leaves_nothing(supervisor: Supervisor, tmp_path: Path) -> None:
    from fleet.errors import LaunchError

    bad = ProcessSpec(
        role="worker", index=1, local_index=1, command=("/no/such",), environment={}, log_path=tmp_path / "log"
    )
    with pytest.raises(LaunchError):
        supervisor.run([spec(tmp_path, 0, SLEEP), bad])


SAVES_ON_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(75)))
open({ready!r}, "w").close()
time.sleep(60)
"""


def saving_watch() -> WorkerWatch:
    return WorkerWatch(heartbeat_s=0, preempt_grace_s=30, is_alone=False, log=LaunchLog("ERROR"))


@pytest.mark.parametrize("others_first", [False, True])
def test_a_node_that_was_asked_leaves_though_others_left_first(
    supervisor: Supervisor, tmp_path: Path, others_first: bool
) -> None:
    """All nodes are told to stop at once: the news that another one has left must not undo the request."""
    news, ready = News(), tmp_path / "ready"

    def ask() -> None:
        while not ready.exists():
            time.sleep(0.01)
        if others_first:
            news.say(PeerEvent("stop", 0.2))
        os.kill(os.getpid(), signal.SIGTERM)

    told: list[GroupResult] = []
    result = supervisor.run(
        [spec(tmp_path, 0, SAVES_ON_SIGTERM.format(ready=f"{ready}"))],
        news=news,
        watch=saving_watch(),
        started=ask,
        ending=told.append,
    )
    assert (result.exit_code, result.stop_signal, result.preempted, result.interrupted) == (75, 15, True, False)
    assert told == [result]


def test_a_request_that_comes_while_the_workers_leave_for_another_node(supervisor: Supervisor, tmp_path: Path) -> None:
    """It is the first one here, so it shortens no grace."""
    leaves = "raise SystemExit(75)"
    saves = f"import os, sys, time; time.sleep(0.5); os.kill({os.getpid()}, 15); time.sleep(0.5); sys.exit(75)"
    specs = [spec(tmp_path, 0, leaves), spec(tmp_path, 1, saves)]
    result = supervisor.run(specs, news=News(), watch=saving_watch())
    assert (result.exit_code, result.stop_signal, result.preempted) == (75, 15, True)
    assert result.first_failure is None
