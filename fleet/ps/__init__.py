"""The CPU parameter server: tables for ids without bound, their files, and the wire to them.

Names are resolved at first use: importing this package loads neither numpy nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "SparseEmbedding": "_embedding",
    "Client": "_client",
    "ClientConfig": "_client_config",
    "Gradient": "_shards",
    "Server": "_server",
    "ServerConfig": "_server_config",
    "run_server": "_server",
    "AsyncSender": "_sender",
    "HalfAsyncSender": "_sender",
    "SenderConfig": "_sender",
    "GeoCommunicator": "_geo",
    "LocalTransport": "_local",
    "SocketTransport": "_transport",
    "Accessor": "_accessor",
    "documented_accessor": "_accessor",
    "DenseTable": "_dense_table",
    "DenseTableConfig": "_dense_table",
    "CountFilterEntry": "_entry",
    "ProbabilityEntry": "_entry",
    "ShowClickEntry": "_entry",
    "Initializer": "_initializers",
    "SparseTableConfig": "_layout",
    "plan_dense_blocks": "_partition",
    "servers_of_keys": "_partition",
    "UniqueKeys": "_ids",
    "expand_rows": "_ids",
    "merge_gradients": "_ids",
    "split_keys": "_ids",
    "RowBlock": "_rows",
    "Rule": "_rules",
    "rule_from_paddle": "_rules",
    "SparseTable": "_sparse_table",
    "export_text": "_text_format",
    "import_text": "_text_format",
    "load_table": "_files",
    "load_dense": "_files",
    "save_dense": "_files",
    "save_table": "_files",
    "saved_blocks": "_files",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
