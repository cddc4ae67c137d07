"""Refuses ``fleet.utils.tensor_parallel_utils``: it changes static graphs, and torch has none."""

raise ImportError(
    "fleet.utils.tensor_parallel_utils (insert_sync_op and others) changes static graphs, and torch has none. Whole "
    "parameters stay equal by themselves; hybrid_configs['mp_configs'] has sync_param, sync_grad and sync_moment."
)
