"""Our callbacks in the real libraries, on the CPU: steps and numbers are the framework's."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from rankscope.wire import schema
from tests import fork_server
from tests.agent import recorded

PROGRAMS = Path(__file__).parents[1] / "scenarios" / "third_party"


def run(tmp_path: Path, needs: str, script: str, *replaced: tuple[str, str]) -> recorded.Recorded:
    """Run one of the programs, with our lines put in, alone; return what it recorded."""
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    text = (PROGRAMS / script).read_text()
    for old, new in replaced:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / script).write_text(text)
    (tmp_path / "text.py").write_text((PROGRAMS / "text.py").read_text())
    done = subprocess.run(
        [*fork_server.python(), str(tmp_path / script), str(tmp_path / "out")],
        env=recorded.environment(tmp_path), capture_output=True, text=True, timeout=200,
        check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rankscope:" not in done.stderr
    (alone,) = recorded.read(tmp_path)
    return alone


def metrics(rank: recorded.Recorded) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for record in rank.of(schema.Metrics):
        found.setdefault(record.step, {}).update(record.values)
    return found


def steps_with(rank: recorded.Recorded, flag: int) -> list[int]:
    return [int(row["step"]) for row in rank.steps if row["flags"] & flag]


def facts(rank: recorded.Recorded, name: str) -> dict[str, str]:
    event = next(event for event in rank.of(schema.Event) if event.name == f"{name} training")
    fields: dict[str, str] = event.fields
    return fields


@pytest.mark.multiproc
def test_huggingface(tmp_path: Path) -> None:
    rank = run(
        tmp_path, "transformers", "huggingface_trainer.py",
        ("def main()", "from rankscope.integrations.huggingface import RankscopeCallback\n\n\n"
                       "def main()"),
        ("model=model,", "model=model, callbacks=[RankscopeCallback()],"),
        ("    trainer.train()",
         "    trainer.args.save_steps = 5\n    trainer.args.eval_steps = 4\n"
         "    trainer.train()\n    trainer.args.max_steps = 14\n"
         "    trainer.train(resume_from_checkpoint=sys.argv[1] + '/checkpoint-10')"),
    )  # fmt: skip
    # 12 steps, then 11 to 14 again, from the checkpoint
    assert rank.steps["step"].tolist() == [*range(1, 13), 11, 12, 13, 14]
    assert facts(rank, "huggingface")["gradient_accumulation_steps"] == "2"
    numbers = metrics(rank)
    assert {"loss", "grad_norm", "learning_rate", "epoch"} <= set(numbers[3])
    assert {"eval_loss"} <= set(numbers[4])
    assert 4.0 < numbers[3]["loss"] < 6.0  # of bytes, at the beginning
    # what follows step n is in step n + 1
    assert {5, 9} <= set(steps_with(rank, schema.STEP_EVALUATION))
    assert {6, 11} <= set(steps_with(rank, schema.STEP_CHECKPOINT))


@pytest.mark.multiproc
def test_lightning(tmp_path: Path) -> None:
    rank = run(
        tmp_path, "lightning", "lightning_ddp.py",
        ("def main()", "from rankscope.integrations.lightning import RankscopeCallback\n\n\n"
                       "def main()"),
        ("devices=2,", "devices=1, callbacks=[RankscopeCallback()],"),
        ('strategy="ddp",', ""),
    )  # fmt: skip
    # 1,280 pieces in batches of 32, two of them a step, two epochs
    assert rank.steps["step"].tolist() == list(range(1, 41))
    assert rank.steps["microbatches"].tolist() == [2] * 40
    assert facts(rank, "lightning")["accumulate_grad_batches"] == "2"
    numbers = metrics(rank)
    assert "train_loss" in numbers[10]
    assert "val_loss" in numbers[20]
    assert 21 in steps_with(rank, schema.STEP_EVALUATION)
    assert 21 in steps_with(rank, schema.STEP_CHECKPOINT)


@pytest.mark.multiproc
def test_accelerate(tmp_path: Path) -> None:
    rank = run(
        tmp_path, "accelerate", "accelerate_loop.py",
        ("def main()", "from rankscope.integrations.accelerate import RankscopeTracker, watch\n"
                       "\n\ndef main()"),
        ("Accelerator(gradient_accumulation_steps=2, cpu=True)",
         "Accelerator(gradient_accumulation_steps=2, cpu=True, log_with=RankscopeTracker())\n"
         "    watch(accelerator)\n"
         "    accelerator.init_trackers('bytes', config={'block': BLOCK})"),
        ("        accelerator.print(",
         "        accelerator.log({'eval_loss': torch.stack(losses).mean(), 'name': 'x'})\n"
         "        accelerator.print("),
    )  # fmt: skip
    assert rank.steps["step"].tolist() == list(range(1, 49))
    assert rank.steps["microbatches"].tolist() == [2] * 48
    told = [event.fields for event in rank.of(schema.Event) if "accelerate" in event.name]
    assert [fields.get("gradient_accumulation_steps") for fields in told] == ["2", None]
    assert told[1]["block"] == "32"
    assert 0.0 < metrics(rank)[24]["eval_loss"] < 6.0
    assert "name" not in metrics(rank)[24]
    assert 25 in steps_with(rank, schema.STEP_CHECKPOINT)


@pytest.mark.multiproc
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_loss_that_lightning_logs(package: str, tmp_path: Path) -> None:
    rank = run(
        tmp_path, package, "lightning_ddp.py",
        ("import lightning as L", f"import {package} as L"),
        ("devices=2,", "devices=1,"),
        ('strategy="ddp",', ""),
    )  # fmt: skip
    numbers = metrics(rank)
    both = [values for values in numbers.values() if {"loss", "logged_loss"} <= set(values)]
    assert both
    for values in both:  # backward() sees half of it, of another of the two passes
        assert values["logged_loss"] == pytest.approx(2 * values["loss"], rel=0.1)
