"""Sessions of people whom an issuer of OpenID Connect named, and sign-ins that were begun."""

from __future__ import annotations

from alembic import op

from rankscope_server.store.migrations.columns import number, text, word

revision = "0007_oidc"
down_revision = "0006_alerts_from_file"


def upgrade() -> None:
    """Add the columns; sessions that are there are of tokens."""
    for column in (text("holder"), text("roles"), word("project", 64, default="default")):
        op.add_column("session", column)
    op.create_table(
        "oidc_login",
        word("id", 64, is_key=True), text("browser"), text("nonce"), text("verifier"),
        text("path"), number("expires_ns"),
    )  # fmt: skip
    op.create_index("ix_oidc_login_expires_ns", "oidc_login", ["expires_ns"])
