"""A job run for real: torch's own engines around transformers' models, composed from the job. Needs ullage[train].

Nothing here is an engine; what is not composed yet is refused by name (reach.py).
"""
