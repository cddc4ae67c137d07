"""What all formats of checkpoints share: the whole state that each reads and writes, and the registry of formats."""
