"""How the nodes of a job find each other and agree on who takes part."""
