"""From the merged reports of all nodes to findings, their causes and the exit code."""
