"""Names that exist only for scripts from Paddle; their public paths are those of ``fleet``."""
