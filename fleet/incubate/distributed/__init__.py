"""Fleet's path to ``models.moe``."""
