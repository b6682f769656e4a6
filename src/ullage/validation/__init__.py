"""Estimates held against measured runs."""
