"""Bytes ⇄ records, without I/O. ``docs/format.md`` is the specification; this room implements it."""
