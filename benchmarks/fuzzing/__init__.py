"""What `benchmarks/fuzz.py` sends, and how it looks at what becomes of it."""
