"""Faults: what is left on the disk, and what loads, whatever goes wrong at whichever moment."""
