"""The answer for people and machines: screen, JSON, JUnit, page, list of nodes."""
