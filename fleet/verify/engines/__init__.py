"""Engines: the frameworks that a script may train with, one adapter in each module."""
