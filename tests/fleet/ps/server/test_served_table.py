"""Tables behind the server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SCRIPT = """
import os, sys
from pathlib import Path
import numpy as np
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.server.journal import Journal
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.server.server_state import ServerState
from fleet.ps.wire.messages import Header, Op, TablePart, encode_parts
from fleet.ps.table.rules import Rule
from fleet.ps.server.served_table import make_served_table
from fleet.ps.server.job_state import JobState
from fleet.ps.table.table_spec import spec_of_config

journal = Journal(Path(sys.argv[1]), 2)
state = ServerState(JobState(1, journal.lock), journal, make_served_table, sync=sys.argv[2] == "sync")
journal.open()
rule, worker = Rule("sgd", {"learning_rate": 1.0}), state.job.workers[0]
configs = SparseTableConfig("ads", 2, rule), DenseTableConfig("mlp", 2, rule)
state.create_tables({number: spec_of_config(config) for number, config in enumerate(configs)})
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
keys, ones = np.arange(3), np.ones((3, 2), np.float32)
parts = [TablePart(0, 3, 2, keys, ones), TablePart(1, 2, 1, None, np.ones((2, 1), np.float32))]
for number, op in enumerate((Op.PUSH, Op.ADD), 1):
    body = memoryview(bytearray(b"".join(bytes(item) for item in encode_parts(parts))))
    header = Header(op, seq=number, step=number * state.sync, n_tables=2)
    state.change(worker, 0, header, body, state.checked(header, body))
for number, (action, fields) in enumerate((("shrink", {"threshold": 0}), ("advance_day", {}))):
    state.alter(worker, 0, Header(Op.ALTER, seq=number + 3), 0, action, fields)
sparse, dense = state.tables[0].table, state.tables[1].table
print(sparse.pull(keys).shape, dense.pull().tolist())
blocks = list(sparse.blocks())
journal.sync()
for fd in taken:
    os.close(fd)
print(sum(map(len, blocks)), journal.durable_lsn, state.failure)
"""


@pytest.mark.parametrize(("mode", "records"), [("async", 5), ("sync", 6)])
def test_nothing_is_loaded_after_the_first_answer(mode: str, records: int, tmp_path: Path) -> None:
    """With no descriptor left a kernel could not be loaded: a change was journaled and could not be applied."""
    words = ["import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))", SCRIPT]
    run = [sys.executable, "-c", "\n".join(words), str(tmp_path / "journal"), mode]
    done = subprocess.run(run, cwd=ROOT, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "(3, 2) [0.0, 0.0]"
    assert second == f"3 {records} None"
