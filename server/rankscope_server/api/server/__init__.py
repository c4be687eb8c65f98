"""How Rankscope itself is: its parts, what it sees of live runs, its own numbers."""
