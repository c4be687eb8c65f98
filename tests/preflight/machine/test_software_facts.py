"""Versions from recorded packages, and the user's script in a real child."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rankscope.preflight.facts import script, software
from rankscope.preflight.options import Options
from rankscope.preflight.system import Done, System


def packages(root: Path, **versions: str) -> list[str]:
    for name, version in versions.items():
        folder = root / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        told = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(told)
    return [str(root)]


def test_versions_are_read_and_nothing_is_imported(tmp_path: Path) -> None:
    before = "torch" in sys.modules
    path = packages(
        tmp_path, torch="2.9.1", nvidia_nccl_cu12="2.27.5", Flash_Attn="2.8.1", left="1"
    )
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.9.1+cu128'\ndebug = False\n"
        "cuda: Optional[str] = '12.8'\ngit_version = '0123456789abcdef'\n"
        "hip: Optional[str] = None\n"
    )
    facts = software.collect(System(environ={}), Options(), path)
    assert facts.has_torch
    assert (facts.torch, facts.torch_cuda, facts.torch_hip) == ("2.9.1+cu128", "12.8", "")
    assert facts.torch_git == "0123456789ab"
    assert facts.nccl == "2.27.5"
    assert facts.packages == {
        "torch": "2.9.1", "flash-attn": "2.8.1", "nvidia-nccl-cu12": "2.27.5",
    }  # fmt: skip
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert ("torch" in sys.modules) == before


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    facts = software.collect(System(environ={}), Options(), packages(tmp_path, numpy="2.0"))
    assert not facts.has_torch
    assert facts.torch == ""
    other = software.collect(System(environ={}), Options(), packages(tmp_path / "b", numpy="2.1"))
    assert other.packages_digest != facts.packages_digest


def test_a_second_nccl_is_found_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "libnccl.so.2.19.3").write_bytes(b"")
    (tmp_path / "opt" / "libnccl.so.2").symlink_to("libnccl.so.2.19.3")

    class Cache(System):
        def run(self, argv: Any, limit_s: float = 5.0) -> Done:
            return Done(0, "\tlibnccl.so.2 (libc6,x86-64) => /usr/lib/libnccl.so.2\n")

    environ = {"LD_LIBRARY_PATH": "/opt:/usr/local/cuda/compat", "LD_PRELOAD": "/opt/libnccl.so.2"}
    facts = software.collect(Cache(root=tmp_path, environ=environ), Options(), [])
    told = [(library.found_by, library.version) for library in facts.libraries]
    assert told == [("LD_PRELOAD", "2.19.3"), ("LD_LIBRARY_PATH", "2.19.3"), ("ldconfig", "")]
    assert facts.has_cuda_compat


def written(folder: Path, text: str, **modules: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(text)
    for name, content in modules.items():
        (folder / f"{name}.py").write_text(content)
    return str(folder / "train.py")


def test_a_script_is_known_by_itself_and_what_stands_beside_it(tmp_path: Path) -> None:
    texts = {"model": "import layers\n", "layers": "X = 1\n", "unused": "Y = 1\n"}
    system = System()
    paths = [written(tmp_path / str(n), "import model\n", **texts) for n in range(3)]
    first, second = (script.collect(system, path, tries_imports=False) for path in paths[:2])
    assert first.digest == second.digest
    assert first.package_digest == second.package_digest
    assert first.num_files == 3  # train, model, layers
    (tmp_path / "1" / "layers.py").write_text("X = 2\n")
    (tmp_path / "2" / "unused.py").write_text("Y = 2\n")
    changed, other = (script.collect(system, path, tries_imports=False) for path in paths[1:])
    assert changed.digest == first.digest
    assert changed.package_digest != first.package_digest
    assert other.package_digest == first.package_digest


def test_imports_are_tried_and_the_script_is_not_run(tmp_path: Path) -> None:
    text = (
        "import json\nimport absent_one\nfrom beside import thing\nimport loud\n"
        "try:\n    import optional_one\nexcept ImportError:\n    pass\n"
        "open('ran', 'w')\n"
    )
    path = written(tmp_path, text, beside="thing = 1\n", loud="print('hello')\nraise SystemExit\n")
    facts = script.collect(System(), path, tries_imports=True)
    assert set(facts.import_errors) == {"absent_one", "loud"}
    assert facts.import_errors["absent_one"].startswith("ModuleNotFoundError")
    assert facts.import_errors["loud"].startswith("SystemExit")
    assert not (tmp_path / "ran").exists()
    assert not Path("ran").exists()


def test_a_module_that_never_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "IMPORT_LIMIT_S", 1.5)
    path = written(tmp_path, "import json\nimport sleepy\n", sleepy="import time\ntime.sleep(99)\n")
    started = time.monotonic()
    facts = script.collect(System(), path, tries_imports=True)
    assert facts.slow_import == "sleepy"
    assert time.monotonic() - started < 60


def test_a_module_that_kills_the_interpreter_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "import crash\n", crash="import os\nos.abort()\n")
    facts = script.collect(System(), path, tries_imports=True)
    assert "interpreter died" in facts.import_errors["crash"]


def test_a_script_that_cannot_be_read_or_parsed(tmp_path: Path) -> None:
    absent = script.collect(System(), str(tmp_path / "no.py"), tries_imports=True)
    assert "No such file" in absent.error
    broken = script.collect(System(), written(tmp_path, "def f(:\n"), tries_imports=True)
    assert broken.syntax_error.startswith("line 1")
    assert broken.digest
    assert not broken.import_errors


def test_data_is_fingerprinted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    facts = software.collect(System(), Options(data_dir=str(tmp_path)), [])
    assert facts.data is not None
    assert (facts.data.count, facts.data.bytes, facts.data.cut) == (1, 3, "")
    absent = software.collect(System(), Options(data_dir=str(tmp_path / "b")), [])
    assert absent.data is not None
    assert absent.data.error.startswith("ENOENT")


def test_a_command_past_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    started = time.monotonic()
    done = System().run(["sh", "-c", f"echo early; sleep 98 & echo $! > {mark}; wait"], 0.7)
    assert time.monotonic() - started < 30
    assert done.code is None
    assert done.out == "early\n"
    assert "no answer in 0.7 s" in done.err
    pid = int(mark.read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    state = Path(f"/proc/{pid}/stat").read_text().split()[2]
    assert state == "Z"  # dead, and not yet collected by its new parent
