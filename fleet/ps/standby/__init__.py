"""A standby for each parameter server."""
