"""The state of each run in memory, and the loop that looks at every live one."""
