"""WandbTracker: an offline run that Weights & Biases' own reader takes, with the result of the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tracked import read_back

_READ = """
import glob, json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

(path,) = glob.glob(sys.argv[1] + "/runs/wandb/offline-run-*/*.wandb")
# LevelDB's log format behind a header of 7 bytes: blocks of 32 KiB, records of checksum, length, kind and data.
content, place, whole, parts = Path(path).read_bytes(), 7, [], b""
while place + 7 <= len(content):
    if place % 32768 > 32768 - 7:
        place += 32768 - place % 32768
        continue
    _, length, kind = struct.unpack("<IHB", content[place : place + 7])
    parts += content[place + 7 : place + 7 + length]
    place += 7 + length
    if kind in (1, 4):  # full, or the last part
        whole.append(parts)
        parts = b""
rows, code = [], None
for data in whole:
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    if record.HasField("history"):
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if "loss" in items:
            rows.append([items["step"], items["loss"]])
    if record.HasField("exit"):
        code = record.exit.exit_code
print(json.dumps([rows, code]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "code"), [("well", 0), ("with an error", 1), ("with status 3", 3)])
def test_an_offline_run(tmp_path: Path, ends: str, code: int) -> None:
    found = read_back("wandb", tmp_path, ends, {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}, _READ)
    assert found == [[[step, step / 2] for step in range(1, 6)], code]
