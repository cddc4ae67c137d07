"""The plan of the processes: nodes, addresses, ports and devices, and the environment of each process."""
