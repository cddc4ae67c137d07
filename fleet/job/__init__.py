"""The job that ``fleet.init`` sets up: its workers and their places, the process group, and the session."""
