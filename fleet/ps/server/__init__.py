"""A server: its requests, state and workers, journal, snapshots and metrics."""
