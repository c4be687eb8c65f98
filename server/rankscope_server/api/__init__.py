"""The HTTP API and the dashboard: a folder per resource with its schema, queries and routes."""
