"""What was measured: efficiencies in (0, 1] and link curves, each with where it came from."""
