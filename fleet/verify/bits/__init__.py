"""Reproducible jobs: the computations of each logical worker, recorded and compared bit by bit."""
