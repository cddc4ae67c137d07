"""Who started this process, and its rank: the launcher, torchrun, srun, mpirun, Kubeflow."""
