"""Other people's files, as text: each format is one module that detects, reads and writes, and imports no engine."""
