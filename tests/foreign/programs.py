"""Training programs that are not ours, made to run on a CPU, each until it is stopped.

Some are copied from the open data: only lines that name a device, a backend or a package that is
not there are replaced. Those of `scripts` and of `tests/scenarios/third_party` are written as
users of PyTorch, Lightning, Accelerate and the Hugging Face Trainer write theirs.
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
_TENSOR = PROGRAMS / "pytorch_examples" / "tensor_parallelism"
_SCRIPTS = Path(__file__).parent / "scripts"
_LIBRARIES = Path(__file__).parents[1] / "scenarios" / "third_party"
_FOR_EVER = "1000000"


@dataclass(frozen=True)
class Program:
    """One program: `prepare` fills a folder and returns what follows `torchrun ...` in it."""

    name: str
    prepare: Callable[[Path], list[str]]
    step_ms: float  # about, on two ranks: how long a fault has to be to matter
    ranks: int = 2
    packages: str = ""  # without which it cannot run, with blanks between
    needs_data: bool = False  # it is copied from the open data
    is_alone: bool = False  # it starts its ranks itself
    start_s: float = 0.0  # about, beyond that of a plain script: the fault comes so much later


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


def tensor_parallel(folder: Path) -> list[str]:
    """pytorch/examples tensor_parallelism: two layers over all ranks, a line for each step."""
    shutil.copy(_TENSOR / "log_utils.py", folder)
    _copy(
        _TENSOR / "tensor_parallel_example.py",
        folder,
        {
            "if not verify_min_gpu_count(min_gpus=_min_gpu_count):": "if False:",
            "torch.accelerator.current_accelerator().type": "'cpu'",
            "num_iters = 10": f"num_iters = {_FOR_EVER}",
        },
    )
    return ["tensor_parallel_example.py"]


def _library(name: str, changes: Mapping[str, str]) -> Callable[[Path], list[str]]:
    """Return what prepares a script of `tests/scenarios/third_party`, for ever."""

    def prepare(folder: Path) -> list[str]:
        shutil.copy(_LIBRARIES / "text.py", folder)
        (folder / "out").mkdir()
        _copy(_LIBRARIES / name, folder, changes)
        return [name, "out"]

    return prepare


def _script(name: str) -> Callable[[Path], list[str]]:
    """Return what prepares a script of `scripts`."""

    def prepare(folder: Path) -> list[str]:
        shutil.copy(_SCRIPTS / name, folder)
        return [name]

    return prepare


_TRAINER = {
    "max_steps=12": f"max_steps={_FOR_EVER}", "eval_steps=6": "eval_steps=300",
    "save_steps=6": "save_steps=3000", "logging_steps=3": "logging_steps=50",
}  # fmt: skip
_LIGHTNING = {
    "max_epochs=2": f"max_epochs={_FOR_EVER}", "log_every_n_steps=2": "log_every_n_steps=50",
}  # fmt: skip
_ACCELERATE = {"range(2)": f"range({_FOR_EVER})", "/epoch{epoch}": "/last"}
_SMALL_GPT = {"= 12, 4, 3, 4": f"= {_FOR_EVER}, 400, 3, 4"}

ALL = (
    Program("nanogpt", nanogpt, 80.0, needs_data=True),
    Program("mingpt", mingpt, 60.0, needs_data=True),
    Program("tutorial", tutorial, 2.0, needs_data=True),
    Program("tensor-parallel", tensor_parallel, 3.0, needs_data=True),
    Program("trainer", _library("huggingface_trainer.py", _TRAINER), 60.0, packages="transformers"),
    Program(
        "lightning", _library("lightning_ddp.py", _LIGHTNING), 60.0, packages="lightning",
        is_alone=True,
    ),
    Program("accelerate", _library("accelerate_loop.py", _ACCELERATE), 40.0, packages="accelerate"),
    Program("small-gpt", _library("small_gpt.py", _SMALL_GPT), 40.0),
    Program("batchnorm", _script("batchnorm_cnn.py"), 50.0),
    Program("batchnorm-4", _script("batchnorm_cnn.py"), 90.0, ranks=4),
    Program("many-buckets", _script("many_buckets.py"), 60.0),
    Program("accumulate", _script("accumulate.py"), 60.0),
    Program("spawned", _script("spawned.py"), 30.0, is_alone=True),
    Program("by-hand", _script("by_hand.py"), 40.0),
    Program("sharded", _script("sharded.py"), 50.0),
    Program("zero", _script("zero.py"), 40.0),
    Program("in-a-thread", _script("in_a_thread.py"), 40.0),
    Program("two-networks", _script("two_networks.py"), 40.0),
    Program("workers", _script("workers.py"), 40.0),
    Program("validation", _script("with_validation.py"), 40.0),
    Program("hooked-buckets", _script("hooked_buckets.py"), 40.0),
    Program("fsdp-one", _script("fsdp_one.py"), 50.0),
    Program("one-tensor", _script("one_tensor.py"), 30.0),
    Program(
        "deepspeed", _script("deepspeed_zero.py"), 60.0, packages="deepspeed", start_s=30.0
    ),
    Program(
        "ray-train", _script("ray_train.py"), 60.0, packages="ray pandas tensorboardX",
        is_alone=True, start_s=60.0,
    ),
    Program(
        "notebook", _script("notebook.py"), 40.0, packages="nbclient", is_alone=True, start_s=10.0
    ),
)  # fmt: skip
BY_NAME = {program.name: program for program in ALL}
