"""What exists: the ledger and its one predicate, and everything that keeps it true."""
