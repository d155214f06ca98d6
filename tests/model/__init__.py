"""An explicit-state model of the ledger protocol, and the search that tries to break it.

The protocol is modelled twice, for a POSIX directory (`posix.py`) and for an object store (`objects.py`), on the
steps that both share (`protocol.py`). Each rule of the protocol is a switch of `rules.Rules`; `cases.py` says what
breaks without it. Change the model together with the code.

Left out: what a lease says (safety needs none), two live incarnations that fence each other for ever, several ranks,
landed sets, caches of network file systems, grace periods and pins of readers, rollbacks that somebody chose, bit
rot, uploads of data (not of entries) that land late: under a name that is used once they are only litter.
"""
