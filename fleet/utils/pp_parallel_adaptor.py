"""Refuses ``fleet.utils.pp_parallel_adaptor``: states need no conversion between meshes."""

raise ImportError(
    "fleet.utils.pp_parallel_adaptor (PipeLineModelAdaptor and others) does not exist: names of a state do not depend "
    "on the number of stages. Save model.full_state_dict() or a fleet.elastic.Checkpoint, and load it on any mesh."
)
