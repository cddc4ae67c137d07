"""Descriptions of layers, and the list that stages share out; names of :mod:`fleet.meta_parallel`."""

from fleet.meta_parallel.pipeline_layer import PipelineLayer as PipelineLayer
from fleet.strategies.pipeline.descriptions import LayerDesc as LayerDesc
from fleet.strategies.pipeline.descriptions import LocalSharedLayerDesc as LocalSharedLayerDesc
from fleet.strategies.pipeline.descriptions import SharedLayerDesc as SharedLayerDesc

__all__ = ["LayerDesc", "LocalSharedLayerDesc", "PipelineLayer", "SharedLayerDesc"]
