"""What a publisher says of a sink that takes no rows, and of its return."""

from __future__ import annotations

import time
from pathlib import Path

from tests.fleet.ps.publishing.rig import publishing
from tests.helpers.memory_sink import MemorySink


def test_a_sink_that_nobody_asks_is_not_called_back(tmp_path: Path) -> None:
    """Before there are tables nothing is sent: a sink that was away at the start counts as away until it takes rows."""
    sink = MemorySink()
    sink.away = True
    with publishing(sink, tmp_path) as service:
        publisher = service.publishers[0]
        publisher._thread.start()
        time.sleep(0.1)
        assert not any("takes rows again" in line for line in service.lines)
        sink.away = False
        service.push(service.client(), 1)
        publisher.finish()
        publisher.stop()
        assert any("takes rows again after" in line for line in service.lines)
        assert sink.rows == service.served()


def test_the_reason_of_a_sink_is_the_text_of_its_error(tmp_path: Path) -> None:
    """The redis package has its own repr, without the text."""

    class ConnectionError(Exception):
        def __repr__(self) -> str:
            return "network:ConnectionError"

    with publishing(MemorySink(), tmp_path) as service:
        publisher = service.publishers[0]
        for error, text in (
            (ConnectionError("refused"), ": ConnectionError: refused; "),
            (ValueError(), ": ValueError; "),
        ):
            publisher._note_failure(error)
            assert text in service.lines[-1]
            publisher._note_success()
