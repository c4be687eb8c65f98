"""A part of the journal that goes by age, and in which batch a number came, for the same reason."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rankscope_server.store.migrations.columns import blob, number, run, word

revision = "0014_journal"
down_revision = "0013_use_of_machines"


def upgrade() -> None:
    """Add both; what came before is as new as the newest batch of its run.

    Records of batches from before stay where they are, as long as their run.
    """
    op.create_table(
        "journal",
        number("batch_id", is_key=True),
        word("kind", 32, is_key=True),
        run(),
        blob("records"),
        sa.PrimaryKeyConstraint("batch_id", "kind", name="pk_journal"),
    )
    op.create_index("ix_journal_run_id_kind_batch_id", "journal", ["run_id", "kind", "batch_id"])
    op.add_column("metric", number("batch_id"))
    op.execute(
        sa.text(
            "UPDATE metric SET batch_id = coalesce("
            "(SELECT max(batch.id) FROM batch WHERE batch.run_id = metric.run_id), 0)"
        )
    )
    op.create_index("ix_metric_run_id_batch_id", "metric", ["run_id", "batch_id"])
