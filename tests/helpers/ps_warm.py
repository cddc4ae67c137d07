"""Imported once before processes are forked: each then has the packages, compiled kernels and options at once."""

from __future__ import annotations

import numpy as np
import torch

import tests.helpers.ps_fault_job  # noqa: F401
from fleet.options import DistributedStrategy
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule
from fleet.ps.table.sparse_table import SparseTable
from fleet.strategies import plan

_TABLE = SparseTable(SparseTableConfig("warm", 1, Rule("sgd")))
_TABLE.pull(np.arange(2, dtype=np.int64))
_TABLE.push(np.arange(2, dtype=np.int64), np.ones((2, 1), np.float32))
_TABLE.close()
torch.optim.SGD([torch.zeros(1)], 1.0).zero_grad()  # imports the half of torch that its optimizers need
plan(DistributedStrategy(), 2)  # describes every option
