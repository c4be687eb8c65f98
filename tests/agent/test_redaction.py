"""Every secret of the list goes, what only looks like one stays, and the list is documented."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rankscope.process import environment
from rankscope.wire.redaction import HIDDEN, MAX_TEXT, RULES, Rule, clean, clean_fields, cut, redact

PRIVACY = Path(__file__).parents[2] / "docs" / "privacy.md"
by_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


@by_rule
def test_a_secret_goes_and_its_neighbours_stay(rule: Rule) -> None:
    assert rule.secret in rule.example
    cleaned = redact(f"before {rule.example} after")
    assert rule.secret not in cleaned
    assert HIDDEN in cleaned
    assert cleaned.startswith("before ")


@by_rule
def test_a_look_alike_stays(rule: Rule) -> None:
    assert redact(rule.harmless) == rule.harmless


@by_rule
def test_its_hints_are_in_what_it_matches(rule: Rule) -> None:
    assert rule.pattern.search(rule.example)
    assert any(hint in rule.example.lower() for hint in rule.hints)
    assert all(hint == hint.lower() for hint in rule.hints)


@by_rule
def test_the_list_is_documented(rule: Rule) -> None:
    assert f"| {rule.name} |" in PRIVACY.read_text()


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ('{"password": "hunter2"}', "hunter2"),
        ("login failed: password=hunter2&next=/", "hunter2"),
        ("PGPASSWORD=hunter2 psql", "hunter2"),
        ("train.py --db-password hunter2 --lr 1", "hunter2"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalrX"),
        ("'access_token': 'ab12cd34ef56'", "ab12cd34ef56"),
        ("HF_TOKEN=abcd1234efgh", "abcd1234efgh"),
        ("accessToken: abcd1234efgh", "abcd1234efgh"),
        ("push.py --hub-token abcd1234efgh --x", "abcd1234efgh"),
        ("https://x.blob/y?sv=1&sig=abcdefghijklmnopqrstuvwxyz0123456789%3D&z", "abcdefghijkl"),
        ("redis://:hunter2@cache:6379", "hunter2"),
        ("x-api-key: 12345678abcdef", "12345678abcdef"),
        ('curl -H "Authorization: Bearer abc.def-123"', "abc.def-123"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r (cut)", "b3BlbnNzaC1r"),
        (
            '"private_key": "-----BEGIN PRIVATE KEY-----\\nMIIEv\\n-----END PRIVATE KEY-----"',
            "MIIEv",
        ),
    ],
)
def test_more_ways_to_write_one(text: str, secret: str) -> None:
    assert secret not in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "step 12 loss 3.2 tokens/s 1.2e5 num_tokens=8192 max_token_length=512",
        "tokenizer=gpt2 vocab: 50257 eos_token='</s>' token_type_ids: torch.int64",
        "primary_key=id foreign key constraint, keys: ['a1b2c3d4']",
        "KeyError: 'encoder.layer.11.attention'",
        "commit 9e6b1c0d1c2b3a4f5e6d7c8b9a0f1e2d3c4b5a69",
        "author: Bob, authored by alice, authorized",
        "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",
        "http://127.0.0.1:8787/runs/x?key=12 at 10:30:00",
        "passed 3 of 4; bypass = True; compass: north",
        "checkpoint at s3://bucket/run-12/step_100.pt",
    ],
)
def test_training_talk_is_left_alone(text: str) -> None:
    assert redact(text) == text


def test_long_texts_are_bounded_quickly_and_without_a_leak_at_the_cut() -> None:
    secret = "hf_" + "a1" * 20
    for filler in ("a.", "-", "x=", "_a"):
        text = (filler * 100_000 + f" token key password {secret} ") * 2
        begun = time.process_time()
        cleaned = clean(text)
        assert time.process_time() - begun < 2.0
        assert len(cleaned) < MAX_TEXT + 100
    for shift in range(-20, 60, 5):  # the cut falls into the secret
        text = "y" * (MAX_TEXT // 2 - shift) + f" {secret} " + "y" * MAX_TEXT
        assert "a1a1a1a1" not in clean(text)
    assert cut("short") == "short"


def test_fields_with_secret_names() -> None:
    fields = {
        "password": "x",
        "db_password": "y",
        "api_token": "z",
        "tokens": "12",
        "url": "u://a:b@c",
    }
    assert clean_fields(fields) == {
        "password": HIDDEN, "db_password": HIDDEN, "api_token": HIDDEN, "tokens": "12",
        "url": f"u://a:{HIDDEN}@c",
    }  # fmt: skip


def test_environment_and_command_line_are_cleaned() -> None:
    secret = "hf_" + "a1" * 20
    facts = environment.snapshot(
        {"NCCL_DEBUG": f"INFO {secret}", "TORCH_TOKEN": "x1", "MASTER_ADDR": "u:p@h"}
    )
    assert secret not in str(facts)
    assert "env.TORCH_TOKEN" not in facts
    words = ["train.py", f"--hub={secret}", "s3://user:hunter2@bucket", "--api-key", "k1", "--lr=1"]
    assert environment.command(words) == [
        "train.py", "--hub=***", "s3://user:***@bucket", "--api-key", "***", "--lr=1",
    ]  # fmt: skip


@pytest.mark.parametrize("part", ["token:cat|", "key=", "token:5|", "password:'a|", "--key v "])
def test_a_long_line_takes_time_in_proportion(part: str) -> None:
    def seconds(num_parts: int) -> float:
        text, taken = part * num_parts, []
        for _ in range(5):
            begun = time.thread_time()
            redact(text)
            taken.append(time.thread_time() - begun)
        return min(taken)

    num_parts = 16_000 // len(part)
    assert seconds(2 * num_parts) < 2.5 * seconds(num_parts)


def test_a_long_secret_goes_to_its_end() -> None:
    secret = "a1" * 5_000
    assert redact(f"token={secret} after") == "token=*** after"
    assert redact(f"token='{secret}' after") == "token='***' after"
