"""Files of tables: saves, their manifests, text, and what is checked before one is read."""
