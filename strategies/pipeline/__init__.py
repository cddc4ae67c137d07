"""pipeline: the layers are divided over the workers of the pp axis, and micro-batches flow through them."""

from fleet.strategies.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
