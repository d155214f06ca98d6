"""Benchmarks: each module that has a ``main`` measures one subject and writes ``results/<subject>.json``."""
