"""The command line: one file per command, which parses and shows; the library decides."""
