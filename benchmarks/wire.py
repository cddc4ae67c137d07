"""Forms of rows on the wire: AUC and bytes of a step of the wide & deep example, beside float32.

Run from the repository root::

    python benchmarks/wire.py                       # the flights of the example: about four minutes
    python benchmarks/wire.py --data FOLDER         # files in Criteo's format

One server, two workers, layers of 128 and 64, rows of 10 (and 1 for the linear part), Adagrad, batches of 100, two
passes of ``--batches`` batches; the same seed for each form. Bytes are those of worker 0 at its sockets.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from _table import markdown  # noqa: E402

FORMS = ("float32", "bfloat16", "int8")


def run(form: str, mode: str, data: str, batches: int) -> dict[str, Any]:
    """Runs one job and returns what worker 0 has measured."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "fleet.launch", "--server_num=1", "--worker_num=2", f"--log_dir={folder}/log"]
        script = [str(HERE / "_wire_steps.py"), form, mode, data, str(batches), str(result)]
        done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=900, check=False)
        if done.returncode or not result.exists():
            logs = "\n".join(path.read_text()[-2000:] for path in Path(folder, "log").glob("*log.*"))
            raise SystemExit(f"{form}, {mode}: exit code {done.returncode}\n{logs}{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="flights")
    parser.add_argument("--batches", type=int, default=600, help="of each worker in a pass")
    parser.add_argument("--modes", nargs="+", choices=("sync", "async"), default=["sync", "async"])
    arguments = parser.parse_args()
    rows = []
    for mode in arguments.modes:
        found = {form: run(form, mode, arguments.data, arguments.batches) for form in FORMS}
        base = found["float32"]
        for form, one in found.items():
            rows.append([
                f"{mode}, {form}", f"{one['auc']:.4f}", f"{one['auc'] - base['auc']:+.4f}",
                f"{one['sent'] / 1e3:.1f} KB, {one['sent'] / base['sent']:.2f}",
                f"{one['received'] / 1e3:.1f} KB, {one['received'] / base['received']:.2f}",
                f"{one['seconds'] / one['steps'] * 1e3:.2f} ms",
            ])  # fmt: skip
    print(markdown(["mode, form", "AUC", "beside float32", "sent a step", "received a step", "step"], rows))


if __name__ == "__main__":
    main()
