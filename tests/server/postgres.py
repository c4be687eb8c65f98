"""A PostgreSQL server of the tests' own, from the programs of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

_PLACES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
# It refuses to run as root.
_NOBODY = 65534


def missing() -> str:
    """Return why no server can be started here; empty where one can."""
    try:
        import psycopg  # noqa: F401 - whether the driver is there
    except ImportError as error:
        return f"no driver: {error}; pip install 'psycopg[binary]'"
    if _program("initdb") is None:
        return "no PostgreSQL server: apt-get install postgresql"
    return ""


def _program(name: str) -> str | None:
    path = os.pathsep.join([*map(str, _PLACES), os.environ.get("PATH", "")])
    return shutil.which(name, path=path)


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Run a server that only this machine's sockets reach; yield the address of its databases."""
    with tempfile.TemporaryDirectory(prefix="pg") as name:
        folder = Path(name)
        data = folder / "data"
        as_user: dict[str, int] = {}
        if os.geteuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
            as_user = {"user": _NOBODY, "group": _NOBODY}
        initdb, control = _program("initdb"), _program("pg_ctl")
        assert initdb is not None
        assert control is not None
        log = folder / "log"
        _run([initdb, "-D", str(data), "-U", "rank", "--auth=trust", "-N"], as_user)
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        _run([control, "-D", str(data), "-l", str(log), "-w", "-o", options, "start"], as_user)
        try:
            yield f"postgresql+psycopg://rank@/{{}}?host={folder}"
        finally:
            _run([control, "-D", str(data), "-m", "immediate", "-w", "stop"], as_user)


def new_database(address: str) -> str:
    """Make an empty database in a cluster; return its address."""
    name = f"t{uuid.uuid4().hex[:12]}"
    engine = sa.create_engine(address.format("postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine.dispose()
    return address.format(name)


def _run(command: list[str], as_user: dict[str, int]) -> None:
    subprocess.run(command, check=True, cwd="/", stdout=subprocess.DEVNULL, timeout=120, **as_user)  # type: ignore[call-overload]
