"""The launcher: starts the processes of a job on each node, watches them, and says how they ended.

``python -m fleet.launch`` runs it. Standard library only, so that it starts in no time and without torch.
"""

__all__: list[str] = []  # its commands are its face: python -m fleet.launch --help
