# Made by `make docs`; a change belongs into the code that it is made from.
"""The CPU parameter server: tables for ids without bound, their files, and the wire to them.

Names are resolved at first use: importing this package loads neither numpy nor numba.
"""

from fleet.ps.client.client import Client as Client
from fleet.ps.client.client_config import ClientConfig as ClientConfig
from fleet.ps.client.shards import Gradient as Gradient
from fleet.ps.embeddings.collection import SparseEmbeddings as SparseEmbeddings
from fleet.ps.embeddings.embedding import SparseEmbedding as SparseEmbedding
from fleet.ps.files.table_files import load_dense as load_dense
from fleet.ps.files.table_files import load_table as load_table
from fleet.ps.files.table_files import save_dense as save_dense
from fleet.ps.files.table_files import save_table as save_table
from fleet.ps.files.text_format import export_text as export_text
from fleet.ps.files.text_format import import_text as import_text
from fleet.ps.publishing.delta import Delta as Delta
from fleet.ps.publishing.delta import RowsDelta as RowsDelta
from fleet.ps.publishing.delta import StaleDelta as StaleDelta
from fleet.ps.publishing.publication import publish as publish
from fleet.ps.publishing.versions import Version as Version
from fleet.ps.publishing.versions import release as release
from fleet.ps.publishing.versions import roll_back as roll_back
from fleet.ps.server.server import Server as Server
from fleet.ps.server.server_config import ServerConfig as ServerConfig
from fleet.ps.server.server_process import run_server as run_server
from fleet.ps.serving.export import export as export
from fleet.ps.serving.guard import Guard as Guard
from fleet.ps.serving.guard import guard as guard
from fleet.ps.serving.item_index import ItemIndex as ItemIndex
from fleet.ps.serving.predictor import Predictor as Predictor
from fleet.ps.serving.reader import Reader as Reader
from fleet.ps.table.accessor import Accessor as Accessor
from fleet.ps.table.accessor import documented_accessor as documented_accessor
from fleet.ps.table.bounds import Bounds as Bounds
from fleet.ps.table.dense_table import DenseTable as DenseTable
from fleet.ps.table.dense_table import DenseTableConfig as DenseTableConfig
from fleet.ps.table.entry import CountFilterEntry as CountFilterEntry
from fleet.ps.table.entry import ProbabilityEntry as ProbabilityEntry
from fleet.ps.table.entry import ShowClickEntry as ShowClickEntry
from fleet.ps.table.ids import UniqueKeys as UniqueKeys
from fleet.ps.table.ids import sum_rows as sum_rows
from fleet.ps.table.initializers import Initializer as Initializer
from fleet.ps.table.layout import SparseTableConfig as SparseTableConfig
from fleet.ps.table.partition import plan_dense_blocks as plan_dense_blocks
from fleet.ps.table.partition import servers_of_keys as servers_of_keys
from fleet.ps.table.rows import RowBlock as RowBlock
from fleet.ps.table.rules import Rule as Rule
from fleet.ps.table.rules import rule_from_paddle as rule_from_paddle
from fleet.ps.table.sparse_table import SparseTable as SparseTable
from fleet.ps.wire.transport import SocketTransport as SocketTransport
from fleet.ps.worker.geo import GeoCommunicator as GeoCommunicator
from fleet.ps.worker.sender import AsyncSender as AsyncSender
from fleet.ps.worker.sender import HalfAsyncSender as HalfAsyncSender
from fleet.ps.worker.sender import SenderConfig as SenderConfig

__all__ = [
    "Accessor",
    "AsyncSender",
    "Bounds",
    "Client",
    "ClientConfig",
    "CountFilterEntry",
    "Delta",
    "DenseTable",
    "DenseTableConfig",
    "GeoCommunicator",
    "Gradient",
    "Guard",
    "HalfAsyncSender",
    "Initializer",
    "ItemIndex",
    "Predictor",
    "ProbabilityEntry",
    "Reader",
    "RowBlock",
    "RowsDelta",
    "Rule",
    "SenderConfig",
    "Server",
    "ServerConfig",
    "ShowClickEntry",
    "SocketTransport",
    "SparseEmbedding",
    "SparseEmbeddings",
    "SparseTable",
    "SparseTableConfig",
    "StaleDelta",
    "UniqueKeys",
    "Version",
    "documented_accessor",
    "export",
    "export_text",
    "guard",
    "import_text",
    "load_dense",
    "load_table",
    "plan_dense_blocks",
    "publish",
    "release",
    "roll_back",
    "rule_from_paddle",
    "run_server",
    "save_dense",
    "save_table",
    "servers_of_keys",
    "sum_rows",
]
