"""Refuses ``fleet.incubate.fleet``: its contents moved to the ``fleet`` package itself."""

raise ImportError(
    "fleet.incubate.fleet (paddle.fluid.incubate.fleet) does not exist. Write "
    "'from fleet import fleet' and call fleet.init(); role makers are in fleet.base.role_maker, options in "
    "fleet.DistributedStrategy."
)
