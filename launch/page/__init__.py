"""The page of the job, which ``--page`` serves while the processes of this node run."""
