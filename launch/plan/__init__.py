"""What runs where: nodes, addresses, ports and devices, and the environment of each process."""
