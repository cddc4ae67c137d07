"""Trackers: where ``fleet.log`` writes. Subclass :class:`Tracker` for another destination.

A package declares one under the entry-point group ``fleet.trackers``; then ``strategy.trackers`` takes its name.
"""

from fleet.trackers.tracker import RunInfo, Tracker

__all__ = ["RunInfo", "Tracker"]
