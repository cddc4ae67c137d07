"""A worker that needs no torch: prints when it started, then sleeps, ends or fails, as its arguments say."""

from __future__ import annotations

import os
import sys
import time

print(f"start {time.time():.6f} {os.getpid()}", flush=True)
if sys.argv[1] == "sleep":
    time.sleep(60)
elif sys.argv[1] == "fail" and os.environ.get("RANK") == "1":
    time.sleep(0.3)
    print(f"failing {time.time():.6f}", flush=True)
    raise RuntimeError("the user's own error")
elif sys.argv[1] == "fail":
    time.sleep(60)
