"""After the fact: what a run left behind, read and held against the account."""
