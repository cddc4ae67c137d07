"""The worker's connection to the servers: requests, retries, and how a batch is split over servers."""
