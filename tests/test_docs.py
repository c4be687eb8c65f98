"""What the documents say is true: tables equal the code, paths exist, commands run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankscope import cli
from rankscope.process import environment
from rankscope.rank.hooks import HOOKS
from rankscope.settings import SETTINGS
from rankscope.wire.metric_names import METRICS
from tests.ports import free_port

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/tutorials/*.md"),
                    *ROOT.glob("*/README.md"), *ROOT.glob("agent/rankscope/cli/*.md")])  # fmt: skip
LOCAL_LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
ANCHOR_LINK = re.compile(r"\]\((?!https?://)([^)#]*)#([^)]+)\)")
SOURCE_PATH = re.compile(
    r"`((?:agent|server|web|tests|benchmarks|docs|deploy|reference_trainer)/[\w./-]+)`"
)


def name_of(document: Path) -> str:
    """Return a document's path from the root."""
    return str(document.relative_to(ROOT))


def shell_lines(document: Path) -> list[str]:
    """Return the commands of all sh blocks, comments and continuations removed."""
    blocks = re.findall(r"^```sh\n(.*?)^```", document.read_text(), re.M | re.S)
    text = "\n".join(blocks).replace("\\\n", " ")
    lines = (re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_paths_exist(document: Path) -> None:
    text = document.read_text()
    for link in LOCAL_LINK.findall(text):
        assert (document.parent / link).exists(), link
    for path in SOURCE_PATH.findall(text):
        is_example = f"new file `{path}`" in text  # of CONTRIBUTING, made in a copy
        assert is_example or (ROOT / path).exists(), path


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    found: list[str] = []
    for title in re.findall(r"^#+ (.*)", text, re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        name = re.sub(r"[^\w -]", "", shown.lower()).replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return set(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_anchors_of_links_are_headings(document: Path) -> None:
    for link, anchor in ANCHOR_LINK.findall(document.read_text()):
        linked = document.parent / link if link else document
        assert linked.suffix != ".md" or anchor in anchors(linked), f"{link}#{anchor}"


def test_every_document_that_code_or_a_document_names_is_there() -> None:
    folders = ("agent", "server", "reference_trainer", "web/app", "tests", "benchmarks", ".ci")
    sources = [
        path
        for folder in folders
        for suffix in ("py", "js", "sh", "toml", "cpp", "hpp")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
        if "vendor" not in path.parts
    ]
    there = {path.name for path in DOCUMENTS} | {path.name for path in ROOT.rglob("README.md")}
    named = re.compile(r"\b([\w-]+\.md)\b")
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (*sources, *DOCUMENTS, ROOT / "Makefile", ROOT / "pyproject.toml")
        if path.exists()
        for name in named.findall(path.read_text(errors="replace"))
        if name not in there
    }
    assert not missing


def test_the_index_names_every_document() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    for document in DOCUMENTS:
        assert (
            document.name == "index.md"
            or f"/{document.name})" in text
            or (f"({document.name})" in text)
        ), document.name


def test_every_file_that_the_architecture_names_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = [ROOT, *(ROOT / name for name in ("agent", "server", "reference_trainer", "tests"))]
    named = {
        path.rstrip("/") for path in re.findall(r"`([\w.*-]+(?:/[\w.*-]+)*(?:/|\.\w+))`", text)
    }
    assert len(named) > 50
    for path in sorted(named - {"pyproject.toml"}):
        folder, _, name = path.rpartition("/")
        places = (room.glob(path) for room in rooms)
        inside = (room.rglob(f"{folder}/{name}" if folder else name) for room in rooms[1:])
        assert any(next(found, None) for found in (*places, *inside)), path


def test_settings_table_is_the_code() -> None:
    text = (ROOT / "docs" / "attach.md").read_text()
    rows = [f"| `{s.variable}` | `{s.default}` | {s.help} |" for s in SETTINGS]
    assert [line for line in text.splitlines() if line.startswith("| `RANKSCOPE_")] == rows


def test_privacy_names_every_variable_that_is_recorded() -> None:
    text = (ROOT / "docs" / "privacy.md").read_text()
    for name in (*environment._PREFIXES, *environment._NAMES):
        assert f"`{name}`" in text, name


def test_every_hook_has_a_sentence_and_a_name_of_its_own() -> None:
    assert len({hook.name for hook in HOOKS}) == len(HOOKS)
    for hook in HOOKS:
        assert (hook.__doc__ or "").strip().endswith(".")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_make_targets_and_commands_exist(document: Path) -> None:
    commands = {command.name for command in map(lambda row: cli._load(*row), cli._MODULES)}
    for line in shell_lines(document):
        words = shlex.split(line.rstrip("& "))
        if words[0] == "make":
            done = subprocess.run(
                ["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
        elif words[0] == "rankscope":
            assert words[1] in commands, line


@pytest.mark.core
@pytest.mark.multiproc
def test_the_readmes_three_lines_work(tmp_path: Path) -> None:
    """Run them as they stand, in a directory with some train.py, on another port."""
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for _ in range(3): dist.all_reduce(torch.ones(4))\n"
        "dist.destroy_process_group()\n"
    )
    lines = shell_lines(ROOT / "README.md")
    serve = next(line for line in lines if line.startswith("rankscope serve"))
    run = next(line for line in lines if line.startswith("rankscope run"))
    port = str(free_port())
    variables = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_DATA_HOME": str(tmp_path),
        "RANKSCOPE_DIR": str(tmp_path / "runs"),
    }
    server = subprocess.Popen(
        [*shlex.split(serve.rstrip("& ")), "--port", port],
        env=variables, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert port in server.stdout.readline()
        deadline = time.monotonic() + 20
        command = shlex.split(run.replace("8787", port))
        done = subprocess.run(
            command, env=variables, cwd=tmp_path, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert time.monotonic() < deadline + 100
        assert "/runs/" in done.stdout + done.stderr  # it says where to look
    finally:
        server.terminate()
        server.wait(20)
        assert server.stdout is not None
        server.stdout.close()


def test_every_number_that_the_agent_records_is_in_the_documents() -> None:
    text = (ROOT / "docs" / "steps.md").read_text()
    rows = [f"| `{m.name}` | {m.unit} | {m.meaning} | {m.source} |" for m in METRICS]
    head = "| name | unit | what it is | from |"
    table = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    assert table == rows
    assert len({metric.name for metric in METRICS}) == len(METRICS)
