"""All runs together: what is live, hosts over runs, hours by week."""
