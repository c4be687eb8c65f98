"""Follows the ranks of this node: what they record, and how each of them ends."""
