"""How busy processors and GPUs were, as their samples came."""

from __future__ import annotations

from alembic import op

from rankscope_server.store.migrations.columns import number

revision = "0013_use_of_machines"
down_revision = "0012_analysis_state"


def upgrade() -> None:
    """Add the columns; of samples from before it is not known."""
    for name, default in (("known_us", 0), ("busy_us", 0), ("counter_us", -1)):
        op.add_column("sample_span", number(name, default))
