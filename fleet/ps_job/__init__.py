"""A process's part in a parameter-server job: its settings, its servers or its training, its metrics."""
