"""The page of tokens and of what was done: an admin makes one, its holder signs in and out."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.oidc_issuer import CLIENT, SECRET, issuing
from tests.web.accessibility import EVERY_WIDTH, check_width, violations
from tests.web.conftest import Site, Watched, serving

pytestmark = pytest.mark.browser
OPERATOR = "open sesame"


def sign_in(watched: Watched, token: str) -> Any:
    page = watched.page
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/access")
    watched.settled()
    return page


def test_an_open_server_says_so(site: Site, open_page: Callable[..., Watched]) -> None:
    watched = open_page("access")
    assert watched.sentence().startswith("This server is open")
    for width in EVERY_WIDTH:
        check_width(watched.page, width)
    assert violations(watched.page) == []
    watched.check()


def make_token(watched: Watched, name: str, project: str) -> str:
    page = watched.page
    page.get_by_label("Name").fill(name)
    page.get_by_label("Project (* for all)").fill(project)
    page.get_by_label("At most MiB/s").fill("5")
    page.get_by_label("At most events/s").fill("20000")
    page.get_by_role("button", name="Make token").click()
    token = str(page.locator(".command code").inner_text())
    page.get_by_role("button", name="I have it").click()
    row = page.get_by_role("row").filter(has_text=name).first
    assert project in row.inner_text()
    assert "5 MiB/s, 20,000 events/s" in row.inner_text().replace("\u202f", " ").replace(
        "\xa0", " "
    )
    return token


def revoke(watched: Watched, name: str) -> None:
    row = watched.page.get_by_role("row").filter(has_text=name).first
    row.get_by_role("button", name="Revoke").click()
    row.get_by_role("button", name="Revoke now").click()
    watched.page.get_by_role("cell", name="revoked", exact=True).wait_for()


def end_session(watched: Watched, name: str) -> None:
    page = watched.page
    page.reload()
    watched.settled()
    sessions = page.get_by_role("region", name="Sessions")
    assert "RANKSCOPE_TOKEN (you)" in sessions.inner_text()
    row = sessions.get_by_role("row").filter(has_text=name)
    row.get_by_role("button", name="End", exact=True).click()
    row.get_by_role("button", name=f"End that of {name}").click()
    row.wait_for(state="detached")
    assert violations(page) == []


def test_a_token_from_its_making_to_its_end(
    token_site: str, open_page: Callable[..., Watched]
) -> None:
    admin, reader = open_page(), open_page()
    admin.origin = reader.origin = token_site
    admin.page.goto(f"{token_site}/access")
    admin.page.wait_for_url("**/sign-in?next=access")
    page = sign_in(admin, OPERATOR)
    assert admin.sentence() == "You are RANKSCOPE_TOKEN"
    token = make_token(admin, "the dashboard of the team", "vision")
    assert token.startswith("rs_")
    assert violations(page) == []
    reader.page.goto(f"{token_site}/sign-in?next=access")
    reader.settled()
    seen = sign_in(reader, token)
    assert reader.sentence().startswith("You are the dashboard of the team")
    assert "read in the project vision" in seen.locator("main").inner_text()
    assert seen.get_by_role("heading", name="Tokens").count() == 0
    seen.goto(f"{token_site}/alerts")
    seen.get_by_role("heading", name="No alert is open").wait_for()
    assert "Of the runs of your project" in seen.locator("main").inner_text()
    assert violations(seen) == []
    seen.goto(f"{token_site}/access")
    assert status(token_site, token) == 200
    end_session(admin, "the dashboard of the team")
    seen.reload()
    seen.wait_for_url("**/sign-in?next=*")
    assert status(token_site, token) == 200  # the token works on
    sign_in(reader, token)
    revoke(admin, "the dashboard of the team")
    assert status(token_site, token) == 401
    page.reload()
    admin.settled()
    log = page.get_by_role("region", name="What was done").inner_text()
    for deed in ("create token", "sign in", "end session", "revoke token"):
        assert deed in log
    seen.reload()
    seen.wait_for_url("**/sign-in?next=*")
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/sign-in")
    page.goto(f"{token_site}/runs")
    page.wait_for_url("**/sign-in?next=runs")


def status(url: str, token: str) -> int:
    request = urllib.request.Request(
        f"{url}/api/v1/session", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return 200 if json.load(reply)["signed_in"] else 401


def test_a_person_signs_in_with_the_issuer_and_out(
    tmp_path: Path, open_page: Callable[..., Watched]
) -> None:
    file = tmp_path / "rankscope.toml"
    file.write_text(
        '[oidc.access.ops]\nclaim = "groups"\nvalue = "ops"\nroles = ["read"]\nproject = "*"\n'
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environ = {
        "CONFIG": str(file), "OIDC_CLIENT_ID": CLIENT, "OIDC_CLIENT_SECRET": SECRET,
        "PUBLIC_URL": f"http://127.0.0.1:{port}",
    }  # fmt: skip
    with issuing() as issuer:
        environ["OIDC_ISSUER"] = issuer.url
        named = {f"RANKSCOPE_SERVER_{name}": value for name, value in environ.items()}
        with serving(tmp_path, "--port", str(port), **named) as url:
            watched = open_page()
            watched.origin = url
            page = watched.page
            page.goto(f"{url}/access")
            page.wait_for_url("**/sign-in?next=access")
            button = page.get_by_role("link", name="Sign in with single sign-on")
            button.wait_for()
            assert violations(page) == []
            button.click()  # who is in no group
            page.wait_for_url("**/sign-in?refused=access")
            page.get_by_role("alert").get_by_text("have no access here").wait_for()
            assert violations(page) == []
            issuer.person = {"sub": "u1", "name": "Ada", "groups": ["ops"]}
            page.goto(f"{url}/sign-in?next=access")
            button.click()
            page.wait_for_url("**/access")
            watched.settled()
            assert watched.sentence() == "You are u1 (oidc)"
            assert "May read in all projects" in page.locator("main").inner_text()
            page.get_by_role("button", name="Sign out").click()
            page.wait_for_url("**/sign-in")
            page.goto(f"{url}/runs")
            page.wait_for_url("**/sign-in?next=runs")
