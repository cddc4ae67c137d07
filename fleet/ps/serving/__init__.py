"""Serving: rows looked up and models run outside the job that trains them, while it trains them."""
