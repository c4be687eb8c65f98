"""Questions of engineers, answered by keyboard alone: `docs/tasks.md` says the keys, here they are
pressed, and what then stands on the page is held against what the seeded runs were made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.web.conftest import SLOW, SLOW_FROM, SLOW_RANK, Watched

pytestmark = [pytest.mark.browser, pytest.mark.core]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "tasks.md"
MOST_ACTIONS = 4
# Where on the page, and what has to stand there.
ANSWERS = {
    "Which rank slows": ("#verdict", rf"Rank {SLOW_RANK} on \S+ is 1\.4\S slower .* step 12\d"),
    "What does it cost": (".verdict", r"\d+ %\s+of throughput lost"),
    "What should I do": (".verdict", r"(?i)what to do.*Copy"),
    "How sure": (".verdict", r"\d+ % sure.*Disproved if"),
    "What should a controller": (".advicecard", r"(?i)how sure.*evidence.*advice.*what was done"),
    "How do I record": (".advicecard select:focus", r"done"),
    "Is it the network": (".verdict", r"(?i)ruled out.*Slow data"),
    "Where did a step": ("main", rf"(?i)step goes.*rank before.*rank now.*Rank {SLOW_RANK}"),
    "What did every rank": ("#verdict", rf"(?i)rank {SLOW_RANK}"),
    "What happened in the step after": ("main", rf"{SLOW_FROM + 1}"),
    "How is rank 5": ("#verdict", rf"Rank {SLOW_RANK}"),
    "Which ranks were slow": ("main", rf"Rank {SLOW_RANK}\s+\+\d+ %"),
    "Which ranks deviate": (".gutter .lanename:not(.strip) >> nth=0", rf"Rank {SLOW_RANK}\b"),
    "What do the slow ranks": (".areapanel", rf"Rank {SLOW_RANK} on node-c, steps 121-300: 1\.4"),
    "Which warnings did the slow": (".areatext", r"[1-9]\d* log lines? at warning or worse"),
    "How far is a rank": (".maptable tbody tr >> nth=0", rf"Rank {SLOW_RANK}\b.*\+\d+ %\s+\d+"),
    "The map as numbers": (".maptable tbody tr >> nth=0", rf"Rank {SLOW_RANK}\b"),
    "Which findings": ("#verdict", rf"Rank {SLOW_RANK}"),
    "What do the numbers look like": ("[aria-label='Self time, each step in numbers']",
                                      rf"(?i)step\s+rank {SLOW_RANK}\s+others, least"),
    "How do I give someone": ("[aria-live=polite] >> nth=0", r"Markdown copied"),
    "What did rank 3 log": ("#verdict", r"[\d,]+ of [\d,]+ lines match"),
    "Which warnings and": ("#verdict", r"[\d,]+ of [\d,]+ lines match"),
    "What numbers did": (".columnheads", r"epoch"),
    "Does a rank wait": ("#verdict", r"No rank waited for another"),
    "Does a rank or a node": ("#verdict", r"No rank, GPU or node stands apart"),
    "Which collective": ("main", r"all_reduce"),
    "How long does a pipeline idle": ("#verdict", r"No pipeline: 8 ranks, which form one group"),
    "Where in the mesh": ("main", r"(?i)coloured by blocked on peers"),
    "Do the nodes differ": ("#verdict", r"differ|agree"),
    "What happened on the machines": ("#verdict", r"(?i)machine|host|node"),
    "What changed": ("main", rf"{SLOW}"),
    "Which part of the ranks": ("main", r"(?i)part.*share.*productive"),
    "What would the run cost": ("main", rf"Rank {SLOW_RANK} as fast as its peers"),
    "What would it take": ("[aria-label='What changes would give']", r"Links 2 times as fast"),
    "Would the launch": ("main", r"(?i)preflight"),
    "Which host was slow": ("main", r"(?i)hosts"),
    "How busy were": ("main", r"(?i)rank-hours by week.*processors.*lost rank-hours by cause"),
    "Which runs need": ("#verdict", r"(?i)runs? needs? attention"),
    "In which runs": ("#verdict", r"lines? match(es)? .*runs?"),
    "Which runs and hosts report": (".facets", r"(?i)run.*level.*error.*host"),
    "What do all runs log": (".logtools [aria-pressed=true] >> nth=0", r"Live"),
    "Who hears": ("main", r"(?i)rule"),
    "What does Rankscope": ("main", r"What it watches.*What was lost"),
    "Is Rankscope itself well": ("main", r"(?i)parts.*settings.*command line"),
    "How do I show": ("[aria-live=polite] >> nth=0", r"Link copied"),
    "How do I paste": ("[aria-live=polite] >> nth=0", r"Markdown copied"),
    "How do I come back": ("[aria-live=polite] >> nth=0", r"Saved as mine"),
}  # fmt: skip
# What these keys bring, which the next one needs; on one page, where it is named.
FLOATS = {
    "n": ".picture",
    "x": "[role=menu]",
    "v": "dialog input[type=text]",
    "logs c": ".fields button:focus",
}


class Task(NamedTuple):
    """A row of the table."""

    question: str
    actions: list[str]


def tasks() -> list[Task]:
    rows = re.findall(r"^\| ([^|]+\?) \|([^|]*)\|", DOCS.read_text(), re.MULTILINE)
    return [
        Task(question, [part for part in keys.split(", ") if part.strip()])
        for question, keys in rows
    ]


def act(page: Any, action: str) -> None:
    """Press a key, keys after each other, or type a text."""
    keys = re.findall(r"`([^`]+)`", action)[0]
    if action.startswith("type "):
        page.keyboard.type(keys)
        page.wait_for_timeout(100)  # a list of suggestions is made anew
    elif keys.startswith("Ctrl "):
        page.keyboard.press(keys.replace("Ctrl ", "Control+"))
        page.locator("dialog input").wait_for()
    else:
        for key in keys.split(" "):
            page.keyboard.press(key)
        here = urlsplit(page.url).path.rpartition("/")[2]
        if floats := FLOATS.get(keys, FLOATS.get(f"{here} {keys}")):
            page.locator(floats).wait_for()


def test_there_are_twenty_questions_and_more_of_few_actions() -> None:
    found = tasks()
    assert len(found) >= 20
    assert all(len(task.actions) <= MOST_ACTIONS for task in found)
    assert [key for task in found for key in ANSWERS if task.question.startswith(key)] == list(
        ANSWERS
    )
    assert len(found) == len(ANSWERS)


@pytest.mark.parametrize("task", tasks(), ids=lambda task: task.question)
def test_a_question_is_answered_by_keyboard(open_page: Callable[..., Watched], task: Task) -> None:
    watched = open_page(f"runs/{SLOW}")
    page = watched.page
    watched.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for action in task.actions:
        before = page.url
        act(page, action)
        if action.startswith("`g "):
            page.wait_for_url(lambda url, before=before: url != before)
        watched.settled()
    place, answer = next(value for key, value in ANSWERS.items() if task.question.startswith(key))
    shown = page.locator(place).first
    for _ in range(100):  # a page may still ask for what it shows
        if re.search(answer, shown.inner_text(), re.DOTALL):
            break
        page.wait_for_timeout(100)
    assert re.search(answer, shown.inner_text(), re.DOTALL), shown.inner_text()[:600]
    watched.check()
