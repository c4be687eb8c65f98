"""What a bare system takes over from this machine so that pip, npm and apt reach their registries.

Nothing of it is known here: the machine's own configuration says where they are.
"""

from __future__ import annotations

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

_VARIABLES = re.compile(
    r"(PIP|UV|NPM|NPM_CONFIG|SSL_CERT|REQUESTS|CURL|NODE_EXTRA|HTTPLIB2)_|(https?|no|all)_proxy$",
    re.IGNORECASE,
)
_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/npmrc", "/etc/ssl/certs", "/etc/apt/apt.conf.d")


def variables() -> dict[str, str]:
    """Return the variables of this environment that say where registries are."""
    return {name: text for name, text in os.environ.items() if _VARIABLES.match(name)}


def copy_into(root: Path) -> None:
    """Copy configuration files, and write pip's as one file for everybody."""
    for name in (*_FILES, *filter(os.path.isfile, _words())):
        source, target = Path(name), root / name.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            target.mkdir(exist_ok=True)  # links are replaced, which shutil.copytree refuses
            subprocess.run(["cp", "-a", f"{source}/.", str(target)], check=True)
        elif source.exists():
            target.unlink(missing_ok=True)
            shutil.copy(source, target)
    npm = Path.home() / ".npmrc"
    if npm.exists():
        with (root / "etc" / "npmrc").open("a") as file:
            file.write(npm.read_text())
    settings = configparser.RawConfigParser()
    for key, text in _pip().items():
        section, _, name = key.rpartition(".")
        settings.read_dict({section: {name: text}})
    with (root / "etc" / "pip.conf").open("w") as file:
        settings.write(file)


def folders() -> list[Path]:
    """Return the folders of this machine that pip takes packages from."""
    found: dict[Path, None] = {}
    for word in _words():
        path = Path(unquote(urlsplit(word).path) if word.startswith("file:") else word)
        if path.is_absolute() and path.is_dir():
            # an index by the book is `simple`, and its packages may lie beside it
            found[path.parent if path.name == "simple" else path] = None
    return list(found)


def _words() -> list[str]:
    """Return the words of all settings; some are files or folders, as a constraint."""
    return " ".join((*_pip().values(), *variables().values())).split()


def _pip() -> dict[str, str]:
    """Return pip's settings from all its files: section.name -> value."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {
        key: str(ast.literal_eval(text)) for key, _, text in pairs if not key.startswith(":env:")
    }
