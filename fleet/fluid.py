"""Refuses ``fleet.fluid``: the 1.x namespace is gone, as in Paddle itself."""

raise ImportError(
    "fleet.fluid (paddle.fluid.incubate.fleet of 1.x) does not exist: the fluid namespace was removed. Write "
    "'from fleet import fleet' and call fleet.init(); role makers are in fleet.base.role_maker, options in "
    "fleet.DistributedStrategy."
)
