"""Collectives: the bytes that each rank sends, and the seconds that they take."""
