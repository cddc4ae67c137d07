"""``python -m fleet migrate``: the diff that turns a training script of another kind into one for this package."""
