"""Refuses ``fleet.utils.tensor_fusion_helper``: there are no fused buffers to reach."""

raise ImportError(
    "fleet.utils.tensor_fusion_helper (fused_parameters, FusedCommBuffer and others) does not exist: gradients travel "
    "in flat buckets by themselves. For an exchange of your own use fleet.utils.hybrid_parallel_util."
    "fused_allreduce_gradients_with_group(parameters, group)."
)
