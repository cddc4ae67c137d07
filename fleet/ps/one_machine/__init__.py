"""What is faster because worker and server share a machine: large bodies in memory that both have mapped."""
