"""The command line: its flags, the environment beside them, and the texts that a launcher shows."""
