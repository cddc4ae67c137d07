"""Signals become events, and everything is as before afterwards."""

from __future__ import annotations

import os
import select
import signal

from fleet.launch.processes.signals import SignalInbox


def test_signals_are_collected_in_order() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SignalInbox() as inbox:
        assert inbox.take() == []
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
            assert select.select([inbox], [], [], 1)[0]
        assert inbox.take() == [15, 1]
        assert inbox.take() == []
        assert inbox.received == [15, 1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_ignored_signal_stays_ignored() -> None:
    """nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalInbox() as inbox:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not select.select([inbox], [], [], 0.1)[0]
    finally:
        signal.signal(signal.SIGHUP, before)
