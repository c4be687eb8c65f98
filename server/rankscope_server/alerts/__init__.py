"""Alerts: rules over what the analysis found and how the server is, and messages to people."""
