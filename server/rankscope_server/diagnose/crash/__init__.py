"""The rank that failed first, and those that failed because of it."""
