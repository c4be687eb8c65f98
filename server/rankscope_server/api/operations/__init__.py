"""Health, readiness, settings, sign-in, counters."""
