"""Functions of scikit-learn, which is imported when the first is called.

It takes a second: every process that collects the tests, and every worker that imports one, would spend it for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["calibration_curve", "log_loss", "ndcg_score", "roc_auc_score", "top_k_accuracy_score"]


def _called(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **more)

    return call


calibration_curve = _called("sklearn.calibration", "calibration_curve")
log_loss = _called("sklearn.metrics", "log_loss")
ndcg_score = _called("sklearn.metrics", "ndcg_score")
roc_auc_score = _called("sklearn.metrics", "roc_auc_score")
top_k_accuracy_score = _called("sklearn.metrics", "top_k_accuracy_score")
