"""Fleet's place for role makers: ``fleet.base.role_maker``."""
