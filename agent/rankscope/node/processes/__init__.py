"""Processes from outside: alive or not, exit status, stacks."""
