"""The way out: training state → capture → shards → commit."""
