"""Pure decisions: no files, no clock, no torch. Facts in, verdict and reason out."""
