"""The way back: select → verify → load → resume."""
