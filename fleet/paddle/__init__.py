"""Names that exist for scripts from Paddle only; their public paths are those of ``fleet``."""
