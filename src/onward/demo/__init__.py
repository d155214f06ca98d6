"""The demonstration: a small GPT is trained, killed inside a save, resumed, and proven to be the same run."""
