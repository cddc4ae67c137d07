"""The processes of one node: their start, logs, health and end."""
