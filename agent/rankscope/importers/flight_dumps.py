"""Reads Flight Recorder dumps, pickle or JSON, without executing anything that is in them.

A pickle is a program. The one here may build numbers, text, lists, tuples and dicts; it gets no
global, so it can call nothing, and whatever it leaves is checked against the shape of a dump.
"""

from __future__ import annotations

import io
import pickle
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rankscope.files.flight_recorder import MAX_ENTRIES, Dump, DumpError, parse
from rankscope.importers.pickle_budget import OverBudgetError, check_operations, check_values
from rankscope.wire.schema import MAX_RANK

MAX_BYTES = 256 << 20  # a recorder of 20,000 entries with stacks takes 60 MB
_MAX_NUMBER = 1 << 61  # what a chunk holds, with room for sums
_MAX_DIGITS = 9
_NUMBER = re.compile(r"\d+")
OUR_COPY = re.compile(r"flight_recorder\.\d+\.json")  # in the directory <rank>.<pid> of a rank
_PICKLE_START = b"\x80"
_GZIP = b"\x1f\x8b"


class _NoGlobals(pickle.Unpickler):  # noqa: S301 - it resolves no global
    """An unpickler of plain values: a pickle that names any class or function is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}: a dump holds plain values only")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it asks for an object from outside")


def read_dumps(paths: Iterable[Path]) -> tuple[dict[int, Dump], list[str]]:
    """Return the dump of each rank, and what was left out with the reason.

    A directory means the files in it. The rank is the last number in a file's name. Of two
    dumps of one rank the one with the newest operation counts.
    """
    found: dict[int, Dump] = {}
    left_out: list[str] = []
    for path in _files(paths):
        try:
            rank, dump = rank_of(path), read_dump(path)
        except DumpError as error:
            left_out.append(str(error))
            continue
        if rank in found:
            dump = max(found[rank], dump, key=newest_ns)
            left_out.append(f"{path}: a second dump of rank {rank}; the newer one counts")
        found[rank] = dump
    return found, left_out


def read_dump(path: Path) -> Dump:
    """Return the dump in one file. Raises DumpError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DumpError(f"{path}: has more than {MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror or error}") from error
    try:
        return parse_dump(_unpacked(data) if data.startswith(_GZIP) else data)
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from error


def parse_dump(data: bytes) -> Dump:
    """Return the dump that these bytes hold, pickle or JSON. Raises DumpError."""
    dump = _unpickle(data) if data[:1] == _PICKLE_START else parse(data)
    if len(dump.entries) > MAX_ENTRIES:
        raise DumpError(f"it has {len(dump.entries)} entries")
    if not (dump.entries or dump.pg_status):
        raise DumpError("it holds no operation and no group")
    if not all(key.isdigit() and len(key) <= _MAX_DIGITS for key in dump.pg_status):
        raise DumpError("its pg_status is not by numbers of groups")
    for entry in dump.entries:
        numbers = (
            entry.time_created_ns, entry.collective_seq_id, entry.p2p_seq_id, entry.record_id,
            entry.timeout_ms, entry.time_discovered_started_ns or 0,
            entry.time_discovered_completed_ns or 0,
        )  # fmt: skip
        if not all(0 <= number < _MAX_NUMBER for number in numbers):
            raise DumpError(f"entry {entry.record_id} holds a number out of range")
    return dump


def _unpacked(data: bytes) -> bytes:
    """Return what is packed by gzip. Raises DumpError, also where it is too large unpacked."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(data, MAX_BYTES + 1)
    except zlib.error as error:
        raise DumpError("its gzip is damaged; copy it again") from error
    if len(plain) > MAX_BYTES:
        raise DumpError(f"has more than {MAX_BYTES >> 20} MiB unpacked")
    if not unpacker.eof:
        raise DumpError("its gzip is cut short; copy it again")
    return plain


def rank_of(path: Path) -> int:
    """Return the rank that a file's name ends with. Raises DumpError.

    PyTorch names a file `<prefix><rank>`; copies of ours are in a directory `<rank>.<pid>`.
    """
    if OUR_COPY.fullmatch(path.name):
        numbers = _NUMBER.findall(path.parent.name)[:1]
    else:
        numbers = _NUMBER.findall(path.name.partition(".")[0])[-1:]
    if not numbers or int(numbers[0]) >= MAX_RANK:
        raise DumpError(f"{path}: its name does not end with a rank; call it dump_3 for rank 3")
    return int(numbers[0])


def newest_ns(dump: Dump) -> int:
    """Return when the newest operation of a dump was created, 0 where there is none."""
    return max((entry.time_created_ns for entry in dump.entries), default=0)


def _unpickle(data: bytes) -> Dump:
    try:
        check_operations(data)
        plain = _NoGlobals(io.BytesIO(data)).load()
        check_values(plain)
    except OverBudgetError as error:
        raise DumpError(f"the pickle was refused: {error}; no dump does") from error
    except (pickle.UnpicklingError, EOFError, MemoryError, RecursionError) as error:
        raise DumpError(f"the pickle was refused: {error}; copy the file again") from error
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DumpError(f"the pickle is damaged: {type(error).__name__}: {error}") from error
    try:
        return msgspec.convert(plain, Dump)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DumpError(f"the pickle is no dump: {error}") from error


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files meant, those of a directory in the order of their ranks."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        inside = (one for one in path.iterdir() if one.is_file() and one.suffix != ".log")
        yield from sorted(inside, key=lambda one: (len(one.name), one.name))
