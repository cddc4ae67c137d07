"""Rows to serving: the rows that training has touched go, as numbered deltas, to a sink that keeps them for serving."""
