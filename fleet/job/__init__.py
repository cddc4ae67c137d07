"""What one ``fleet.init`` sets up: who takes part and where, the process group, and the session of this process."""
