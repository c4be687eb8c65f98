"""The user's script: its fingerprint, and whether what it imports can be imported here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from rankscope.preflight.facts import child, script_child
from rankscope.preflight.system import System

HASH_LIMIT_S = 3.0
IMPORT_LIMIT_S = 8.0  # torch takes 2 to 4 s where nothing is cached


class ScriptFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The script that will be launched."""

    path: str
    error: str = ""  # it cannot be read: why
    not_known: str = msgspec.field(default="", name="untold")  # why nothing is known
    syntax_error: str = ""
    digest: str = ""  # SHA-256 of the script alone
    package_digest: str = ""  # with the modules beside it that it imports; empty: too many
    num_files: int = 0
    import_errors: dict[str, str] = {}  # module: "ImportError: ..."
    slow_import: str = ""  # the module in which the time was over


class _Said(msgspec.Struct):
    trying: str = ""
    failed: str = ""
    error: str = ""
    done: bool = False


# Made at import: two threads that are the first to use a type crash msgspec (0.22.0).
_SAID = msgspec.json.Decoder(_Said)
_ANSWERS = msgspec.json.Decoder(dict[str, Any])


def collect(system: System, script: str, tries_imports: bool) -> ScriptFacts:
    """Fingerprint the script, and import what it imports in a child process."""
    program = [sys.executable, "-P", str(Path(script_child.__file__))]
    try:
        text = child.ask(system, [*program, "hash", script], HASH_LIMIT_S)
        answer = _ANSWERS.decode(text)
    except child.Hung as reason:
        return ScriptFacts(path=script, error=f"not read: {reason}")
    except (child.NotKnown, msgspec.MsgspecError) as reason:
        return ScriptFacts(path=script, not_known=f"not looked at: {reason}")
    facts = ScriptFacts(path=script, **answer)
    if facts.error or facts.syntax_error or not tries_imports:
        return facts
    return _imports(system, [*program, "import", script], facts)


def _imports(system: System, argv: list[str], facts: ScriptFacts) -> ScriptFacts:
    done = system.run(argv, IMPORT_LIMIT_S)
    errors: dict[str, str] = {}
    trying, is_done = "", False
    for line in done.out.splitlines()[1:]:  # after "started"
        said = _SAID.decode(line)
        trying, is_done = said.trying or trying, is_done or said.done
        if said.failed:
            errors[said.failed] = said.error
    slow = trying if done.code is None else ""
    if done.code is not None and not is_done and trying:  # a crash in native code
        errors[trying] = f"the interpreter died with exit code {done.code} while importing it"
    return msgspec.structs.replace(facts, import_errors=errors, slow_import=slow)
