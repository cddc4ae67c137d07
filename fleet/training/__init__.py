"""Training: the wrapped model and optimizer, and what happens between two batches."""
