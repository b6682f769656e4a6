"""Seconds of a step: what each op computes, moves and sends, and how an engine overlaps it. docs/accuracy.md says how far it is off."""
