"""Fleet's path to ``moe``."""
