"""The rows of the ledger: one function per source, judging by evidence alone."""
