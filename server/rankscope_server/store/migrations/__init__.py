"""Alembic migrations, run by the server at its start."""
