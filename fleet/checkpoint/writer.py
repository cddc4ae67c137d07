"""Writer: a process beside the trainer that writes its checkpoints while training goes on.

[Note: The writer process]
The trainer copies its share of the state into a buffer that both processes map, then sends one line of JSON that
describes the content and the target. From there on the writer alone works: no lock, no thread and no memory traffic of
the trainer. It answers with one line, an empty text or an error. One save is under way at a time, and the buffer
belongs to the writer from the line to the answer.

The writer ignores SIGTERM and SIGINT, which a launcher or a terminal sends to all processes: a checkpoint that was
begun before a preemption is finished. It ends when its trainer ends, and stops between two blocks when the trainer was
killed: no checkpoint of a dead job appears after its restart. It imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from fleet.checkpoint.commit import Share, leave_error, write_share
from fleet.checkpoint.data_files import FileBlock, block_of
from fleet.checkpoint.storage import open_folder
from fleet.errors import CheckpointError, FleetError

_POLL_S = 0.5
_AT_EXIT = 10  # before multiprocessing ends its daemons, which has the priority 0
# Without the current folder, where a user's json.py would be imported in place of the standard one.
_START = (
    "import sys; sys.path[:] = [{root!r}, *filter(None, sys.path)]; from fleet.checkpoint.writer import serve; "
    "serve({fd}, {parent})"
)
_END = "null"  # the request to end: a forked process may hold the pipe open


class Writer:
    """The trainer's side: at most one save under way, and the error of the last one.

    Example:
        >>> writer = Writer()
        >>> writer.buffer(4)[:4] = b"data"
        >>> writer.start("checkpoint", Share("ab", 0, 1, [FileBlock("x", "uint8", (4,), (0,), (4,))]))
        >>> writer.finish()
        ''
        >>> writer.close()
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._descriptor = -1
        self._map: mmap.mmap | None = None
        self._is_busy = False
        self._error = ""
        self._path = ""
        self._share: Share | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way, as far as :meth:`failed` has seen."""
        return self._is_busy

    def buffer(self, num_bytes: int) -> mmap.mmap:
        """Returns the shared buffer, of at least ``num_bytes``; it is kept from save to save.

        Raises CheckpointError when the machine does not have the memory. The save before must have finished.
        """
        if self._is_busy:
            raise AssertionError("the buffer belongs to the save that is under way")
        if self._map is None or len(self._map) < num_bytes:
            if self._map is not None:
                self._map = None  # not closed: a view of it may live until the next collection
            try:
                if self._descriptor < 0:
                    self._descriptor = os.memfd_create("fleet-checkpoint")
                size = max(num_bytes, mmap.PAGESIZE)
                os.ftruncate(self._descriptor, size)
                populate = getattr(mmap, "MAP_POPULATE", 0)
                self._map = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | populate)
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"save(asynchronous=True): no memory for a copy of {num_bytes / 1e9:.2f} GB "
                    f"({getattr(error, 'strerror', None) or error}). Save without asynchronous=True, which copies "
                    "nothing."
                ) from error
        return self._map

    def start(self, path: str, share: Share, hooks: str = "", arguments: dict[str, Any] | None = None) -> None:
        """Lets the writer write ``share``, whose bytes lie in the buffer one after the other.

        Args:
            path: the folder.
            share: the description of the share.
            hooks: a module whose ``hooks(**arguments)`` returns two functions: one that the writer calls at the points
                of :func:`write_share`, and one for the end of the save.
            arguments: numbers and texts.
        """
        self._path = path
        self._share = share
        asked = {**vars(share), "blocks": [vars(block) for block in share.blocks]}
        try:
            # A writer that was killed between two saves is replaced.
            if self._process is not None and self._process.poll() is not None:
                self._end()
            if self._process is None:
                self._launch()
            self._send(json.dumps({"path": path, "share": asked, "hooks": hooks, "arguments": arguments or {}}))
            self._is_busy = True
        except OSError as error:
            self._lost(error.strerror or f"{error}")

    def failed(self) -> str:
        """Returns the error of a save that has ended, once, without waiting; an empty string otherwise."""
        if self._is_busy and self._process is not None:
            assert self._process.stdout is not None
            if select.select([self._process.stdout], [], [], 0)[0]:
                self._take_answer()
        return self._take_error()

    def finish(self) -> str:
        """Waits for the save that is under way; returns its error, once, or an empty string."""
        if self._is_busy:
            self._take_answer()
        return self._take_error()

    def close(self) -> None:
        """Waits for the save that is under way, and ends the process."""
        if self._is_busy:
            self._take_answer()
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._send(_END)
            self._end()
        self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _take_answer(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._is_busy = False
        if not line.endswith("\n"):
            self._lost()
            return
        self._error = str(json.loads(line))

    def _lost(self, how: str = "") -> None:
        """Records that the writer is lost, also for worker 0, which waits for this worker's record."""
        if self._process is not None:
            status = self._end()
            how = f"was killed by signal {-status}" if status < 0 else how or f"ended with status {status}"
        else:
            how = f"could not be started ({how})"
        self._is_busy = False
        text = f"the process that writes it {how}"
        self._error = (
            f"{self._path!r} was not written: {text}. The checkpoint before it is whole; the next save starts another "
            "process."
        )
        assert self._share is not None
        leave_error(open_folder(self._path), self._share, text)

    def _send(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _end(self) -> int:
        """Closes the pipes, waits for the process and returns its status."""
        process = self._process
        self._process = None
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # closing sends the rest of the buffer, to a process that may be gone
                pipe.close() if pipe is not None else None
        return process.wait()

    def _take_error(self) -> str:
        error = self._error
        self._error = ""
        return error

    def _launch(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        program = _START.format(root=root, fd=self._descriptor, parent=os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            pass_fds=(self._descriptor,), start_new_session=True,
        )  # fmt: skip


_OWN: list[Writer] = []


def own_writer() -> Writer:
    """Returns the writer of this process; at exit its error is printed and makes the exit status 1."""
    if not _OWN:
        from multiprocessing.util import Finalize  # unlike atexit, also at the end of a process of multiprocessing

        _OWN.append(Writer())
        os.register_at_fork(after_in_child=_OWN.clear)  # a process that a DataLoader forks has no save under way
        Finalize(None, _at_exit, exitpriority=_AT_EXIT)
    return _OWN[0]


def _at_exit() -> None:
    if not _OWN:
        return
    error = _OWN[0].finish()
    _OWN[0].close()
    if error:
        print(f"CheckpointError: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # an exception in an exit handler does not reach the exit status


def serve(descriptor: int, parent: int) -> None:
    """Writes the shares that the trainer ``parent`` sends on standard input, until it ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A print of any library would break the answers, which are lines on standard output.
    answers = sys.stdout
    sys.stdout = sys.stderr

    def meet(point: str) -> None:
        if os.getppid() != parent:
            raise CheckpointError("the trainer has ended")

    for line in _lines(sys.stdin, parent):
        request = json.loads(line)
        if request is None:
            return
        try:
            write_request(request, descriptor, meet)
            answer = ""
        except FleetError as error:
            answer = f"{error}"
        except Exception as error:  # the trainer must hear of all of them
            answer = f"{request['path']!r} was not written: {type(error).__name__}: {error}"
        try:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        except BrokenPipeError:  # the trainer has ended
            return


def write_request(request: dict[str, Any], descriptor: int, meet: Callable[[str], None]) -> None:
    """Writes the share in ``request``, whose bytes lie in the memory of ``descriptor``, and calls its hooks."""
    blocks = [block_of(found) for found in request["share"]["blocks"]]
    share = Share(**{**request["share"], "blocks": blocks})
    hooks = import_module(request["hooks"]).hooks(**request["arguments"]) if request["hooks"] else None

    def meet_both(point: str) -> None:
        meet(point)
        if hooks is not None:
            hooks[0](point)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    size = os.fstat(descriptor).st_size
    # Not closed by hand: where a write fails, its error refers to views of the map for a while.
    view = memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))
    write_share(open_folder(request["path"]), share, _slices(view, blocks), meet_both, say)
    if hooks is not None:
        hooks[1]()


def _slices(view: memoryview, blocks: list[FileBlock]) -> Iterator[memoryview]:
    begin = 0
    for block in blocks:
        yield view[begin : begin + block.num_bytes]
        begin += block.num_bytes


def _lines(file: IO[str], parent: int) -> Iterator[str]:
    """Yields the lines of ``file`` until it ends, or the trainer does: a forked process may hold its end open."""
    while True:
        while not select.select([file], [], [], _POLL_S)[0]:
            if os.getppid() != parent:
                return
        line = file.readline()
        if not line.endswith("\n"):  # the end, in the middle of a line if the trainer was killed
            return
        yield line
