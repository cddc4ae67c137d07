"""Loops over rows and ids, compiled by numba."""
