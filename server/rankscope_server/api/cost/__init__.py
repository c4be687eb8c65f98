"""What a run cost: its ledger, and what changes would give."""
