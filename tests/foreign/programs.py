"""Training programs that nobody here wrote, copied from the open data and made to run on a CPU.

Only lines that name a device, a backend or a package that is not there are replaced; models and
data are small. Each trains until it is stopped.
"""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.shared_data import SHARED_DATA

PROGRAMS = SHARED_DATA / "programs"
_TUTORIAL = PROGRAMS / "pytorch_examples" / "ddp-tutorial-series"
_MINGPT = PROGRAMS / "pytorch_examples" / "minGPT-ddp" / "mingpt"
_FOR_EVER = "1000000"


@dataclass(frozen=True)
class Program:
    """One program: `prepare` fills a folder and returns what follows `torchrun ...` in it."""

    name: str
    prepare: Callable[[Path], list[str]]
    step_ms: float  # about, on two ranks: how long a fault has to be to matter


def _copy(source: Path, folder: Path, changes: Mapping[str, str]) -> None:
    """Copy a file with some of its text replaced; all of it must be there."""
    text = source.read_text()
    for old, new in changes.items():
        assert old in text, f"{source.name} has changed: no {old!r}"
        text = text.replace(old, new)
    (folder / source.name).write_text(text)


def _text(folder: Path) -> Path:
    """Write a text to learn characters from."""
    chance = random.Random(1)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 9))) for _ in range(300)]
    path = folder / "input.txt"
    path.write_text(" ".join(chance.choices(words, k=40_000)))
    return path


def nanogpt(folder: Path) -> list[str]:
    """karpathy/nanoGPT `train.py`: accumulation, no buffers but the causal mask's."""
    import numpy as np

    source = PROGRAMS / "nanoGPT"
    for name in ("model.py", "configurator.py"):
        shutil.copy(source / name, folder)
    _copy(
        source / "train.py",
        folder,
        {
            "device = f'cuda:{ddp_local_rank}'": "device = 'cpu'",
            "    torch.cuda.set_device(device)\n": "",
            "DDP(model, device_ids=[ddp_local_rank])": "DDP(model)",
        },
    )
    data = folder / "data" / "chars"
    data.mkdir(parents=True)
    characters = np.random.default_rng(1).integers(0, 60, 100_000).astype(np.uint16)
    for name in ("train.bin", "val.bin"):
        characters.tofile(data / name)
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 60}))
    flags = {
        "device": "cpu", "dtype": "float32", "compile": "False", "backend": "gloo",
        "dataset": "chars", "block_size": "64", "batch_size": "8", "n_layer": "3", "n_head": "4",
        "n_embd": "128", "gradient_accumulation_steps": "4", "eval_iters": "2",
        "eval_interval": "100000", "warmup_iters": "10", "max_iters": _FOR_EVER, "out_dir": "out",
    }  # fmt: skip
    return ["train.py", *(f"--{name}={value}" for name, value in flags.items())]


def mingpt(folder: Path) -> list[str]:
    """pytorch/examples minGPT-ddp: a mask among the buffers, so DDP broadcasts in forward."""
    for name in ("model.py", "char_dataset.py"):
        shutil.copy(_MINGPT / name, folder)
    _copy(
        _MINGPT / "trainer.py",
        folder,
        {
            "import boto3\n": "",
            "self.acc = torch.accelerator.current_accelerator()": "self.acc = 'cpu'",
            'torch.device(f"{self.acc}:{self.local_rank}")': "torch.device('cpu')",
            "model.to(self.local_rank)": "model.to(self.device)",
            "DDP(self.model, device_ids=[self.local_rank])": "DDP(self.model)",
            "source.to(self.local_rank)": "source.to(self.device)",
            "targets.to(self.local_rank)": "targets.to(self.device)",
            "pin_memory=True": "pin_memory=False",
        },
    )
    (folder / "main.py").write_text(
        f"""
from char_dataset import CharDataset, DataConfig
from model import GPT, GPTConfig, OptimizerConfig, create_optimizer
from torch.distributed import destroy_process_group, init_process_group
from trainer import Trainer, TrainerConfig

init_process_group("gloo")
data = CharDataset(DataConfig("file://{_text(folder)}", 64, 0.9, 1.0))
model = GPT(GPTConfig(n_layer=3, n_head=4, n_embd=128, vocab_size=data.vocab_size, block_size=64))
optimizer = create_optimizer(model, OptimizerConfig())
config = TrainerConfig({_FOR_EVER}, 16, 0, 1.0, "snapshot.pt", {_FOR_EVER}, False)
Trainer(config, model, optimizer, data).train()
destroy_process_group()
"""
    )
    return ["main.py"]


def tutorial(folder: Path) -> list[str]:
    """pytorch/examples ddp-tutorial-series: one linear layer, steps of a millisecond or two."""
    shutil.copy(_TUTORIAL / "datautils.py", folder)
    _copy(
        _TUTORIAL / "multigpu_torchrun.py",
        folder,
        {
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))': "torch.set_num_threads(1)",
            'init_process_group(backend="nccl")': 'init_process_group(backend="gloo")',
            "model.to(self.gpu_id)": "model",
            "device_ids=[self.gpu_id]": "",
            "source.to(self.gpu_id)": "source",
            "targets.to(self.gpu_id)": "targets",
            "pin_memory=True": "pin_memory=False",
        },
    )
    return ["multigpu_torchrun.py", _FOR_EVER, _FOR_EVER]


ALL = (
    Program("nanogpt", nanogpt, 80.0),
    Program("mingpt", mingpt, 60.0),
    Program("tutorial", tutorial, 2.0),
)
BY_NAME = {program.name: program for program in ALL}
