"""Refuses ``fleet.meta_parallel.pp_utils``: transfers between stages belong to the pipeline."""

raise ImportError(
    "fleet.meta_parallel.pp_utils (p2p_communication and others) does not exist: train_batch() and eval_batch() send "
    "what passes between stages. For transfers of your own use torch.distributed.batch_isend_irecv with "
    "fleet.get_hybrid_communicate_group().get_pipe_parallel_group()."
)
