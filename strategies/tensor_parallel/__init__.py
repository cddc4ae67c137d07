"""tensor_parallel: the weights of large layers are divided over the workers of the mp axis."""

from fleet.strategies.tensor_parallel.tensor_parallel import TensorParallel

__all__ = ["TensorParallel"]
