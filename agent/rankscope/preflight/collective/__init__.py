"""The collective smoke test: a torch child, its parent, and gloo's own word on its address."""
