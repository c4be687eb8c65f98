"""Questions of engineers, answered by keyboard alone: `docs/tasks.md` says the keys and what then
stands on the page. Here they are pressed, each on a run that holds the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.server.receivers import receiving
from tests.web import questioned as on
from tests.web.conftest import SLOW, Site, Watched, seed_all, serving

pytestmark = [pytest.mark.browser, pytest.mark.core]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "tasks.md"
MOST_ACTIONS = 4
CLIPBOARD, LIVE_REGION = "clipboard", "[aria-live=polite] >> nth=0"
# The run that holds the answer, and where on the page it stands.
TRIED = {
    "Which rank slows": (SLOW, "#verdict"),
    "What does it cost": (SLOW, ".verdict"),
    "What should I do": (SLOW, ".verdict"),
    "How sure": (SLOW, ".verdict"),
    "What should a controller": (on.LIVE, ".advicecard table"),
    "How do I record": (on.LIVE, ".advicecard select:focus"),
    "Where are the losses": (on.LIVE, ".elsewhere"),
    "Is it the network": (SLOW, ".verdict"),
    "Where did a step": (SLOW, "main"),
    "What did every rank": (SLOW, "#verdict"),
    "What happened in the step after": (SLOW, "#verdict"),
    "How is rank 5": (SLOW, "#verdict"),
    "How is one node": (SLOW, "main"),
    "Which ranks were slow": (SLOW, "main"),
    "Which ranks deviate": (SLOW, ".gutter .lanename:not(.strip) >> nth=0"),
    "What do the slow ranks": (SLOW, ".areapanel"),
    "Which warnings did the slow": (SLOW, ".loglist"),
    "How far is a rank": (SLOW, ".maptable tbody tr >> nth=0"),
    "The map as numbers": (SLOW, ".maptable tbody tr >> nth=0"),
    "Which findings": (SLOW, "main"),
    "What do the numbers look like": (SLOW, "[aria-label='Self time, each step in numbers']"),
    "How do I give someone": (SLOW, CLIPBOARD),
    "What did rank 3 log": (on.HUNG, ".loglist"),
    "Which warnings and": (SLOW, ".loglist"),
    "What numbers did": (SLOW, "main"),
    "Does a rank wait": (on.HUNG, "#verdict"),
    "Is a rank or a node": (on.MACHINES, "#verdict"),
    "Which collective": (SLOW, "#verdict"),
    "How long does a pipeline idle": (on.STAGES, "#verdict"),
    "Where in the mesh": (SLOW, "main"),
    "Do the nodes differ": (SLOW, "#verdict"),
    "What happened on the machines": (on.MACHINES, "#verdict"),
    "What changed": (on.TODAY, "#verdict"),
    "Which part of the ranks": (SLOW, "#verdict"),
    "What would the run cost": (SLOW, "main"),
    "What would 8 micro": (on.STAGES, "[aria-label='What changes would give']"),
    "What would it take": (SLOW, "[aria-label='What changes would give']"),
    "Would the launch": (on.LINK, "#verdict"),
    "Was the slow link": (on.LINK, "main"),
    "Which host was slow": (SLOW, "#verdict"),
    "How busy were": (SLOW, "main"),
    "Which runs need": (SLOW, "main"),
    "In which runs": (SLOW, "main"),
    "Which runs and hosts report": (SLOW, ".facets"),
    "What do all runs log": (SLOW, "main"),
    "Who hears": (SLOW, "main"),
    "What does Rankscope": (SLOW, "main"),
    "Is Rankscope itself well": (SLOW, "main"),
    "How do I show": (SLOW, CLIPBOARD),
    "How do I paste": (SLOW, CLIPBOARD),
    "How do I come back": (SLOW, LIVE_REGION),
}
# What these keys bring, which the next one needs; on one page, where it is named.
FLOATS = {
    "b": ".areatext",
    "n": ".picture",
    "g f": ".advicecard :is(.advised, p.padded)",  # `d` is for what came
    "x": "[role=menu]",
    "v": "dialog input[type=text]",
    "logs c": ".fields button:focus",
}


# Keys of what was just drawn are known after the frame that shows it.
AFTER_EFFECTS = """() => new Promise((done) =>
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"""


class Task(NamedTuple):
    """A row of the table."""

    question: str
    actions: list[str]
    answer: str  # an ellipsis is any text


def tasks() -> list[Task]:
    rows = re.findall(
        r"^\| ([^|]+\?) \|([^|]*)\|[^|]*\| ([^|]+) \|$", DOCS.read_text(), re.MULTILINE
    )
    return [
        Task(question, [part for part in keys.split(", ") if part.strip()], answer)
        for question, keys, answer in rows
    ]


@pytest.fixture(scope="module")
def questioned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server of its own: other tests count runs."""
    with (
        receiving() as pager,
        serving(tmp_path_factory.mktemp("questioned")) as url,
    ):
        site = Site(url)
        seed_all(site)
        on.add_questioned(url, pager.url)
        yield site


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
            page.locator(floats).first.wait_for()
            page.evaluate(AFTER_EFFECTS)


def shown_at(page: Any, place: str) -> str:
    """Return the text of a place in one line."""
    if place == CLIPBOARD:
        text = page.evaluate("navigator.clipboard.readText()")
    else:
        text = page.locator(place).first.inner_text()
    return " ".join(str(text).split())


def test_there_are_twenty_questions_and_more_of_few_actions() -> None:
    found = tasks()
    assert len(found) >= 20
    assert all(len(task.actions) <= MOST_ACTIONS for task in found)
    assert [key for task in found for key in TRIED if task.question.startswith(key)] == list(TRIED)
    assert len(found) == len(TRIED)


@pytest.mark.parametrize("task", tasks(), ids=lambda task: task.question)
def test_a_question_is_answered_by_keyboard(
    questioned: Site, open_page: Callable[..., Watched], task: Task
) -> None:
    run, place = next(value for key, value in TRIED.items() if task.question.startswith(key))
    watched = open_page()
    watched.origin = questioned.url
    watched.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = watched.go(f"runs/{run}").page
    for action in task.actions:
        before = page.url
        act(page, action)
        if action.strip().startswith("`g "):
            page.wait_for_url(lambda url, before=before: url != before)
        watched.settled()
    parts = re.split(r"\s*…\s*", task.answer)
    answer = re.compile(".*".join(map(re.escape, parts)), re.IGNORECASE)
    for _ in range(100):  # a page may still ask for what it shows
        if answer.search(shown_at(page, place)):
            break
        page.wait_for_timeout(100)
    assert answer.search(shown_at(page, place)), shown_at(page, place)[:3000]
    watched.check()
