"""Modules that look up rows of tables on parameter servers, and the lookup itself."""
