"""What one ``fleet.init`` sets up: the session, its process group, and the wrapped model and optimizer."""
