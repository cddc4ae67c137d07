"""Checks of what must hold on all workers while a job trains, and explanations of a broken exchange."""
