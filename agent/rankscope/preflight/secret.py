"""Where the secret of a preflight comes from: only who knows it takes part.

No launcher gives the processes of a job something that only they know. Slurm, PBS and MPI hand out
numbers of jobs, which everybody on the cluster can list, and Open MPI's key of its transports is
made of these numbers under Slurm and stands in command lines elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

TOKEN_VARIABLE = "RANKSCOPE_PREFLIGHT_TOKEN"
FILE_VARIABLE = "RANKSCOPE_PREFLIGHT_TOKEN_FILE"
SERVER_VARIABLE = "RANKSCOPE_TOKEN"
NAME = "preflight.key"
SHARED_NAME = ".rankscope-preflight.key"
LEAST_CHARACTERS = 8
READ_LIMIT_S = 3.0  # a home directory on a dead network disk must not hold us
_SETTLE_S, _PAUSE_S = 1.0, 0.05  # for the node that makes the file to fill it
_OPEN_TO_OTHERS = 0o077
T = TypeVar("T")


class SecretError(Exception):
    """The secret that was given cannot be used; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Secret:
    """What all nodes of a preflight know, and where this node has it from."""

    text: str = field(repr=False)
    source: str  # for people: a variable, a file; it holds no secret
    path: str = ""  # of the file that it is in
    is_own: bool = False  # this node alone can know it: it must be shown
    notice: str = ""  # for the terminal of this node, and no report


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says of the secret."""

    token_file: str = ""
    share: str = ""  # a directory that all nodes see
    is_insecure: bool = False
    is_alone: bool = False  # no other node takes part


def find(environ: Mapping[str, str], asked: Asked) -> Secret:
    """Return the secret; one is made where there is none. Raises SecretError."""
    if asked.is_insecure:
        notice = "--insecure: anyone who reaches this node can take part and change the answer"
        return Secret(text="", source="--insecure", notice=notice)
    return (
        _given(environ, asked.token_file)
        or (_alone() if asked.is_alone else None)
        or (_in_share(asked.share) if asked.share else None)
        or _of_server(environ)
        or _in_home(environ)
    )


def _given(environ: Mapping[str, str], token_file: str) -> Secret | None:
    if token_file:
        return _from_file(token_file, "--token-file")
    if text := environ.get(TOKEN_VARIABLE, "").strip():
        return Secret(text=_checked(text, TOKEN_VARIABLE), source=TOKEN_VARIABLE)
    if path := environ.get(FILE_VARIABLE, ""):
        return _from_file(path, FILE_VARIABLE)
    return None


def _of_server(environ: Mapping[str, str]) -> Secret | None:
    """Those who may write to the job's server may take part in its preflight."""
    text = environ.get(SERVER_VARIABLE, "").strip()
    return Secret(text=f"server {text}", source=SERVER_VARIABLE) if text else None


def _alone() -> Secret:
    return Secret(text=_made(), source="made for this run")


def _from_file(path: str, how: str) -> Secret:
    try:
        text = _limited(lambda: _read(Path(path)))
    except TimeoutError as error:
        raise SecretError(f"{how}: {path} does not answer in {READ_LIMIT_S:g} s") from error
    except OSError as error:
        raise SecretError(f"{how}: {path}: {error.strerror or error}") from error
    return Secret(text=_checked(text, f"{how} {path}"), source=f"{how} {path}", path=path)


def _in_share(directory: str) -> Secret | None:
    """Nodes that see one directory agree by a file in it, if they run as one user."""
    path = Path(directory) / SHARED_NAME

    def agree() -> str:
        return _read_or_make(path) if path.parent.is_dir() else ""

    try:
        text = _limited(agree)
    except (OSError, SecretError):  # of another user, or not writable: the files are signed all the
        return None  # same, with a secret from elsewhere
    return Secret(text=text, source=str(path), path=str(path)) if text else None


def _in_home(environ: Mapping[str, str]) -> Secret:
    path = own_path(environ)
    try:
        text = _limited(lambda: _read_or_make(path))
    except OSError as error:
        why = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or error
        text = _made()
        notice = (
            f"no secret can be kept in {path.parent} ({why}). On every other node, before it is "
            f"started there: {export_of(text)}"
        )
        return Secret(text=text, source="made for this run", is_own=True, notice=notice)
    return Secret(text=text, source=str(path), path=str(path))


def export_of(text: str) -> str:
    """Return the line that gives a secret to another node."""
    return f"export {TOKEN_VARIABLE}={shlex.quote(text)}"


def line_for_others(secret: Secret, is_terminal: bool) -> str:
    """Return the line to copy to a node; in a log, which others may read, without the secret."""
    if is_terminal or secret.is_own:
        return export_of(secret.text)
    return f"export {FILE_VARIABLE}=FILE, with what is in {secret.path}, readable by you alone"


def own_path(environ: Mapping[str, str]) -> Path:
    """Return where the secret of this user is kept, there already or not."""
    base = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # the specification: a relative one is ignored
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(base) / "rankscope" / NAME


def _checked(text: str, how: str) -> str:
    if len(text) < LEAST_CHARACTERS:
        raise SecretError(
            f"{how}: a secret of {len(text)} characters can be guessed; make one: "
            "python3 -c 'import secrets; print(secrets.token_hex(16))'"
        )
    return text


def _made() -> str:
    return secrets.token_hex(16)


def _read(path: Path) -> str:
    """Return the secret in a file. Raises OSError, and SecretError where others can read it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise SecretError(f"{path} is no file")
        if about.st_mode & _OPEN_TO_OTHERS:
            raise SecretError(
                f"{path}: others can read or change it: chmod 600 {shlex.quote(str(path))}"
            )
        if about.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
            raise SecretError(f"{path} belongs to another user (uid {about.st_uid})")
        data = file.read(4096)
    return data.decode("utf-8", "replace").strip()


def _read_or_make(path: Path) -> str:
    """Return the secret in a file, which is made if it is not there. Raises OSError, SecretError.

    Of nodes that do this at the same moment one makes the file and all read it: a link to a name
    that exists fails, on network disks too.
    """
    deadline = time.monotonic() + _SETTLE_S
    while True:
        try:
            text = _read(path)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            _make(path)
            os.listdir(path.parent)  # a network disk that remembers the file as absent looks anew
            continue
        if len(text) >= LEAST_CHARACTERS:
            return text
        if time.monotonic() > deadline:
            raise SecretError(f"{path} holds no secret: rm {shlex.quote(str(path))}")
        time.sleep(_PAUSE_S)


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    _write(draft, f"{_made()}\n")
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    except OSError:  # a file system without links: the first to open it fills it
        with contextlib.suppress(FileExistsError):
            _write(path, f"{_made()}\n")
    finally:
        draft.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(path, flags, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _limited(call: Callable[[], T]) -> T:
    """Return what `call` returns. Raises what it raises, TimeoutError if it does not end."""
    found: list[T] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            found.append(call())
        except Exception as error:  # noqa: BLE001 - raised below, by the one who asked
            failed.append(error)

    thread = threading.Thread(target=work, name="preflight-secret", daemon=True)
    thread.start()
    thread.join(READ_LIMIT_S)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError
    return found[0]
