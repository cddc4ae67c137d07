"""Changed rows that a worker with a replica has not received, or not for certain: see KeyRecorder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleet.ps.server.job_state import Refused
from fleet.ps.server.server_state import ServerState
from fleet.ps.wire.messages import TablePart, join_parts


def added_rows(
    state: ServerState, rank: int, number: int, asked: Sequence[TablePart], most_bytes: int
) -> list[TablePart]:
    """Returns what question ``number`` of a geo worker brings: the rows that others added to, dense tables as a whole.

    Raises:
        Refused: they are more than one message of ``most_bytes`` holds.
    """
    answers = _rows(state, rank, number, asked)
    if _size(answers) > most_bytes:
        raise Refused("more rows have changed than one message holds; lower k_steps.")
    return answers


def watched_rows(
    state: ServerState, rank: int, number: int, asked: Sequence[TablePart], most_bytes: int
) -> tuple[bool, list[TablePart]]:
    """Returns the rows that anybody changed, and first whether others may have changed too.

    So it is where question ``number`` begins the watch, and where the rows are more than one message holds.
    """
    for part in asked:
        state.table(part.table_id)
    with state.job.changed:
        begins = any([state.job.recorder.watch(rank, part.table_id, number) for part in asked])
    answers = _rows(state, rank, number, asked)
    if _size(answers) <= most_bytes:
        return begins, answers
    none = np.empty(0, np.int64)
    return True, [TablePart(part.table_id, 0, part.dim, none, np.empty((0, part.dim), np.float32)) for part in asked]


def rows_after_push(state: ServerState, rank: int, client_id: int, number: int, room: int) -> list[TablePart]:
    """Returns, of the tables that a worker watches, the rows that anybody changed, once push ``number`` is applied.

    The worker must read an absent table once as a whole: this server has forgotten its questions for it, or the rows
    take more than ``room`` bytes.

    Raises:
        Fenced: another process than ``client_id`` has taken over the rank; the changes that it has not read stay noted.
    """
    with state.job.changed:
        watched = state.job.recorder.watched_by(rank)
    asked = []
    for table_id in watched:
        question = TablePart(table_id, 0, 1, np.empty(0, np.int64))
        question.dim = state.table(table_id).pull_shape(question)[1]
        asked.append(question)
    answers = _rows(state, rank, -number, asked, client_id)  # below 0: questions of WATCH have numbers of their own
    return answers if _size(answers) <= room else []


def _rows(
    state: ServerState, rank: int, number: int, asked: Sequence[TablePart], client_id: int | None = None
) -> list[TablePart]:
    questions = [part for part in asked if part.ids is None]
    alike: dict[tuple[int, bool], list[TablePart]] = {}
    for part in asked:
        if part.ids is not None:
            with state.job.changed:
                if client_id is not None:
                    state.job.check_holds(state.job.workers[rank], client_id)
                keys = state.job.recorder.take(rank, part.table_id, number)
            kind = (part.dim, state.table(part.table_id).keeps_shows)
            alike.setdefault(kind, []).append(TablePart(part.table_id, len(keys), part.dim, keys))
    questions += map(join_parts, alike.values())
    answers = []
    for question in questions:
        table = state.served(question)
        table.check(question, change=False)
        rows = np.empty(table.pull_shape(question), np.float32)
        table.pull(question, rows, drawn=False)
        dim = 1 if question.ids is None else question.dim
        answers.append(TablePart(question.table_id, question.n, dim, question.ids, rows, members=question.members))
    return answers


def _size(answers: Sequence[TablePart]) -> int:
    return sum(part.n * (8 + 4 * part.dim) + 64 for part in answers)
