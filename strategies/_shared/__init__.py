"""What more than one strategy runs on: state by parts, meshes, update rules."""
