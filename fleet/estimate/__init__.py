"""The memory of one worker while it trains, worked out before training."""
