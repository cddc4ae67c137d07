"""The page of the job: what ``--page`` serves while the processes of this node run."""
