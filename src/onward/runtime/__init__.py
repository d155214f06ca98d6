"""The machine and the process: memory, signals, clocks."""
