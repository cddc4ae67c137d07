"""Tests of examples/recommenders."""
