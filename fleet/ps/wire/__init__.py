"""Messages between workers and servers: their form, what carries them, and what proves and seals them."""
