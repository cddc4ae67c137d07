"""Training on served tables: embeddings, the exchange of gradients, asynchronous senders, hybrid jobs."""
