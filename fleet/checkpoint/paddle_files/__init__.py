"""Files of Paddle and of its parameter server as torch's states: names, layouts, optimizers and tables."""
