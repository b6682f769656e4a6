"""Loops that are not ours: what they hold beside what their job's account says, and why they ran out of memory."""
