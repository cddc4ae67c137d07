# Made by `make docs`; a change belongs into the code that it is made from.
"""Training that survives failures: complete checkpoints, no sample seen twice, changes in the number of workers.

Names are resolved at first use, so that ``python -m fleet.elastic`` starts without torch.

Example:
    >>> sampler = fleet.elastic.ElasticSampler(range(12), seed=1)
    >>> checkpoint = fleet.elastic.Checkpoint("checkpoints", model, optimizer, data=sampler)
    >>> checkpoint.resume()
    False
"""

from fleet.elastic.checkpoint import Checkpoint as Checkpoint
from fleet.elastic.logical_loop import logical_ranks as logical_ranks
from fleet.elastic.resize import keep_global_batch as keep_global_batch
from fleet.elastic.resize import scale_lr as scale_lr
from fleet.elastic.sampler import ElasticSampler as ElasticSampler
from fleet.launch.processes.worker_file import PREEMPTED as PREEMPTED

__all__ = ["Checkpoint", "ElasticSampler", "PREEMPTED", "keep_global_batch", "logical_ranks", "scale_lr"]
