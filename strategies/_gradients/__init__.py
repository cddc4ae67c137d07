"""How gradients are added up over batches and exchanged between workers while backward runs."""
