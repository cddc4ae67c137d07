"""Where the time of a step goes: its parts on each worker, and torch's profiler for the steps of ``--profile``."""
