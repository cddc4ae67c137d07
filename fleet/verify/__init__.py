"""``python -m fleet verify``: proof that a strategy did not change the training of a script."""
