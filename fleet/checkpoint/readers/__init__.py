"""Checkpoints of other programs: read and written one tensor at a time, and without running code from a file."""
