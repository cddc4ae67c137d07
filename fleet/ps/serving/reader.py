"""Reader: the rows of a job's tables for the serving side: looked up by id, and followed while they are trained."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleet.errors import ConfigError, FleetError
from fleet.ps.publishing.redis_address import without_password
from fleet.ps.publishing.versions import Version
from fleet.ps.serving.changes import Changes, changes_between
from fleet.ps.serving.delta_rows import DeltaRows, is_delta_folder
from fleet.ps.serving.follow_thread import LOOK_S, FollowThread, check_interval
from fleet.ps.serving.local_rows import Found, LocalState, Position, check_table
from fleet.ps.serving.redis_rows import RedisRows
from fleet.ps.serving.saved_rows import SavedRows, is_save
from fleet.ps.serving.server_rows import SCHEME, ServerRows, read_endpoints
from fleet.ps.table.layout import Int64s
from fleet.ps.wire.row_form import check_wire

if TYPE_CHECKING:
    from torch import Tensor

_ACCESS = "fleet.ps_job.reader_access"  # not imported here: it reads the environment, which this package does not
_FIRST_ROWS = "A publisher's folder has rows once the servers have written the first ones."
_REMOTE = ("redis://", "rediss://", "unix://")


class Reader:
    """Looks up rows of the tables of a job, outside that job.

    A folder is mapped into memory; its index takes 20 bytes a row. Redis and servers are asked at each lookup. Lookups
    may come from any number of threads while :meth:`follow` or :meth:`refresh` loads newer rows. From a folder or Redis
    a lookup sees the rows of one state, with each delta whole or not at all.

    Servers are asked with the job's secret, as workers do (``FLEET_JOB_SECRET``, and ``FLEET_PS_CA`` with TLS). A
    lookup makes no row, counts as no use of one, and no step waits for it. A server that is lost is replaced by its
    standby, and no lookup gives values older than one before it.

    Args:
        source: a folder that ``fleet.ps.publish`` writes, a folder of ``fleet.save_persistables`` or
            ``fleet.save_inference_model`` (mode 0), either with or without ``folder:`` before it; the address of a
            Redis that ``fleet.ps.publish`` writes to; or ``ps://host:port,host:port``, the servers of a running job or
            their standbys, one of each number, as the job's lists spell them.
        job: Redis: the job's name, needed where several jobs publish there. Servers: refused by those of another job.
        wire: servers: the form in which rows travel, ``"float32"``, ``"bfloat16"`` or ``"int8"`` with a scale for each
            row.
        version: a folder of ``fleet.ps.publish``: the version, by ``fleet.mark_version``, whose rows it has, or its
            name; nothing newer. None: the newest rows. A brake (:func:`fleet.ps.roll_back`) on an older version goes
            before it.

    Raises:
        ConfigError: the source is none of these, or has no such version; servers have another secret, are of several
            jobs or not all of one.
        CheckpointError: files in the folder are damaged.
        PSError: Redis or a server does not answer.

    Example:
        >>> table = fleet.ps.SparseTable(fleet.ps.SparseTableConfig("ads", 4))
        >>> table.add(np.array([7, 8]), np.ones((2, 4), np.float32))
        >>> saved = fleet.ps.save_table(table, "saved_rows")
        >>> reader = fleet.ps.Reader("saved_rows")
        >>> rows, found = reader.lookup("ads", [7, 10**15], found=True)
        >>> rows.shape, found.tolist()
        ((2, 4), [True, False])
    """

    def __init__(
        self,
        source: str | Path,
        *,
        job: str | None = None,
        wire: str = "float32",
        version: str | Version | None = None,
    ) -> None:
        self._label = f"fleet.ps.Reader({without_password(str(source))!r})"
        self._refreshing = threading.Lock()
        self._follower = FollowThread(
            self._refresh,
            f"{self._label} keeps its rows",
            "fleet-reader",
            is_urgent=lambda: self._files.must_turn(),
            afterwards=lambda: self._files.read_ahead(),
        )
        self._brake = FollowThread(self._turn, f"{self._label} does not turn", "fleet-reader brake")
        self._is_closed = False
        self._remote = _remote_of(self._label, source, job, wire, version)
        if self._remote is None:
            self._files = _open_folder(self._label, Path(str(source).removeprefix("folder:")), version)
            self._files.refresh()

    @property
    def tables(self) -> dict[str, int]:
        """The columns of each table, by its name."""
        self._check_open()
        return dict(self._remote.dims if self._remote is not None else self._files.state.dims)

    @property
    def position(self) -> dict[int, Position]:
        """How far the rows of each server are: its history, watermark and step, and when the newest was pushed."""
        self._check_open()
        return dict(self._remote.positions if self._remote is not None else self._files.state.positions)

    @property
    def version(self) -> Version | None:
        """The version whose rows lookups give, by ``version=`` or a brake; None while they give the newest rows."""
        self._check_open()
        return None if self._remote is not None else self._files.state.version

    @property
    def versions(self) -> list[Version]:
        """The versions in the folder of a publisher, oldest first; other sources have none."""
        self._check_open()
        return self._files.versions() if self._remote is None else []

    def program_of(self, version: Version) -> Path | None:
        """Returns the folder of the exported program that was marked with ``version``; None without one."""
        return None if self._remote is not None else self._files.program_of(version)

    def lookup(self, table: str, ids: Any, *, found: bool = False) -> Any:
        """Returns the rows of ``ids``; an id without a row gives zeros.

        Args:
            table: the table's name; of an embedding without a name, the name of the module in the model.
            ids: integers of any shape: a numpy array, a list, or a torch tensor.
            found: returns which ids have a row as well.

        Returns:
            float32 [*ids.shape, dim]: a tensor on the ids' device for a tensor, otherwise an array. With ``found`` also
            a bool of the shape of ids.

        Raises:
            ConfigError: there is no such table, or ids are not integers.
            CheckpointError, PSError: the rows cannot be read.
        """
        self._check_open()
        keys, shape = _keys_of(ids)
        flat_rows, flat_mask = self._lookup(table, keys)
        rows = flat_rows.reshape(*shape, flat_rows.shape[1])
        mask = flat_mask.reshape(shape)
        if is_tensor(ids):
            import torch

            tensors = torch.from_numpy(rows).to(ids.device), torch.from_numpy(mask).to(ids.device)
            return tensors if found else tensors[0]
        return (rows, mask) if found else rows

    def lookup_bags(
        self,
        table: str,
        ids: Tensor | Sequence[Any],
        offsets: Tensor | None = None,
        *,
        combiner: str = "sum",
        num_slots: int = 1,
        separate_slots: bool = False,
        padding_idx: int | None = None,
    ) -> Tensor:
        """Returns the output of ``fleet.SparseEmbedding`` with these arguments for ``ids``, to the bit.

        Ids, offsets and the shape of the result are as for :class:`fleet.SparseEmbedding`, and ids and offsets may be
        arrays; ids without a row count as zeros.

        Raises:
            ConfigError: ids, offsets and the other arguments do not fit, or there is no such table.
        """
        import torch

        from fleet.ps.embeddings.bags import COMBINERS, bags_of, combined, keys_of_slots

        self._check_open()
        origin = "reader.lookup_bags"
        if combiner not in COMBINERS:
            raise ConfigError(f"{origin}(combiner={combiner!r}) takes one of {list(COMBINERS)}.")
        if type(num_slots) is not int or num_slots < 1:
            raise ConfigError(f"{origin}(num_slots={num_slots!r}) takes an integer from 1.")
        if padding_idx is not None and type(padding_idx) is not int:
            raise ConfigError(f"{origin}(padding_idx={padding_idx!r}) takes an id, or None.")
        bags = bags_of(_as_tensor(ids), _as_tensor(offsets), combiner, num_slots, origin)
        keys = keys_of_slots(bags, num_slots) if separate_slots else bags.ids
        present = bags.without(padding_idx)
        rows = torch.from_numpy(self._lookup(table, keys if present is None else keys[present])[0])
        # The sums are made by the code of training, which alone gives the same bits.
        output = combined(bags, present, rows, torch.arange(len(rows)), combiner)
        return output.to(ids.device) if isinstance(ids, torch.Tensor) else output

    def changes(self, table: str, since: LocalState | None = None) -> Changes:
        """Returns how the rows of ``table`` differ from an earlier state; lists all rows without one.

        What keeps something of its own for each row, such as an index of vectors, needs no more than this to stay equal
        to the rows. All rows that are returned are in memory.

        Args:
            table: the table's name.
            since: ``state`` of an earlier result for a reader of this source.

        Raises:
            ConfigError: there is no such table; ``since`` is no such state, or had rows of other columns; the source is
                Redis or servers, which do not list their rows.

        Example:
            >>> table = fleet.ps.SparseTable(fleet.ps.SparseTableConfig("ads", 4))
            >>> table.add(np.array([7, 8]), np.ones((2, 4), np.float32))
            >>> saved = fleet.ps.save_table(table, "listed_rows")
            >>> reader = fleet.ps.Reader("listed_rows")
            >>> every = reader.changes("ads")
            >>> every.ids.tolist(), every.rows.shape, every.deleted.tolist()
            ([7, 8], (2, 4), [])
            >>> reader.changes("ads", since=every.state).ids.tolist()
            []
        """
        self._check_open()
        if self._remote is not None:
            raise ConfigError(
                f"{self._label}.changes({table!r}): Redis and servers answer for ids, they do not list them. Publish "
                'to a folder and read that: fleet.ps.publish("rows").'
            )
        state = self._files.state  # read once: another thread may put a newer one there
        check_table(self._label, table, state.dims, "changes")
        before = LocalState() if since is None else since
        if not isinstance(before, LocalState):
            raise ConfigError(f"reader.changes(since={since!r:.100}) takes the state of an earlier result, or None.")
        if before.dims.get(table, state.dims[table]) != state.dims[table]:
            raise ConfigError(
                f"reader.changes({table!r}): rows have {state.dims[table]} columns now and had {before.dims[table]} in "
                "since. They are of different models: begin without since."
            )
        return changes_between(table, before, state)

    def refresh(self) -> bool:
        """Loads newer rows and returns whether there were any; until they are complete, lookups see the older ones.

        Raises:
            CheckpointError, PSError: the newest rows cannot be read; the rows from before stay.
        """
        self._check_open()
        return self._refresh()

    def has_turned(self, since: LocalState) -> bool:
        """Returns whether a brake was pulled or released after ``since``, a state that :meth:`changes` returned."""
        return self._files.must_turn() or self._files.state.version != since.version

    def read_ahead(self) -> None:
        """Reads the files of the newest versions, so that the way back to one takes no time; :meth:`follow` does so."""
        self._check_open()
        if self._remote is None:
            self._files.read_ahead()

    def follow(self, every_s: float = 1.0) -> Reader:
        """Calls :meth:`refresh` every ``every_s`` seconds in a thread, until :meth:`close`; returns this reader.

        An error of reading is logged once and the next round tries again; the older rows stay. Redis and servers need
        no following. A brake (:func:`fleet.ps.roll_back`) is taken up within 0.2 s, however long ``every_s`` is.
        """
        check_interval("reader.follow", every_s)
        self._stop_following()
        self._check_open()
        if self._remote is None:
            self._follower.start(every_s)
            self._brake.start(LOOK_S)
        return self

    def close(self) -> None:
        """Ends :meth:`follow` and releases the source; lookups are refused afterwards. A second call does nothing."""
        self._is_closed = True
        # The thread first: it must not read from a source that is being released.
        self._stop_following()
        if self._remote is not None:
            self._remote.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _lookup(self, table: str, keys: Int64s) -> Found:
        if self._remote is not None:
            return self._remote.lookup(table, keys)
        state = self._files.state  # read once: another thread may put a newer one there
        return state.lookup(check_table(self._label, table, state.dims), keys)

    def _refresh(self) -> bool:
        with self._refreshing:
            return self._remote.refresh() if self._remote is not None else self._files.refresh()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError(f"{self._label} is closed; make another one.")
        self._follower.check()
        self._brake.check()

    def _stop_following(self) -> None:
        self._follower.stop()
        self._brake.stop()

    def _turn(self) -> None:
        """Obeys a brake while the other thread reads new files, which takes seconds where they are large."""
        with suppress(FleetError, OSError):  # the other thread meets it, too, and says so
            self._files.turn()


def _remote_of(
    label: str, source: object, job: object, wire: str, version: str | Version | None
) -> RedisRows | ServerRows | None:
    """Returns what looks rows up in Redis or on servers; None for a folder. Refuses arguments that do not fit."""
    if job is not None and not (isinstance(job, str) and job):
        raise ConfigError(f"{label[:-1]}, job={job!r}) takes the name of a job (PADDLE_JOB_ID), or None.")
    is_address = isinstance(source, str) and "://" in source
    if version is not None and is_address:
        raise ConfigError(
            f"{label[:-1]}, version={version!r}): Redis and servers have the newest rows alone; versions are "
            "in the folder of fleet.ps.publish. Read that folder, or bring the servers back with fleet.load_model."
        )
    if isinstance(source, str) and source.startswith(SCHEME):
        endpoints = read_endpoints(source)
        access = import_module(_ACCESS).read_access(endpoints, job, check_wire(wire))
        return ServerRows(source, endpoints, access)
    if check_wire(wire) != "float32":
        raise ConfigError(
            f"{label[:-1]}, wire={wire!r}): files and Redis hold rows in the form in which they were "
            "published (values=). Omit wire=."
        )
    if isinstance(source, str) and source.startswith(_REMOTE):
        return RedisRows(source, job)
    if not isinstance(source, str | Path) or is_address or source in ("", "folder:"):
        raise ConfigError(
            f"fleet.ps.Reader({source!r}) takes a folder, or an address such as redis://host:6379/0 or ps://host:36001."
        )
    if job is not None:
        raise ConfigError(f"{label[:-1]}, job={job!r}): a folder has the rows of one job. Omit job=.")
    return None


def _open_folder(label: str, folder: Path, version: str | Version | None) -> DeltaRows | SavedRows:
    if not folder.is_dir():
        raise ConfigError(f"{label}: there is no such folder. {_FIRST_ROWS}")
    if is_delta_folder(folder):
        return DeltaRows(folder, version)
    if version is not None and is_save(folder):
        raise ConfigError(f"{label[:-1]}, version={version!r}): a save has no versions. Omit version=.")
    if is_save(folder):
        return SavedRows(folder)
    names = sorted(path.name for path in folder.iterdir())[:5]
    raise ConfigError(
        f"{label}: neither rows that fleet.ps.publish writes (MANIFEST.json) nor a save of tables; the folder holds "
        f"{names or 'nothing'}. {_FIRST_ROWS}"
    )


def _as_tensor(value: Any) -> Any:
    """Returns an array as a tensor, with unsigned 64 bits as the same bits, in lists too; other values unchanged."""
    if not isinstance(value, np.ndarray):
        return _signed(value)
    import torch

    return torch.from_numpy(_keys(value, "lookup_bags").copy())  # torch warns about read-only arrays


def is_tensor(ids: object) -> bool:
    """Returns whether ``ids`` is a torch tensor, without an import of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(ids, torch.Tensor)


def _keys_of(ids: Any) -> tuple[Int64s, tuple[int, ...]]:
    """Returns ids as flat int64, and their shape; an id above 2**63 has the key of the same 64 bits."""
    array = ids.detach().cpu().numpy() if is_tensor(ids) else ids
    try:
        array = np.asarray(array)
    except ValueError:
        raise ConfigError("reader.lookup: ids are lists of unequal lengths; use lookup_bags for bags of ids.") from None
    if array.dtype == np.float64 and not isinstance(ids, np.ndarray) and not is_tensor(ids):
        # [] has no type, and numpy makes floats of integers on both sides of 2**63
        array = np.asarray(_signed(ids)) if array.size else array.astype(np.int64)
    return _keys(array.reshape(-1), "lookup"), array.shape


def _keys(ids: Any, call: str) -> Int64s:
    """Returns integers as int64; the key of an id above 2**63 has the same 64 bits."""
    if ids.dtype.kind not in "iu":
        raise ConfigError(f"reader.{call}: ids are {ids.dtype}; they must be integers of at most 64 bits.")
    return np.ascontiguousarray(ids.view(np.int64) if ids.dtype == np.uint64 else ids.astype(np.int64, copy=False))


def _signed(ids: Any) -> Any:
    """Returns lists of ids with ids from 2**63 up as the negative numbers of the same 64 bits."""
    if isinstance(ids, list | tuple):
        return [_signed(one) for one in ids]
    is_large = isinstance(ids, int | np.integer) and 2**63 <= int(ids) < 2**64
    return int(ids) - 2**64 if is_large else ids
