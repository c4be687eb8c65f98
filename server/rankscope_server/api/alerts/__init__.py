"""Alerts: what is open, the rules, the channels, and what was sent."""
