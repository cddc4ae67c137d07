"""Reproducible jobs: what each logical worker computes, recorded and compared bit by bit."""
