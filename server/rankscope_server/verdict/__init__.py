"""From findings to one verdict: grouping, coverage, the first sentence."""
