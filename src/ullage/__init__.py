"""ullage: what every byte on every GPU is."""
