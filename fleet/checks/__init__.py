"""What must hold on all workers while a job trains, and what a broken exchange means."""
