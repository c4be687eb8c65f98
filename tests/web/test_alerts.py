"""The page of alerts: make a channel and a rule, try them, see what became of a message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.receivers import receiving
from tests.web.accessibility import violations
from tests.web.conftest import Site, Watched, serving

pytestmark = pytest.mark.browser
KEY = "a key of some length"


def test_a_channel_is_made_tried_changed_and_deleted(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    with receiving() as receiver:
        watched = open_page("alerts")
        page = watched.page
        page.get_by_text("Critical findings", exact=True).wait_for()
        page.get_by_role("button", name="Add a channel").click()
        form = page.get_by_role("form", name="Channel")
        form.get_by_label("Name").fill("pager")
        form.get_by_label("Address").fill(f"{receiver.url}/secret-path")
        form.get_by_label("Signing key").fill("short")
        form.get_by_role("button", name="Save").click()
        page.get_by_role("alert").get_by_text("can be guessed").wait_for()
        form.get_by_label("Signing key").fill(KEY)
        form.get_by_label("Quiet from").fill("22:00")
        form.get_by_label("to", exact=True).fill("07:00")
        form.get_by_label("Time zone").fill("Europe/Berlin")
        assert violations(page) == []
        form.get_by_role("button", name="Save").click()
        page.get_by_text("quiet 22:00 to 07:00 Europe/Berlin").wait_for()
        assert "secret-path" not in page.content()
        page.get_by_role("button", name="Send a test").click()
        receiver.wait(1)
        page.get_by_text("Test of the channel pager").wait_for()
        receiver.status = 403
        page.get_by_role("button", name="Send a test").click()
        page.get_by_role("region", name="Messages").get_by_text("HTTP 403").wait_for()
        page.get_by_role("button", name="Change").first.click()
        form.get_by_label("Name").fill("pager two")
        form.get_by_role("button", name="Save").click()  # its secrets stay
        page.get_by_text("pager two", exact=True).first.wait_for()
        (channel,) = site.ask("alerts/channels")["channels"]
        assert channel["target"]["url"] == channel["target"]["signing_key"] == "(set)"
        watched.settled()
        assert violations(page) == []
        page.get_by_role("button", name="Delete pager two").click()
        page.get_by_role("button", name="Really delete pager two").click()
        page.get_by_text("No channel yet: nothing is sent.").wait_for()
        # the browser itself reports the answer 422 on its console; nothing else may be there
        watched.problems = [one for one in watched.problems if "422" not in one]
        watched.check()


def test_a_rule_is_made_switched_off_and_said_in_words(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page("alerts", theme="light")
    page = watched.page
    page.get_by_role("button", name="Add a rule").click()
    form = page.get_by_role("form", name="Rule")
    form.get_by_label("Name", exact=True).fill("Hangs of vision")
    form.get_by_label("Kinds, by commas").fill("hang, crash")
    form.get_by_label("Least confidence").fill("85")
    form.get_by_label("Lasts for seconds").fill("60")
    form.get_by_label("Project").fill("lab")
    form.get_by_label("Tags").fill("team=vision*")
    form.get_by_role("button", name="Save").click()
    said = "Findings of hang, crash, warning or worse, 85 % sure or more, of runs of project lab"
    page.get_by_text(said).wait_for()
    page.get_by_text(f"{said}, team=vision*; to every channel").wait_for()
    made = next(r for r in site.ask("alerts/rules")["rules"] if r["name"] == "Hangs of vision")
    assert (made["when"]["min_confidence"], made["when"]["lasts_seconds"]) == (0.85, 60)
    assert (made["project"], made["tags"]) == ("lab", {"team": "vision*"})
    row = page.get_by_role("listitem").filter(has_text="Hangs of vision")
    row.get_by_role("button", name="Switch off").click()
    row.get_by_role("button", name="Switch on").wait_for()
    row.get_by_role("button", name="Change").click()
    form.get_by_label("About").select_option("disk")
    form.get_by_label("Below GiB free").fill("2.5")
    form.get_by_role("button", name="Save").click()
    page.get_by_text("Less than 2.5 GiB of the disk are free").wait_for()
    row.get_by_role("button", name="Delete Hangs of vision").click()
    row.get_by_role("button", name="Really delete").click()
    row.wait_for(state="detached")
    watched.settled()
    assert violations(page) == []
    watched.check()


def test_the_form_has_all_that_a_rule_may_say(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    page = open_page("alerts", theme="dark").page
    form = page.get_by_role("form", name="Rule")

    def made(name: str, about: str, fields: dict[str, str]) -> Any:
        page.get_by_role("button", name="Add a rule").click()
        form.get_by_label("Name", exact=True).fill(name)
        form.get_by_label("About").select_option(about)
        for label, value in fields.items():
            form.get_by_label(label).fill(value)
        if about == "silence":
            form.get_by_label("Of what").select_option("all ranks of a run")
        form.get_by_role("button", name="Save").click()
        form.wait_for(state="detached")
        return next(r for r in site.ask("alerts/rules")["rules"] if r["name"] == name)["when"]

    assert made("Quiet", "silence", {}) == {
        "about": "silence",
        "seconds": 120,
        "is_whole_run": True,
    }
    page.get_by_text("Nothing of any rank of a run for 2 min").wait_for()
    lost = made("Lost", "throughput", {"From rank-hours a day": "24"})
    assert (lost["share_ratio"], lost["rank_hours_per_day"]) == (0.1, 24)
    page.get_by_text("10 % of the throughput, or 24 rank-hours a day are lost").wait_for()
    spent = made("Spent", "budget", {"From rank-hours": "500", "From an amount": "0"})
    assert (spent["money"], spent["rank_hours"]) == (0, 500)
    page.get_by_text("A run has spent 500 rank-hours").wait_for()


def test_what_is_from_the_file_of_the_server_is_not_changed_here(
    tmp_path: Path, open_page: Callable[..., Watched]
) -> None:
    file = tmp_path / "rankscope.toml"
    file.write_text(
        '[alerts.channel.pager]\nkind = "slack"\nurl = "http://127.0.0.1:9/hook"\n'
        '[alerts.rule."All that hangs"]\nwhen = { about = "finding", kinds = ["hang"] }\n'
    )
    file.chmod(0o600)
    with serving(tmp_path, RANKSCOPE_SERVER_CONFIG=str(file)) as url:
        watched = open_page()
        watched.origin = url
        page = watched.go("alerts").page
        said = "From the file of the server, to be changed there"
        channel = page.get_by_role("listitem").filter(has_text="pager")
        assert said in channel.inner_text()
        assert channel.get_by_role("button").all_inner_texts() == ["Send a test"]
        rule = page.get_by_role("listitem").filter(has_text="All that hangs")
        assert said in rule.inner_text()
        assert rule.get_by_role("button").count() == 0
        other = page.get_by_role("listitem").filter(has_text="Critical findings")
        assert said not in other.inner_text()
        other.get_by_role("button", name="Switch off").click()
        other.get_by_role("button", name="Switch on").wait_for()
        assert violations(page) == []
        watched.check()
