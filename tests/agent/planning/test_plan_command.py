"""`rankscope plan` as people and scripts call it."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.cli.plan import PlanCommand
from rankscope.cli.plan_module import model_of_module
from rankscope.planning.errors import PlanError
from rankscope.planning.layout import ASYNCHRONOUS, FAMILIES
from rankscope.planning.machine import DEVICES
from rankscope.planning.model import PRECISIONS
from tests import command_server

ROOT = Path(__file__).parents[3]
SEVEN = "--model llama2-7b --batch 1024 --device h100"
MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inside = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.out(torch.nn.functional.gelu(self.inside(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def number(): return 7
def fails(): raise ValueError("no weights here")
def convolutions(): return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
"""


def plan(text: str, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "rankscope", "plan", *shlex.split(text)]
    return command_server.run(words, **options)


def answer(text: str, **options: Any) -> dict[str, Any]:
    done = plan(f"{text} --json", **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("nodes", [1, 8, 128])
def test_seven_billion_weights_within_two_seconds(nodes: int) -> None:
    words = shlex.split(f"plan {SEVEN} --nodes {nodes} --devices 8 --link between=50GB/s --json")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", *words], capture_output=True, text=True, check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # of the processor: other work on this machine is not the command's
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 2.0
    said = json.loads(done.stdout)
    assert said["machine"]["ranks"] == 8 * nodes
    assert said["chosen"]
    assert len(said["strategies"]) + len(said["left_out"]) == len(FAMILIES | ASYNCHRONOUS)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from rankscope.cli import main; "
        f"code = main({['plan', *shlex.split(SEVEN), '--devices', '8']!r}); "
        "assert code == 0; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_says_what_to_take_and_what_does_not_fit() -> None:
    done = plan(f"{SEVEN} --devices 8 --price 2.5/hour --tokens 1e12", env=wide())
    assert done.returncode == 0, done.stderr
    assert re.search(r"^→ +zero1 ", done.stdout, re.M)
    assert "Take zero1: " in done.stdout
    assert "ddp: does not fit: 131 GB of 80.0 GB" in done.stdout
    assert "memory of the fullest rank: weights 13.5 GB" in done.stdout
    assert "a million tokens" in done.stdout
    assert "per M tokens" in done.stdout


def test_a_narrow_terminal_has_fewer_columns() -> None:
    lines = plan(f"{SEVEN} --devices 8", env=wide(80)).stdout.splitlines()
    head = next(line for line in lines if "strategy" in line and "memory" in line)
    assert "step" in head
    assert "waits" not in head
    table = lines[lines.index(head) : lines.index("", lines.index(head) + 1)]
    assert max(map(len, table[:-1])) <= 80


def test_numbers_of_the_answer_add_up() -> None:
    said = answer(f"{SEVEN} --nodes 8 --devices 8 --link between=50GB/s --price 2.5EUR/hour")
    for row in said["strategies"]:
        memory, seconds = row["memory_bytes"], row["seconds"]
        assert sum(v for k, v in memory.items() if k != "total") == pytest.approx(memory["total"])
        assert sum(v for k, v in seconds.items() if k != "total") == pytest.approx(seconds["total"])
        assert row["bounds_seconds"][0] <= seconds["total"] <= row["bounds_seconds"][1]
        step = 64 * 2.5 * seconds["total"] / 3600
        assert row["price"]["step"] == pytest.approx(step)
        assert row["price"]["million_tokens"] == pytest.approx(step / (1024 * 4096) * 1e6)
        assert row["price"]["currency"] == "EUR"
        assert memory["total"] <= 80e9
        assert sum(m["sent_bytes"] for m in row["messages"]) == pytest.approx(row["sent_bytes"])
        assert row["activations_bytes"]["recomputed"] < row["activations_bytes"]["kept"]


def test_a_host_that_takes_long_for_each_message_of_a_cut_layer() -> None:
    (row,) = answer(f"{SEVEN} --devices 8 --strategy tensor --message 5s")["strategies"]
    sums = sum(one["count"] for one in row["messages"] if one["axis"] == "tensor")
    assert row["seconds"]["tensor"] == pytest.approx(5 * sums)


def test_a_host_that_takes_long_for_each_layer() -> None:
    asked = f"{SEVEN} --batch 1 --devices 8 --strategy model_parallel"  # 4 layers, one microbatch
    (quick,), (slow,) = (
        answer(f"{asked}{more}")["strategies"] for more in ("", " --host-layer 1s")
    )
    added = slow["seconds"]["compute"] - quick["seconds"]["compute"]
    assert added == pytest.approx(4 * 3)  # a forward, and a backward of twice its time


def test_the_same_model_by_name_and_by_numbers() -> None:
    numbers = (
        "--layers 32 --width 4096 --heads 32 --feed-forward 11008 --gated --sequence 4096 "
        "--vocabulary 32000 --batch 64 --devices 8 --memory 80GB --rate 400TFLOPs "
        "--link inside=360GB/s"
    )
    by_name = "--model llama2-7b " + numbers[numbers.index("--batch") :]
    first, second = answer(numbers), answer(by_name)
    assert first["strategies"] == second["strategies"]


def test_what_is_not_known_is_null() -> None:
    said = answer("--model llama2-7b --batch 64 --devices 8 --memory 96GB --device mine")
    assert said["machine"]["flops_per_second"] is None
    assert "rate of a device" in said["unknown"]
    for row in said["strategies"]:
        assert row["seconds"] is row["bounds_seconds"] is row["tokens_per_second"] is None
    assert any("no rate is known" in note for note in said["notes"])


def test_nothing_fits() -> None:
    done = plan("--model llama3-405b --batch 64 --devices 8 --device h100")
    assert done.returncode == 1
    assert "Nothing fits." in done.stdout
    said = plan("--model llama3-405b --batch 64 --devices 8 --device h100 --json")
    assert said.returncode == 1
    assert json.loads(said.stdout)["chosen"] is None


@pytest.mark.parametrize(
    ("text", "field", "remedy"),
    [
        ("", "memory", "Give --memory"),
        ("--device h100", "layers", "Give a name of --list-models"),
        ("--device h100 --model llama2-7b", "batch", "Give --batch"),
        ("--device h100 --model llama9 --batch 8", "model", "--list-models"),
        ("--device h100 --model llama2-7b --batch 8 --strategy magic", "strategy", "Known: ddp"),
        ("--device h100 --model llama2-7b --batch 8 --price free", "price", "Write 2.5/hour"),
        ("--device h100 --model llama2-7b --batch 8 --rate fast", "rate", "Write a rate"),
        ("--device h100 --model llama2-7b --batch 8 --memory 80", "memory", "Write a size"),
        ("--device h100 --model llama2-7b --batch 8 --link up=1GB/s", "link", "Write --link"),
        ("--device h100 --model llama2-7b --batch 8 --links no.json", "links", "preflight --json"),
        ("--device h100 --batch 8 --layers 4 --width 10 --heads 3 --sequence 8 --vocabulary 9",
         "heads", "Choose a width"),
        ("--device h100 --batch 8 --trainer no.toml", "trainer", "--help"),
        ("--device h100 --batch 8 --model no_such:thing --sequence 8", "model", "PYTHONPATH"),
    ],
)  # fmt: skip
def test_wrong_usage_names_the_field_and_the_remedy(text: str, field: str, remedy: str) -> None:
    done = plan(text)
    assert done.returncode == 64
    assert done.stderr.startswith(f"rankscope plan: {field}: "), done.stderr
    assert remedy in done.stderr
    assert "Try: rankscope plan --help" in done.stderr
    said = plan(f"{text} --json")
    assert said.returncode == 64
    assert json.loads(said.stdout)["error"].startswith(f"rankscope plan: {field}: ")


@pytest.mark.parametrize("flag", ["--layers 0", "--batch x", "--tokens -5", "--precision int4"])
def test_wrong_numbers(flag: str) -> None:
    done = plan(f"{SEVEN} {flag}")
    assert done.returncode == 64
    assert flag.split()[0] in done.stderr


def test_lists() -> None:
    rules = plan("--explain").stdout
    for source in ("1910.02054", "2205.05198", "1811.06965", "Amdahl", "2001.08361", "nccl-tests"):
        assert source in rules
    devices = plan("--list-devices", env=wide()).stdout
    assert all(name in devices for name in DEVICES)
    said = json.loads(plan("--list-models --json").stdout)
    assert {row["model"]: row["weights"] for row in said["models"]}["llama2-7b"] == "6.74 B"


def test_the_help_names_every_choice() -> None:
    text = plan("--help", env=wide()).stdout
    assert all(name in text for name in (*FAMILIES, *ASYNCHRONOUS, *DEVICES, "Exit codes"))


def test_every_example_of_the_help_is_understood(tmp_path: Path) -> None:
    text = (PlanCommand.__doc__ or "").replace("\\\n", " ")
    lines = [
        re.split(r"\s{3,}(?=[a-z])", line.strip().replace("rankscope plan ", ""))[0]
        for line in text.splitlines()
        if line.strip().startswith("rankscope plan ")
    ]
    assert len(lines) >= 6
    (tmp_path / "my_code.py").write_text(MODULE.replace("class Model", "class build"))
    edge = {"bandwidth": {"mbit_per_s": 100_000.0}}
    report = {"node": "node0", "edges": {"node1": edge}}
    (tmp_path / "links.json").write_text(json.dumps({"reports": [report]}))
    for line in lines:
        if "my_code" not in line:
            done = plan(line.replace("links.json", str(tmp_path / "links.json")))
        else:  # found in the directory that it is started from
            done = subprocess.run(
                [sys.executable, "-m", "rankscope", "plan", *shlex.split(line)],
                cwd=tmp_path, capture_output=True, text=True, check=False,
            )  # fmt: skip
        assert done.returncode == 0, (line, done.stderr)


def test_every_command_of_the_document_runs() -> None:
    text = (ROOT / "docs" / "plan.md").read_text()
    lines = re.findall(r"^rankscope plan (.*?)(?:  +#.*)?$", text, re.M)
    assert len(lines) >= 4
    for line in lines:
        done = plan(line)
        assert done.returncode == 0, (line, done.stderr)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "their_model.py").write_text(MODULE)
    return tmp_path


def of_module(code: Path, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rankscope", "plan", "--devices", "2", "--memory", "8GB",
         "--batch", "8", "--json", *shlex.split(text)],
        cwd=code, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_module_by_its_path(code: Path) -> None:
    done = of_module(code, "--model their_model:Model --sequence 16 --precision fp32")
    assert done.returncode == 0, done.stdout
    said = json.loads(done.stdout)
    block = 2 * 32 + 32 * 128 + 128 + 128 * 32 + 32
    assert said["model"]["parameters"] == 6 * block + 3200  # the table is tied to the head
    assert said["model"]["layers"] == 6
    assert said["model"]["tokens_per_sample"] == 16
    flops = 2 * 16 * (6 * 2 * 32 * 128 + 32 * 100)
    assert said["model"]["forward_flops_per_sample"] == flops
    ddp = next(row for row in said["strategies"] if row["strategy"] == "ddp")
    # of each block norm's input, mean and deviation, both inputs of the products, GELU's input
    kept = 6 * 16 * (32 + 2 + 32 + 128 + 128) * 4
    assert ddp["layout"]["samples"] == 1
    # and the tokens, and the input of the head
    assert ddp["memory_bytes"]["activations"] == kept + 16 * 8 + 16 * 32 * 4
    assert {row["strategy"] for row in said["left_out"]} >= {"tensor"}


def test_a_module_of_one_kind_of_layers_and_another_input(code: Path) -> None:
    done = of_module(code, "--model their_model:convolutions --input float32:1x3x8x8")
    assert done.returncode == 0, done.stdout
    said = json.loads(done.stdout)
    assert said["model"]["layers"] == 1
    assert said["model"]["parameters"] == 8 * 3 * 9 + 8
    assert said["model"]["tokens_per_sample"] == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("number int64:1x8", "returned a int"),
        ("fails int64:1x8", "ValueError: no weights here"),
        ("nothing int64:1x8", "has no callable 'nothing'"),
        ("Model", "what one sample looks like is not known"),
        ("Model float32:1x8", "forward failed on float32:1x8"),
        ("Model int64:2x8", "has 2 samples"),
        ("Model words", "is no type and shape"),
    ],
)
def test_a_module_that_cannot_be_run(
    code: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.syspath_prepend(code)
    monkeypatch.delitem(sys.modules, "their_model", raising=False)
    name, _, shape = text.partition(" ")
    with pytest.raises(PlanError, match=problem):
        model_of_module(f"their_model:{name}", shape, 0, PRECISIONS["bf16"])
    monkeypatch.delitem(sys.modules, "their_model", raising=False)


def test_the_trainers_own_configuration() -> None:
    config = ROOT / "reference_trainer" / "configs" / "pipeline.toml"
    said = answer(f"--trainer {config} --devices 4 --memory 8GB")
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.strategies.strategy import build_model

    own = sum(parameter.numel() for parameter in build_model(Settings()).parameters())
    assert said["model"]["parameters"] == own
    assert said["step"] == {"batch": 32, "tokens": 32 * 64, "optimizer": "adamw"}
    flags = answer("--trainer '--layers 2 --width 8 --heads 2' --devices 1 --memory 8GB")
    assert flags["model"]["layers"] == 2


def wide(columns: int = 160) -> dict[str, str]:
    return os.environ | {"COLUMNS": str(columns), "TERM": "dumb"}
