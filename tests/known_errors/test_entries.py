"""The known errors as data: every entry helps, and a user's file is checked field by field."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope_server.known_errors.entry import FAMILIES, KnownError
from rankscope_server.known_errors.load import EntryFileError, known_errors, read_entries
from rankscope_server.search.literals import NoLiteralError, literals_of

ENTRIES = known_errors().entries
HEALTHY = (
    "[rank3]: 2026-05-01 12:00:01 INFO train: step 812 loss 2.1034 grad_norm 0.712 lr 3.0e-04",
    "epoch 3 iter 120 loss: 0.2310, grad norm: 1.20, memory 61.1GiB, time 0.003, device cuda:3",
    "{'loss': 0.2329, 'grad_norm': 0.2753, 'learning_rate': 9.8e-06, 'epoch': 0.4}",
    "node-3:4242:4300 [3] NCCL INFO Channel 00/0 : 3[3] -> 4[4] via P2P/CUMEM",
    "node-3:4242:4300 [3] NCCL INFO Connected all rings, use ring PXN 0 GDR 1",
    "Saving checkpoint to /scratch/run/step_800 took 12.1 s; validation accuracy 0.81",
    "  3%|#         | 812/27000 [10:21<5:12:44,  1.40it/s, loss=2.1, v_num=3]",
)
MINIMAL = """
[[entry]]
id = "our-store"
family = "other"
patterns = ['quorum of our store lost']
cause = "Our object store has lost its quorum"
remedy = "Restart the store, then the job"
"""


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_an_entry_says_what_it_means_and_what_helps(entry: KnownError) -> None:
    assert entry.family in FAMILIES
    if entry.role == "note":
        return
    assert entry.cause
    assert entry.remedy
    if entry.role != "benign":
        assert len(entry.remedy.split()) >= 6, "a remedy is a sentence"
        assert entry.check or entry.sources
    assert (entry.family == "benign") == (entry.role == "benign")


def test_the_book_speaks_of_every_family() -> None:
    assert {entry.family for entry in ENTRIES} == set(FAMILIES)


@pytest.mark.parametrize("line", HEALTHY)
def test_the_sieve_lets_no_healthy_line_pass(line: str) -> None:
    assert not known_errors().candidates(line.lower()), line


def test_a_file_of_ones_own_adds_and_replaces(tmp_path: Path) -> None:
    ours = tmp_path / "ours.toml"
    ours.write_text(MINIMAL + MINIMAL.replace("our-store", "disk-full"))
    known = read_entries((ours,))
    found = known.recognise("2026-05-01 quorum of our store lost after 3 s")
    assert found is not None
    assert found.remedy == "Restart the store, then the job"
    assert known.named("disk-full").cause == "Our object store has lost its quorum"
    assert len(known.entries) == len(ENTRIES) + 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("family = ", "famly = "), "field 'famly' is not known"),
        (('"other"', '"oter"'), "field 'family' is 'oter'; it must be one of backend_missing"),
        (("patterns = ['quorum", "patterns = ['(quorum"), "field 'patterns', number 1"),
        (
            ("patterns = ['quorum of our store lost']", "patterns = ['.*']"),
            "fixed text of at least",
        ),
        (("patterns = ['quorum of our store lost']", 'patterns = "x"'), "must be a list of texts"),
        (("remedy =", "check ="), "field 'remedy' is missing"),
        (('id = "our-store"', 'id = "Our Store"'), "field 'id' must be lower-case words"),
        (("cause =", 'role = "begins"\ncause ='), "field 'role' is 'begins'; it must be one of"),
        (
            ("cause =", "strength = 9\ncause ="),
            "field 'strength' is 9; it must be a number from 1 to 3",
        ),
        (("cause =", "min_count = 0\ncause ="), "field 'min_count' is 0"),
        (("cause =", "differs = true\ncause ="), "needs a group"),
        (("cause =", "when = ['nothing']\ncause ="), "'when' names 'nothing', which is no entry"),
        (("[[entry]]", "[[entries]]"), "field 'entries' is not known; write [[entry]]"),
        (("[[entry]]", "[[entry]"), "is no TOML file"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_the_field(
    tmp_path: Path, change: tuple[str, str], complaint: str
) -> None:
    ours = tmp_path / "ours.toml"
    assert change[0] in MINIMAL
    ours.write_text(MINIMAL.replace(*change))
    with pytest.raises(EntryFileError) as refused:
        read_entries((ours,))
    assert complaint in str(refused.value)
    assert "ours.toml" in str(refused.value)


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    ours = tmp_path / "ours.toml"
    ours.write_text(MINIMAL * 2)
    with pytest.raises(EntryFileError, match="two entries have the id 'our-store'"):
        read_entries((ours,))


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("No space left", {"no space left"}),
        (r"errno: \d+ - Connection refused", {"- connection refused"}),
        ("(?:bus error|out of memory)", {"bus error", "out of memory"}),
        ("(?:closed|reset) by peer", {"by peer"}),
        (r"(?:lost)? connection", {"connection"}),
    ],
)
def test_the_texts_that_a_pattern_needs(pattern: str, texts: set[str]) -> None:
    assert set(literals_of(pattern)) == texts


@pytest.mark.parametrize("pattern", [r"\d+", "a?b?c?", "(?:timeout|.*)"])
def test_a_pattern_without_fixed_text_is_refused(pattern: str) -> None:
    with pytest.raises(NoLiteralError):
        literals_of(pattern)
