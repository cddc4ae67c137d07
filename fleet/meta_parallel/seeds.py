"""model_parallel_random_seed: the random streams of the running job, seeded again."""

from __future__ import annotations

from fleet.job.running import running_job
from fleet.strategies.tensor_parallel.streams import seed_streams


def model_parallel_random_seed(seed: int | None = None) -> None:
    """Seeds torch's global stream with ``seed`` on every worker, and 'model_parallel_rng' by stage and part.

    ``fleet.init`` does so when ``mp_degree`` is above 1, with ``tensor_parallel_configs['tensor_init_seed']``. Streams
    that were added before are gone. The stream gets ``seed + 1 + mp_rank * stages + stage``; workers that differ in
    their data only have the same streams, and so the same dropout masks for other rows.

    Args:
        seed: a whole number of at least 0; ``None`` takes ``torch.initial_seed()`` of worker 0, and then every worker
            must call.

    Raises:
        ConfigError: another value.

    Example:
        >>> model_parallel_random_seed(1024 + 10 * fleet.get_hybrid_communicate_group().get_data_parallel_rank())
    """
    job = running_job()
    if job is None:
        seed_streams(seed, None)
    else:
        seed_streams(seed, job.axes, job.device)
