"""What is done to committed checkpoints, without torch."""
