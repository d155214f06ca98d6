"""Pure geometry: boxes of tensors."""
