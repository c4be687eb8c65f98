"""The systems that the two commands are tried on: one row each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Tun = Literal["absent", "root", "open"]  # /dev/net/tun: not there, for root only, for all
BARE = ("python3", "python3-venv", "git", "make", "ca-certificates", "passwd")  # and useradd
COMPILER = ("g++", "python3-dev")
DEBIANS = {
    "bookworm": "Debian 12 (Python 3.11)",
    "trixie": "Debian 13 (Python 3.13)",
    "forky": "Debian 14, testing (Python 3.14)",
}
TESTING = "forky"


@dataclass(frozen=True)
class Row:
    """One fresh system; the defaults are the smallest."""

    name: str
    debian: str = "bookworm"
    user: str = "new"  # or root
    compiler: bool = False
    tun: Tun = "root"
    namespaces: bool = True
    shm_mib: int = 0  # 0: half of the memory
    ipv6: bool = True
    torch: str = ""  # for pip, in place of the Makefile's
    folder: str = "rankscope"  # where the clone is, below the user's home
    ascii: bool = False  # a terminal that knows ASCII only
    home: bool = True  # HOME is set

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the packages of the system."""
        return (*BARE, *COMPILER) if self.compiler else BARE

    def words(self) -> str:
        """Return what is special about it."""
        told = [
            DEBIANS[self.debian],
            "root" if self.user == "root" else "ordinary user",
            "g++" if self.compiler else "no compiler",
            {"absent": "no tun", "root": "tun for root", "open": "tun for all"}[self.tun],
        ]
        told += [] if self.namespaces else ["no namespaces permitted"]
        told += [f"/dev/shm of {self.shm_mib} MB"] if self.shm_mib else []
        told += [] if self.ipv6 else ["no IPv6"]
        told += [f"`{self.torch}`"] if self.torch else []
        told += ["a path with blanks"] if " " in self.folder else []
        told += ["an ASCII terminal"] if self.ascii else []
        told += [] if self.home else ["HOME unset"]
        return ", ".join(told)

    def holds(self, other: Row) -> bool:
        """Return whether this is another row of which more has been taken away.

        Debian, PyTorch, who runs it and what is installed must be equal: neither is the harder.
        """
        alike = ("debian", "user", "compiler", "torch")
        if self == other or any(getattr(self, name) != getattr(other, name) for name in alike):
            return False
        if self.tun == "open" and other.tun != "open":
            return False  # this one has more
        taken = ("tun", "namespaces", "shm_mib", "ipv6", "folder", "ascii", "home")
        return all(
            getattr(other, name) in (getattr(self, name), getattr(SMALLEST, name))
            for name in taken
        )  # fmt: skip


SMALLEST = Row("bare")
ROOT = replace(SMALLEST, name="root", user="root")
_NARROW = replace(
    SMALLEST, name="narrow", tun="absent", namespaces=False, shm_mib=64, ipv6=False
)  # fmt: skip
ROWS = (
    SMALLEST,
    ROOT,
    replace(SMALLEST, name="compiler", compiler=True),
    replace(ROOT, name="root-compiler", compiler=True),
    replace(SMALLEST, name="no-tun", tun="absent"),
    replace(ROOT, name="root-no-tun", tun="absent"),
    replace(SMALLEST, name="open-tun", tun="open"),
    replace(SMALLEST, name="no-namespaces", namespaces=False),
    replace(ROOT, name="root-no-namespaces", namespaces=False, tun="absent"),
    replace(SMALLEST, name="small-shm", shm_mib=64),
    replace(ROOT, name="root-small-shm", shm_mib=64),
    replace(SMALLEST, name="no-ipv6", ipv6=False),
    replace(SMALLEST, name="debian-13", debian="trixie"),
    replace(ROOT, name="debian-13-root", debian="trixie", compiler=True),
    replace(SMALLEST, name="debian-14", debian="forky"),
    replace(SMALLEST, name="newest-torch", torch="torch"),
    replace(SMALLEST, name="blanks", folder="a path/with blanks"),
    replace(SMALLEST, name="ascii", ascii=True),
    replace(SMALLEST, name="no-home", home=False),
    replace(SMALLEST, name="odd", folder="a path/with blanks", ascii=True, home=False),
    _NARROW,
    replace(_NARROW, name="root-narrow", user="root"),
)


def harder(row: Row) -> tuple[Row, ...]:
    """Return the rows that hold this one: what is right in any of them is right in it."""
    return tuple(other for other in ROWS if other.holds(row))
