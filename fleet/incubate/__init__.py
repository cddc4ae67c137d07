"""``fleet.incubate``: Fleet's path to layers of experts; what else it held is in the ``fleet`` package itself."""

__all__: list[str] = []
