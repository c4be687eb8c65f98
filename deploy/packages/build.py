"""Make everything that is handed out of one version, for machines that reach no registry.

    python deploy/packages/build.py [--out artifacts/packages] [--extras server,postgres] [--deb]

Into --out come, for this version of Python and this kind of machine:

    rankscope-VERSION.tar.gz, rankscope-VERSION-py3-none-any.whl    as a registry takes them
    rankscope-VERSION-PYTHON-PLATFORM.tar   a bundle: all wheels, exact versions with their hashes,
                                            `install`, and what is in it (sbom.cdx.json, CycloneDX)
    rankscope_VERSION_ARCH.deb              the same as a Debian package (--deb), with the units of
                                            deploy/systemd
    SHA256SUMS                              of all of them

The bundle is made of what pip resolves now, and is tried before it is packed: its `install` runs
into an empty folder, without any registry. The times of files are those of the commit, or of
SOURCE_DATE_EPOCH. Exit code 1, and a sentence, where a step fails.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
EXTRAS = "server,postgres,fleet,objects,oidc,data,completion,mcp,otlp"
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
PLATFORM = sysconfig.get_platform().replace("-", "_")
UNITS = ("rankscope-server.service", "rankscope-backup.service", "rankscope-backup.timer")


class CannotBuild(Exception):
    """A step failed; the message says which, and its last lines."""


def call(command: Sequence[str | Path], **more: str) -> str:
    """Run a command and return what it prints. Raises CannotBuild."""
    environ = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | more
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environ, check=False
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:]
        raise CannotBuild("\n".join([f"{command[0]} ended with {done.returncode}:", *last]))
    return done.stdout


def commit_seconds() -> int:
    """Return the time of the commit, s since the epoch; of a copy without history a file's."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    try:
        return int(call(["git", "-C", ROOT, "log", "-1", "--format=%ct"]))
    except (CannotBuild, FileNotFoundError):
        return int((ROOT / "pyproject.toml").stat().st_mtime)


# --- wheel, sources, bundle ---------------------------------------------------------------------


def build_project(out: Path) -> Path:
    """Make the wheel and the sources; return the wheel."""
    call([sys.executable, "-m", "build", "--outdir", out, ROOT],
         SOURCE_DATE_EPOCH=str(commit_seconds()))  # fmt: skip
    (wheel,) = out.glob("rankscope-*.whl")
    return wheel


def gather(wheel: Path, extras: str, folder: Path) -> None:
    """Put the wheel and all that it needs into a folder, with the list of exact hashes."""
    wheels = folder / "wheels"
    call([sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", wheels,
          f"{wheel}[{extras}]"])  # fmt: skip
    lines = []
    for path in sorted(wheels.glob("*.whl")):
        name, version = path.name.split("-")[:2]
        chosen = f"[{extras}]" if name == "rankscope" else ""
        lines.append(f"{name}{chosen}=={version} --hash=sha256:{sha256(path)}\n")
    (folder / "requirements.txt").write_text("".join(lines))
    shutil.copy(HERE / "install", folder / "install")
    (folder / "install").chmod(0o755)
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")


def try_and_list(folder: Path, version: str, scratch: Path) -> None:
    """Install the bundle without a registry, and write down what it brought.

    Raises CannotBuild where it does not install, or is of another version.
    """
    place = scratch / "tried"
    call([folder / "install", place], PYTHON=sys.executable)
    said = call([place / "bin" / "rankscope", "--version"]).split()[-1]
    if said != version:
        raise CannotBuild(f"the bundle of {version} says that it is {said}")
    call([sys.executable, "-m", "cyclonedx_py", "environment", place / "bin" / "python",
          "--pyproject", ROOT / "pyproject.toml", "--mc-type", "application", "--of", "JSON",
          "--sv", "1.6", "--output-reproducible", "-o", folder / "sbom.cdx.json"])  # fmt: skip


def pack(folder: Path, target: Path, seconds: int) -> Path:
    """Pack a folder, its files in order, owned by root, of one time."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        entry.mtime = seconds
        return entry

    with tarfile.open(target, "w") as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, Path(target.stem) / path.relative_to(folder), recursive=False,
                    filter=plain)  # fmt: skip
    return target


# --- Debian ---------------------------------------------------------------------------------------


def build_deb(bundle: Path, out: Path, version: str, seconds: int, scratch: Path) -> Path:
    """Make a Debian package of the bundle's folder, with the units of systemd."""
    arch = call(["dpkg", "--print-architecture"]).strip()
    tree = scratch / "deb"
    shutil.copytree(bundle, tree / "usr/lib/rankscope")
    units = tree / "usr/lib/systemd/system"
    units.mkdir(parents=True)
    for name in UNITS:
        shutil.copy(ROOT / "deploy/systemd" / name, units)
    shutil.copytree(ROOT / "deploy/systemd/rankscope-.service.d", units / "rankscope-.service.d")
    users = tree / "usr/lib/sysusers.d"
    users.mkdir(parents=True)
    shutil.copy(ROOT / "deploy/systemd/rankscope.sysusers", users / "rankscope.conf")
    (tree / "usr/bin").mkdir()
    (tree / "usr/bin/rankscope").symlink_to("/opt/rankscope/bin/rankscope")
    texts = tree / "usr/share/doc/rankscope"
    texts.mkdir(parents=True)
    shutil.copy(ROOT / "LICENSE", texts / "copyright")
    control = tree / "DEBIAN"
    control.mkdir()
    size_kib = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file()) // 1024
    minor = sys.version_info.minor
    fields = (HERE / "control.in").read_text().format(
        version=debian_version(version), arch=arch, size=size_kib, low=f"3.{minor}",
        high=f"3.{minor + 1}",
    )  # fmt: skip
    (control / "control").write_text(fields)
    for name in ("postinst", "prerm", "postrm"):
        shutil.copy(HERE / name, control / name)
        (control / name).chmod(0o755)
    target = out / f"rankscope_{debian_version(version)}_{arch}.deb"
    call(["dpkg-deb", "--root-owner-group", "--build", tree, target],
         SOURCE_DATE_EPOCH=str(seconds))  # fmt: skip
    return target


def debian_version(version: str) -> str:
    """Return a version of Python's as Debian orders it: 1.0rc1 is before 1.0, as 1.0~rc1 is."""
    return re.sub(r"(?<=\d)\.?(a|b|rc|dev)(?=\d)", r"~\1", version)


# --- all ------------------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(out: Path, made: Iterable[Path]) -> None:
    """Write the digests as `sha256sum --check` reads them."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(made)]
    (out / "SHA256SUMS").write_text("".join(lines))


def build(out: Path, extras: str, *, is_deb: bool) -> list[Path]:
    """Make everything; return the files. Raises CannotBuild."""
    out.mkdir(parents=True, exist_ok=True)
    if old := sorted(out.glob("rankscope[-_]*")):
        raise CannotBuild(f"{out} holds {old[0].name}: give an empty folder")
    seconds = commit_seconds()
    wheel = build_project(out)
    version = wheel.name.split("-")[1]
    name = f"rankscope-{version}-{PYTHON}-{PLATFORM}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        folder.mkdir()
        gather(wheel, extras, folder)
        try_and_list(folder, version, Path(scratch))
        shutil.copy(folder / "sbom.cdx.json", out / f"{name}.cdx.json")
        pack(folder, out / f"{name}.tar", seconds)
        if is_deb:
            build_deb(folder, out, version, seconds, Path(scratch))
    made = sorted(out.glob("rankscope[-_]*"))
    write_sums(out, made)
    return made


def main() -> int:
    """Make everything and list it; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts" / "packages")
    parser.add_argument("--extras", default=EXTRAS, help="of the bundle (default: %(default)s)")
    parser.add_argument("--deb", action="store_true", help="a Debian package too")
    chosen = parser.parse_args()
    try:
        made = build(chosen.out, chosen.extras, is_deb=chosen.deb)
    except CannotBuild as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for path in made:
        sys.stdout.write(f"{path.stat().st_size / 1e6:8.1f} MB  {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
