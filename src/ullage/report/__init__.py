"""Numbers to text: the only place where it happens."""
