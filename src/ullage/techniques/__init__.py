"""Techniques as a person sees them: the numbered steps of one on a job, with the numbers of the estimate and of the time."""
