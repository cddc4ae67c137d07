"""Shared means of several strategies: state by parts, meshes, update rules."""
