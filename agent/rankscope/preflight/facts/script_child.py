"""Looks at the user's script without running it: run by path, prints JSON lines on a pipe.

`hash SCRIPT` fingerprints the script and the modules beside it that it imports; `import SCRIPT`
imports what the script imports at its top level, one after the other.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILES, MAX_BYTES = 2000, 64 << 20


def imported(script: Path) -> tuple[str, ...]:
    """Return the top-level names of modules that the script cannot do without.

    An import within `try`, `if` or a function may be meant to fail. Raises SyntaxError.
    """
    names: dict[str, None] = {}
    for node in ast.parse(script.read_bytes(), str(script)).body:
        if isinstance(node, ast.Import):
            names |= dict.fromkeys(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names[node.module.partition(".")[0]] = None
    names.pop("__future__", None)
    return tuple(names)


def files_of(script: Path) -> Iterator[Path]:
    """Yield the script and all Python files beside it that belong to what it imports."""
    folder, seen, todo = script.parent, set[str](), [script]
    while todo:
        path = todo.pop()
        yield path
        try:
            names = imported(path)
        except (SyntaxError, OSError, ValueError):
            continue
        for name in names:
            if name in seen:
                continue
            seen.add(name)
            if (folder / f"{name}.py").is_file():
                todo.append(folder / f"{name}.py")
            elif (folder / name).is_dir():
                todo += sorted((folder / name).rglob("*.py"), reverse=True)


def fingerprint(script: Path) -> dict[str, object]:
    """Return digests of the script and of all its files."""
    own = hashlib.sha256(script.read_bytes()).hexdigest()
    digests: dict[str, str] = {}
    total = 0
    for path in files_of(script):
        data = path.read_bytes()
        total += len(data)
        if len(digests) >= MAX_FILES or total > MAX_BYTES:
            return {"digest": own, "num_files": len(digests), "is_cut": True}
        digests[os.path.relpath(path, script.parent)] = hashlib.sha256(data).hexdigest()
    whole = hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()
    answer: dict[str, object] = {"digest": own, "package_digest": whole, "num_files": len(digests)}
    try:
        imported(script)
    except SyntaxError as error:
        answer["syntax_error"] = f"line {error.lineno}: {error.msg}"
    return answer


def try_imports(script: Path, output: int) -> None:
    """Import what the script does; each name is written before it is tried."""
    sys.path.insert(0, str(script.parent))  # as `python script.py` does
    for name in imported(script):
        os.write(output, f"{json.dumps({'trying': name})}\n".encode())
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - SystemExit of a module is a failure too
            text = f"{type(error).__name__}: {error}"
            os.write(output, f"{json.dumps({'failed': name, 'error': text[:500]})}\n".encode())
    os.write(output, b'{"done": true}\n')


def main(arguments: list[str]) -> None:
    """Do one of both: `script_child.py hash|import SCRIPT`."""
    script = Path(arguments[1]).resolve()
    output = os.dup(1)
    os.write(output, b"started\n")
    os.dup2(2, 1)  # what a module prints on import is no answer of ours
    try:
        if arguments[0] == "hash":
            os.write(output, json.dumps(fingerprint(script)).encode())
        else:
            try_imports(script, output)
    except SyntaxError:
        os.write(output, b'{"done": true}\n')  # `hash` has written it
    except OSError as error:
        os.write(output, json.dumps({"error": f"{error.strerror}: {error.filename}"}).encode())
    sys.stdout.flush()
    os._exit(0)  # threads that modules started do not hold us


if __name__ == "__main__":
    main(sys.argv[1:])
