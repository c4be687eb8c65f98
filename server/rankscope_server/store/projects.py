"""The projects that runs and preflights belong to: who sees which."""

from __future__ import annotations

import sqlalchemy as sa

from rankscope_server.problems import Problem, not_found
from rankscope_server.store import tables


def project_of(connection: sa.Connection, table: sa.Table, id: str) -> str | None:
    """Return the project of a run or preflight; None where there is no such one."""
    (key,) = table.primary_key.columns
    if "\x00" in id:  # which some databases do not take even to compare
        return None
    return connection.scalar(sa.select(table.c.project).where(key == id))


def of_project(table: sa.Table, project: str | None) -> list[sa.ColumnElement[bool]]:
    """Return the condition that leaves what a project may see of `table`; None is all.

    `table` has a column `project`, or it has `run_id` and the run's project counts.
    """
    if project is None:
        return []
    if "project" in table.c:
        return [table.c.project == project]
    run = tables.run.c
    return [table.c.run_id.in_(sa.select(run.run_id).where(run.project == project))]


def claim_run(connection: sa.Connection, run_id: str, project: str) -> bool:
    """Return whether a run belongs to a project; a new one does from now on."""
    run = tables.run
    found = project_of(connection, run, run_id)
    if found is None:
        connection.execute(sa.insert(run).values(run_id=run_id, project=project))
    return found in (None, project)


def not_ours(run_id: str) -> Problem:
    """Return the answer to a batch of a run that is another project's: it says no more than 404."""
    return not_found(
        f"no run {run_id[:128]!r} of the project of this token",
        "choose another name with RANKSCOPE_RUN_ID, or use a token of that project", "run_id",
    )  # fmt: skip
