"""An explicit-state model of the ledger protocol, and the search that tries to break it.

The protocol is modelled twice, for a POSIX directory (`posix.py`) and for an object store (`objects.py`).
Each rule of the protocol is a switch of `rules.Rules`; the tests remove them one by one.
"""
