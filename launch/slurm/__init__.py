"""Jobs of Slurm: a batch script that starts one launcher on every node, written and submitted."""
