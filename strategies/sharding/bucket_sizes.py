"""How much stage 2 has on the wire: of gradients in backward, and of updated parameters in ``step()``."""

IN_FLIGHT = 2  # buckets at once: a wire slower than the computation would fill the memory with them
LAST_BYTES = 2**20  # of the bucket of gradients that is sent last, which no computation hides
GATHERED_BYTES = 8 * 2**20  # of a bucket of parameters
