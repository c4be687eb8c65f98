"""A rule that a new server begins with has the word that alerts have."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015_stalled"
down_revision = "0014_journal"


def upgrade() -> None:
    """Rename it, unless it was renamed before or another rule has the name."""
    op.execute(
        sa.text(
            "UPDATE alert_rule SET name = 'Runs that have stalled' "
            "WHERE name = 'Runs that stand still' AND NOT EXISTS "
            "(SELECT 1 FROM alert_rule WHERE name = 'Runs that have stalled')"
        )
    )
