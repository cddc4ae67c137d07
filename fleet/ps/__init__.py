"""The CPU parameter server: tables for ids without bound, their files, and the wire to them.

Names are resolved at first use: importing this package loads neither numpy nor numba.
"""

from __future__ import annotations

from fleet.common.lazy_names import lazy_names

_HOMES = {
    "SparseEmbedding": "embeddings.embedding",
    "SparseEmbeddings": "embeddings.collection",
    "Client": "client.client",
    "ClientConfig": "client.client_config",
    "Gradient": "client.shards",
    "Server": "server.server",
    "ServerConfig": "server.server_config",
    "run_server": "server.server_process",
    "AsyncSender": "worker.sender",
    "HalfAsyncSender": "worker.sender",
    "SenderConfig": "worker.sender",
    "GeoCommunicator": "worker.geo",
    "SocketTransport": "wire.transport",
    "Accessor": "table.accessor",
    "Bounds": "table.bounds",
    "documented_accessor": "table.accessor",
    "DenseTable": "table.dense_table",
    "DenseTableConfig": "table.dense_table",
    "CountFilterEntry": "table.entry",
    "ProbabilityEntry": "table.entry",
    "ShowClickEntry": "table.entry",
    "Initializer": "table.initializers",
    "SparseTableConfig": "table.layout",
    "plan_dense_blocks": "table.partition",
    "servers_of_keys": "table.partition",
    "UniqueKeys": "table.ids",
    "sum_rows": "table.ids",
    "RowBlock": "table.rows",
    "Rule": "table.rules",
    "rule_from_paddle": "table.rules",
    "SparseTable": "table.sparse_table",
    "Delta": "publishing.delta",
    "RowsDelta": "publishing.delta",
    "StaleDelta": "publishing.delta",
    "publish": "publishing.publication",
    "Version": "publishing.versions",
    "release": "publishing.versions",
    "roll_back": "publishing.versions",
    "export_text": "files.text_format",
    "import_text": "files.text_format",
    "load_table": "files.table_files",
    "load_dense": "files.table_files",
    "save_dense": "files.table_files",
    "save_table": "files.table_files",
    "Reader": "serving.reader",
    "ItemIndex": "serving.item_index",
    "Predictor": "serving.predictor",
    "export": "serving.export",
    "Guard": "serving.guard",
    "guard": "serving.guard",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, {name: f".{home}" for name, home in _HOMES.items()})
