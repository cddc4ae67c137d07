"""What more than one strategy runs on: exchange, windows, state by parts, meshes, update rules."""
