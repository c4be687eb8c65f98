"""Clocks of hosts and processes that are apart."""
