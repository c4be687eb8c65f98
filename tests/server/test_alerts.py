"""Alerts within one process: rules, channels, messages and what becomes of them, over HTTP."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from rankscope_server.alerts import deliver, service, watch
from rankscope_server.alerts.send import outbound
from rankscope_server.api.app import create_app
from rankscope_server.settings import Settings
from rankscope_server.store import tables
from rankscope_server.store.leases import Held
from rankscope_server.store.unit import Unit
from tests.server.conftest import Sender, TestClient, log_line, scraped
from tests.server.receivers import (
    MailServer,
    Receiver,
    mail_server,
    make_certificate,
    receiving,
    wait_for,
)

S = 10**9
KEY = "0123456789abcdef"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliver, "FIRST_PAUSE_SECONDS", 0.05)


class Desk:
    """A person at the API, and a run whose findings tests set."""

    def __init__(self, client: TestClient) -> None:
        self.client = client
        app: Any = client.app
        self.service = app.state.service
        self.now_ns = time.time_ns()
        self.service.alerts.watcher._clock = lambda: self.now_ns

    def ask(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        reply = self.client.request(method, f"/api/v1/alerts{path}", **more)
        assert reply.status_code == status, reply.text
        return reply.json()

    def webhook(self, url: str, name: str = "hook", **more: Any) -> int:
        target = {"kind": "webhook", "url": url, "signing_key": KEY}
        body = {"name": name, "target": target} | more
        made: int = self.ask("POST", "/channels", json=body)["id"]
        return made

    def channel(self, status: int = 200, name: str = "c", **target: Any) -> Any:
        return self.ask("POST", "/channels", status, json={"name": name, "target": target})

    def write(self, work: Callable[[Unit], Any]) -> Any:
        return self.service.writer.run(work)

    def run(self, run_id: str = "r", **values: Any) -> None:
        row = {"name": "llama", "status": "running", "received_ns": self.now_ns, "step": 9} | values
        self.write(
            lambda unit: unit.connection.execute(sa.insert(tables.run).values(run_id=run_id, **row))
        )

    def finding(self, run_id: str = "r", state: str = "open", **body: Any) -> int:
        values = {
            "kind": "hang", "severity": "critical", "confidence": 0.9, "what": "Rank 2 hangs",
            "why": "it never entered", "next": "look at its stacks", "ranks": [2],
        } | body  # fmt: skip
        opened_ns = self.now_ns - 60 * S

        def work(unit: Unit) -> int:
            done = unit.connection.execute(
                sa.insert(tables.finding).values(
                    run_id=run_id, attempt=0, key=str(time.time_ns()), state=state,
                    opened_ns=opened_ns, updated_ns=self.now_ns, body=json.dumps(values),
                )
            )  # fmt: skip
            return int(done.inserted_primary_key[0])  # type: ignore[index]

        made: int = self.write(work)
        return made

    def change(self, finding_id: int, state: str = "open", **body: Any) -> None:
        table = tables.finding

        def work(unit: Unit) -> None:
            row = unit.connection.execute(sa.select(table).where(table.c.id == finding_id)).one()
            values = json.dumps(json.loads(row.body) | body)
            unit.connection.execute(
                sa.update(table)
                .where(table.c.id == finding_id)
                .values(body=values, state=state, updated_ns=self.now_ns)
            )

        self.now_ns += 1
        self.write(work)

    def look(self, later_s: float = 1.0) -> None:
        self.now_ns += int(later_s * S)
        self.service.alerts.watcher.look_now()

    def alerts(self, **params: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", "", params=params)["alerts"]
        return found

    def deliveries(self, **params: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", "/deliveries", params=params)["deliveries"]
        return found

    def settled(self, number: int) -> list[dict[str, Any]]:
        """Wait until so many messages are over; return them, the oldest first."""
        wait_for(
            lambda: len([d for d in self.deliveries() if d["state"] != "pending"]) >= number,
            f"{number} messages that are over",
        )
        return self.deliveries()[::-1]


@pytest.fixture
def desk(client: TestClient) -> Desk:
    found = Desk(client)
    for rule in found.ask("GET", "/rules")["rules"]:
        if rule["name"] != "Critical findings":
            found.ask("DELETE", f"/rules/{rule['id']}")
    return found


def test_a_new_server_has_rules_and_says_where_its_disk_is(client: TestClient) -> None:
    rules = client.get("/api/v1/alerts/rules").json()["rules"]
    assert "Runs that have stalled" in {rule["name"] for rule in rules}
    assert [rule["when"]["about"] for rule in rules] == [
        "finding", "stall", "silence", "lag", "disk",
    ]  # fmt: skip
    assert all(rule["is_enabled"] and rule["channels"] == [] for rule in rules)
    is_embedded = client.app.state.service.reader.dialect.name == "sqlite"  # type: ignore[attr-defined]
    blind = [rule["when"]["about"] for rule in rules if rule["never"]]
    assert blind == ([] if is_embedded else ["disk"])


def test_a_database_that_became_large(desk: Desk) -> None:
    limits = {"about": "disk", "free_bytes": 0, "database_bytes": 1 << 40}
    rule = desk.ask("POST", "/rules", json={"name": "Large", "when": limits})
    assert rule["never"] == ""  # on PostgreSQL too
    desk.look()
    assert desk.alerts() == []
    changed = {"name": "Large", "when": limits | {"database_bytes": 1}}
    desk.ask("PUT", f"/rules/{rule['id']}", json=changed)
    desk.look()
    (found,) = desk.alerts()
    assert found["what"].startswith("Rankscope's database has 0.0 GiB")
    assert found["state"] == "open"


def test_one_problem_is_one_message_and_its_end_another(desk: Desk, receiver: Receiver) -> None:
    desk.webhook(f"{receiver.url}/hook?x=1")
    desk.run()
    finding = desk.finding()
    for _ in range(5):
        desk.look()
    (sent,) = receiver.wait(1)
    assert (sent.method, sent.path) == ("POST", "/hook?x=1")
    body = sent.json
    assert (body["event"], body["what"], body["why"]) == (
        "opened", "Rank 2 hangs", "it never entered",
    )  # fmt: skip
    assert body["next"] == "look at its stacks"
    assert body["link"] == f"runs/r/findings/{finding}"
    assert sent.headers["Idempotency-Key"] == body["id"]
    desk.change(finding, "recovered")
    desk.look()
    desk.look(30)  # it must be over for a minute: what comes and goes is one problem
    assert len(receiver.got) == 1
    desk.change(finding, "open")
    desk.look(20)
    desk.change(finding, "recovered")
    desk.look()
    desk.look(61)
    over = receiver.wait(2)[1].json
    assert (over["event"], over["note"]) == ("recovered", "it is over")
    assert over["alert"] == body["alert"]
    assert over["id"] != body["id"]
    desk.settled(2)
    (alert,) = desk.alerts()
    assert (alert["state"], alert["num_sent"], alert["end_reason"]) == (
        "recovered", 2, "it is over",
    )  # fmt: skip
    desk.change(finding, "open")  # later it is another problem
    desk.look()
    assert receiver.wait(3)[2].json["alert"] != body["alert"]


def test_the_signature_is_that_of_the_time_and_the_body(desk: Desk, receiver: Receiver) -> None:
    made = desk.webhook(receiver.url)
    desk.ask("POST", f"/channels/{made}/test")
    (sent,) = receiver.got
    parts = dict(part.split("=", 1) for part in sent.headers["Rankscope-Signature"].split(","))
    assert abs(int(parts["t"]) - time.time()) < 60
    signed = parts["t"].encode() + b"." + sent.body
    assert parts["v1"] == hmac.new(KEY.encode(), signed, hashlib.sha256).hexdigest()


def test_worse_is_said_at_once_other_ranks_after_a_while(desk: Desk, receiver: Receiver) -> None:
    desk.ask("PUT", "/rules/1", json={"name": "all", "when": {"about": "finding"}})
    desk.webhook(receiver.url)
    desk.run()
    finding = desk.finding(severity="warning")
    desk.look()
    receiver.wait(1)
    desk.change(finding, what="Ranks 2 and 3 hang", ranks=[2, 3])
    desk.look()
    desk.change(finding, severity="critical")
    desk.look()
    worse = receiver.wait(2)[1].json
    assert (worse["event"], worse["severity"], worse["what"]) == (
        "changed", "critical", "Ranks 2 and 3 hang",
    )  # fmt: skip
    desk.change(finding, ranks=[2, 3, 4])
    desk.look(300)
    assert len(desk.deliveries()) == 2
    desk.look(301)
    assert receiver.wait(3)[2].json["event"] == "changed"


def test_a_problem_of_a_run_that_is_not_heard_of_stays_open(desk: Desk, receiver: Receiver) -> None:
    desk.webhook(receiver.url)
    desk.run()
    desk.finding()
    desk.look()
    receiver.wait(1)
    desk.look(9_999)  # the run left memory long ago
    desk.look(9_999)
    (alert,) = desk.alerts()
    assert alert["state"] == "open"
    desk.write(lambda unit: unit.connection.execute(sa.delete(tables.run)))
    desk.look()
    assert receiver.wait(2)[1].json["note"] == "its run was deleted"


def test_a_closed_alert_is_quiet_until_its_problem_comes_again(
    desk: Desk, receiver: Receiver
) -> None:
    desk.webhook(receiver.url)
    desk.run()
    finding = desk.finding()
    desk.look()
    (alert,) = desk.alerts()
    assert desk.ask("POST", f"/{alert['id']}/close")["state"] == "closed"
    assert receiver.wait(2)[1].json["note"] == "a person closed it"
    desk.change(finding, "recovered")
    desk.look()
    desk.change(finding, "open")  # it comes and goes: the same problem
    desk.look()
    desk.change(finding, "recovered")
    desk.look()
    desk.look(61)
    assert [one["state"] for one in desk.alerts()] == ["closed"]
    assert len(receiver.got) == 2
    desk.change(finding, "open")
    desk.look()
    assert receiver.wait(3)[2].json["event"] == "opened"
    assert [one["state"] for one in desk.alerts(state="open", run="r")] == ["open"]
    desk.ask("POST", "/99/close", 404)


def test_a_rule_that_is_switched_off_closes_its_alerts(desk: Desk, receiver: Receiver) -> None:
    desk.webhook(receiver.url)
    desk.run()
    desk.finding()
    desk.look()
    (rule,) = desk.ask("GET", "/rules")["rules"]
    assert not rule.pop("is_from_file")
    assert not rule.pop("never")
    desk.ask("PUT", f"/rules/{rule.pop('id')}", json=rule | {"is_enabled": False})
    desk.look()
    assert receiver.wait(2)[1].json["event"] == "closed"


def test_rules_choose_their_channels(desk: Desk, receiver: Receiver) -> None:
    here = desk.webhook(f"{receiver.url}/here", "here")
    desk.webhook(f"{receiver.url}/all", "all")
    body = {"name": "hangs", "when": {"about": "finding", "kinds": ["hang"]}, "channels": [here]}
    desk.ask("POST", "/rules", json=body)
    desk.run()
    desk.finding()
    desk.look()
    desk.settled(3)
    assert sorted(request.path for request in receiver.got) == ["/all", "/here", "/here"]


def test_slack_gets_text_that_mentions_nobody(desk: Desk, receiver: Receiver) -> None:
    receiver.answer = b"ok"
    desk.channel(kind="slack", url=f"{receiver.url}/services/T0/B0/secretsecret")
    desk.run()
    desk.finding(what="<!channel> a & b\nx")
    desk.look()
    (sent,) = receiver.wait(1)
    text = sent.json["text"]
    assert text.startswith(":red_circle: *&lt;!channel&gt; a &amp; b x*\nWhy: it never entered\n")
    assert "Next: look at its stacks" in text


def test_pagerduty_opens_and_resolves_one_incident(desk: Desk, receiver: Receiver) -> None:
    receiver.status = 202
    desk.channel(kind="pagerduty", url=f"{receiver.url}/v2/enqueue", routing_key="r" * 32)
    desk.run()
    finding = desk.finding()
    desk.look()
    desk.change(finding, "recovered")
    desk.look()
    desk.look(61)
    trigger, resolve = (request.json for request in receiver.wait(2))
    assert (trigger["event_action"], resolve["event_action"]) == ("trigger", "resolve")
    assert trigger["dedup_key"] == resolve["dedup_key"]
    assert trigger["routing_key"] == "r" * 32
    assert trigger["payload"]["severity"] == "critical"
    assert trigger["payload"]["summary"] == "Rank 2 hangs"
    assert trigger["payload"]["source"] == "llama"
    assert trigger["payload"]["custom_details"]["next"] == "look at its stacks"


def test_opentelemetry_gets_log_records(desk: Desk, receiver: Receiver) -> None:
    """What the makers' own classes read of it, with headers that are a secret here."""
    receiver.answer = b"{}"
    desk.channel(kind="otlp", url=receiver.url, headers="Authorization=Basic%20c2VjcmV0,x-org=7")
    desk.run()
    finding = desk.finding()
    desk.look()
    desk.change(finding, "recovered")
    desk.look()
    desk.look(61)
    opened, over = receiver.wait(2)
    assert opened.path == "/v1/logs"
    assert opened.headers["Authorization"] == "Basic c2VjcmV0"
    assert opened.headers["x-org"] == "7"
    requests = [ParseDict(one.json, ExportLogsServiceRequest()) for one in (opened, over)]
    (resource,) = requests[0].resource_logs
    about = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (about["service.name"], about["rankscope.run"]) == ("rankscope", "r")
    (record,) = resource.scope_logs[0].log_records
    assert record.body.string_value.startswith("Rank 2 hangs\nWhy: it never entered\nNext: look")
    assert (record.severity_number, record.severity_text) == (17, "ERROR")
    assert abs(record.time_unix_nano - desk.now_ns) < 3600 * S
    said = {one.key: one.value.string_value for one in record.attributes}
    assert (said["rankscope.event"], said["rankscope.severity"]) == ("opened", "critical")
    (end,) = requests[1].resource_logs[0].scope_logs[0].log_records
    assert (end.severity_text, end.body.string_value.split("\n")[0]) == (
        "INFO", "Recovered: Rank 2 hangs",
    )  # fmt: skip
    assert "c2VjcmV0" not in json.dumps(desk.ask("GET", "/channels"))


def test_what_opentelemetry_does_not_keep_is_given_up(desk: Desk, receiver: Receiver) -> None:
    refused = {"rejectedLogRecords": "1", "errorMessage": "too old; Basic abcdefgh"}
    receiver.answer = json.dumps({"partialSuccess": refused}).encode()
    desk.channel(kind="otlp", url=f"{receiver.url}/otlp/v1/logs", headers="a=Basic abcdefgh")
    desk.run()
    desk.finding()
    desk.look()
    receiver.wait(1)
    (given_up,) = desk.settled(1)
    assert given_up["state"] == "given_up"
    assert given_up["note"] == "it was not kept: too old; ***"
    assert receiver.got[0].path == "/otlp/v1/logs"


@pytest.fixture
def mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MailServer]:
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with mail_server(certificate) as found:
        yield found


def test_mail_is_encrypted_signed_in_and_a_thread(desk: Desk, mail: MailServer) -> None:
    desk.channel(
        kind="email", host="127.0.0.1", port=mail.port, user="me", password="pass word",
        sender="rankscope@lab.example", recipients=["a@lab.example", "b@lab.example"],
    )  # fmt: skip
    desk.run()
    finding = desk.finding(what="Rank 2 hangs\r\nBcc: evil@example.com")
    desk.look()
    desk.change(finding, "recovered")
    desk.look()
    desk.look(61)
    opened, over = mail.wait(2)
    assert mail.secure == [True, True]
    assert mail.envelopes[0][1] == ["<a@lab.example>", "<b@lab.example>"]
    assert opened["Subject"] == "[critical] Rank 2 hangs Bcc: evil@example.com (llama)"
    assert opened["Bcc"] is None
    assert opened["References"] == over["References"]
    assert opened["Message-ID"] != over["Message-ID"]
    assert opened["Auto-Submitted"] == "auto-generated"
    assert over["Subject"].startswith("[critical] Recovered: ")
    text = opened.get_content()
    assert "Why: it never entered" in text
    assert f"runs/r/findings/{finding}" in text
    assert mail.logins


def test_mail_may_begin_with_tls(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = make_certificate(tmp_path)
    with mail_server(certificate, is_tls=True) as found:
        body: dict[str, Any] = {
            "kind": "email", "host": "127.0.0.1", "port": found.port, "security": "tls",
            "sender": "a@b.example", "recipients": ["c@d.example"],
        }  # fmt: skip
        made = desk.channel(**body)["id"]
        assert "certificate" in desk.ask("POST", f"/channels/{made}/test")["note"].lower()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert desk.ask("POST", f"/channels/{made}/test")["state"] == "sent"
        assert (len(found.mails), found.secure) == (1, [True])


def test_mail_to_a_server_that_is_not_known_is_not_sent(desk: Desk, tmp_path: Path) -> None:
    with mail_server(make_certificate(tmp_path)) as found:
        made = desk.channel(
            kind="email", host="127.0.0.1", port=found.port, user="me", password="pass word",
            sender="a@b.example", recipients=["c@d.example"],
        )  # fmt: skip
        sent = desk.ask("POST", f"/channels/{made['id']}/test")
        assert sent["state"] == "given_up"
        assert "certificate" in sent["note"].lower()
        assert found.logins == found.mails == []


def test_mail_without_starttls_is_not_sent_in_clear(desk: Desk) -> None:
    with mail_server() as found:
        made = desk.channel(
            kind="email", host="127.0.0.1", port=found.port, sender="a@b.example",
            recipients=["c@d.example"],
        )  # fmt: skip
        sent = desk.ask("POST", f"/channels/{made['id']}/test")
        assert sent["state"] == "given_up"
        assert "STARTTLS" in sent["note"]
        body = {
            "kind": "email", "host": "127.0.0.1", "port": found.port, "security": "none",
            "sender": "a@b.example", "recipients": ["c@d.example"],
        }  # fmt: skip
        desk.ask("PUT", f"/channels/{made['id']}", json={"name": "c", "target": body})
        assert desk.ask("POST", f"/channels/{made['id']}/test")["state"] == "sent"
        found.refuse = "451 come back later"
        again = desk.ask("POST", f"/channels/{made['id']}/test")
        assert again["note"] == "SMTP 451: come back later"


SECRET = "T0123456/B0123456/abcdefghijklmnop"


def test_secrets_never_leave(
    desk: Desk, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    receiver.status, receiver.answer = 400, f"no team {SECRET} in /services/{SECRET}".encode()
    made = desk.channel(kind="slack", url=f"{receiver.url}/services/{SECRET}")
    sent = desk.ask("POST", f"/channels/{made['id']}/test")
    assert sent["state"] == "given_up"
    assert "HTTP 400" in sent["note"]
    desk.run()
    desk.finding()
    desk.look()
    desk.settled(2)
    pages = [
        desk.client.get(f"/api/v1/{path}").text
        for path in ("alerts/channels", "alerts/deliveries", "alerts", "settings", "alerts/status")
    ]
    pages += [desk.client.get("/api/v1/alerts/channels?format=csv").text, str(made), str(sent)]
    pages += [record.getMessage() for record in caplog.records]
    assert any("is given up" in page for page in pages)
    assert not [page for page in pages if "abcdefghijklmnop" in page]
    assert made["target"]["url"] == "(set)"
    assert made["place"] == "http://127.0.0.1"


def test_secrets_stay_where_they_were_sent(desk: Desk) -> None:
    body: dict[str, Any] = {
        "kind": "email", "host": "127.0.0.1", "port": 2525, "user": "me", "password": "pass word",
        "sender": "a@b.example", "recipients": ["c@d.example"],
    }  # fmt: skip
    made = desk.channel(**body)["id"]
    del body["password"]
    path = f"/channels/{made}"
    more = {"name": "c", "target": body | {"recipients": ["e@f.example"]}}
    assert desk.ask("PUT", path, json=more)["target"]["password"] == "(set)"
    for change in ({"host": "evil.example"}, {"port": 26}, {"security": "tls"}, {"user": "you"}):
        refused = desk.ask("PUT", path, 422, json={"name": "c", "target": body | change})["error"]
        assert refused["field"] == "target.password"
        assert refused["remedy"] == "give password again"
    desk.ask(
        "PUT", path, json={"name": "c", "target": body | {"host": "localhost", "password": "n"}}
    )


@pytest.mark.parametrize(
    ("target", "field"),
    [
        ({"kind": "webhook", "url": "http://x.example/", "signing_key": "short"}, "signing_key"),
        ({"kind": "webhook", "signing_key": KEY}, "url"),
        ({"kind": "slack", "url": "ftp://x.example/"}, "url"),
        ({"kind": "slack", "url": "http://me:you@x.example/"}, "url"),
        ({"kind": "slack", "url": "http://x.example/a b"}, "url"),
        ({"kind": "slack", "url": "http://x.example:99999/"}, "url"),
        ({"kind": "pagerduty"}, "routing_key"),
        ({"kind": "email", "host": "mail.example", "security": "none", "password": "p",
          "sender": "a@b.example", "recipients": ["c@d.example"]}, "security"),
        ({"kind": "email", "host": "m", "sender": "a@b\r\nTo: x", "recipients": ["c@d"]}, "sender"),
        ({"kind": "email", "host": "m", "sender": "a@b", "recipients": []}, "recipients"),
        ({"kind": "otlp"}, "url"),
        ({"kind": "otlp", "url": "http://x.example", "headers": "no header"}, "headers"),
        ({"kind": "otlp", "url": "http://x.example", "headers": "a b=c"}, "headers"),
        ({"kind": "pigeon"}, "kind"),
        ({"kind": "slack", "url": "http://x.example/", "chanel": "x"}, ""),
    ],
)  # fmt: skip
def test_channels_that_cannot_be_are_refused(
    desk: Desk, target: dict[str, Any], field: str
) -> None:
    refused = desk.ask("POST", "/channels", 422, json={"name": "c", "target": target})["error"]
    assert refused["field"] == f"target.{field}".rstrip(".")
    assert refused["remedy"]
    assert desk.ask("GET", "/channels")["channels"] == []


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"when": {"about": "finding", "kinds": ["slowness"]}}, "when.kinds"),
        ({"when": {"about": "weather"}}, "when.about"),
        ({"when": {"about": "stall", "seconds": 0}}, "when.seconds"),
        ({"when": {"about": "stall"}, "channels": [99]}, "channels"),
        ({"when": {"about": "stall", "secnds": 9}}, "when"),
        ({}, "when"),
    ],
)
def test_rules_that_cannot_be_are_refused(desk: Desk, rule: dict[str, Any], field: str) -> None:
    refused = desk.ask("POST", "/rules", 422, json={"name": "n"} | rule)["error"]
    assert refused["field"] == field
    assert refused["remedy"]


def test_names_are_taken_once(desk: Desk, receiver: Receiver) -> None:
    desk.webhook(receiver.url, "one")
    other = desk.webhook(receiver.url, "two")
    body = {"name": "one", "target": {"kind": "webhook", "url": "", "signing_key": ""}}
    assert desk.ask("PUT", f"/channels/{other}", 409, json=body)["error"]["field"] == "name"
    for path in ("/channels/99", "/rules/99"):
        desk.ask("DELETE", path, 404)
    desk.ask("POST", "/channels/99/test", 404)
    desk.ask("DELETE", f"/channels/{other}")


# --- what fails


def test_what_fails_is_tried_again_in_order_and_with_the_same_id(
    desk: Desk, receiver: Receiver
) -> None:
    receiver.plan = lambda number: 200 if number > 2 else 503
    desk.webhook(receiver.url)
    desk.run()
    finding = desk.finding()
    desk.look()
    receiver.wait(1)
    desk.change(finding, "recovered")
    desk.look()
    desk.look(61)
    got = receiver.wait(5)
    assert [request.json["event"] for request in got] == ["opened"] * 4 + ["recovered"]
    assert len({request.headers["Idempotency-Key"] for request in got[:4]}) == 1
    opened, over = desk.settled(2)
    assert (opened["state"], opened["attempts"]) == ("sent", 4)
    assert (over["state"], over["attempts"]) == ("sent", 1)


def test_what_is_refused_is_given_up_shown_and_can_be_sent_again(
    desk: Desk, receiver: Receiver
) -> None:
    receiver.status = 404
    desk.webhook(receiver.url)
    desk.run()
    desk.finding()
    desk.look()
    (lost,) = desk.settled(1)
    assert (lost["state"], lost["attempts"]) == ("given_up", 1)
    assert "HTTP 404" in lost["note"]
    assert scraped(desk.client)["rankscope_alert_messages_given_up"] == 1
    assert desk.ask("GET", "/status")["num_given_up"] == 1
    (channel,) = desk.ask("GET", "/channels")["channels"]
    assert channel["last_state"] == "given_up"
    receiver.status = 200
    desk.ask("POST", f"/deliveries/{lost['id']}/send")
    receiver.wait(2)
    wait_for(lambda: desk.deliveries()[0]["state"] == "sent", "it is sent")
    desk.ask("POST", f"/deliveries/{lost['id']}/send", 409)


def test_a_redirect_is_not_followed(desk: Desk, receiver: Receiver) -> None:
    with receiving() as other:
        receiver.status, receiver.headers = 307, {"Location": f"{other.url}/stolen"}
        made = desk.webhook(receiver.url)
        sent = desk.ask("POST", f"/channels/{made}/test")
        assert (sent["state"], other.got) == ("given_up", [])
        assert "redirects, which is not followed" in sent["note"]


def test_a_slow_receiver_holds_up_no_other(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound, "TIMEOUT_SECONDS", 0.3)
    receiver.hold = threading.Event()
    slow = desk.webhook(receiver.url, "slow")
    with receiving() as other:
        desk.webhook(other.url, "quick")
        desk.run()
        desk.finding()
        desk.look()
        other.wait(1)
        assert not receiver.hold.is_set()
        wait_for(lambda: desk.deliveries(channel=slow)[0]["attempts"], "a time-out")
        assert desk.deliveries(channel=slow)[0]["note"] == "timed out"
        receiver.hold.set()


def test_receivers_that_hang_delay_no_batch(desk: Desk, receiver: Receiver, sender: Sender) -> None:
    receiver.hold = threading.Event()
    for number in range(deliver._AT_A_TIME + 2):
        desk.webhook(receiver.url, f"slow {number}")
    desk.run("r")
    desk.finding("r")
    desk.look()
    receiver.wait(deliver._AT_A_TIME)
    assert sender.send(log_line("hello"))["accepted_records"] == 1
    desk.service.analysis.look_now()
    assert not receiver.hold.is_set()
    receiver.hold.set()
    desk.settled(deliver._AT_A_TIME + 2)  # those that had to wait for a turn too


def test_a_receiver_says_when_to_come_again(desk: Desk, receiver: Receiver) -> None:
    receiver.status, receiver.headers = 429, {"Retry-After": "300"}
    desk.webhook(receiver.url)
    desk.run()
    desk.finding()
    desk.look()
    wait_for(lambda: desk.deliveries()[0]["attempts"], "an attempt")
    (later,) = desk.deliveries()
    assert (later["state"], later["attempts"]) == ("pending", 1)
    assert later["next_ms"] / 1e3 - time.time() > 250


def test_bytes_that_trickle_do_not_hold_a_message_for_ever(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound, "DEADLINE_SECONDS", 0.5)
    receiver.trickles = True
    made = desk.webhook(receiver.url)
    sent = desk.ask("POST", f"/channels/{made}/test")
    assert (sent["state"], sent["note"]) == ("given_up", "it did not end within 0.5 s")


def test_an_endless_answer_is_cut(desk: Desk, receiver: Receiver) -> None:
    receiver.answer = b"x" * (8 * outbound.MAX_ANSWER_BYTES)
    made = desk.webhook(receiver.url)
    assert desk.ask("POST", f"/channels/{made}/test")["state"] == "sent"  # it was taken


def test_a_queue_is_bounded_and_says_what_it_dropped(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope_server.alerts.store.MAX_WAITING", 3)
    receiver.status = 503
    desk.webhook(receiver.url)
    desk.run()
    for _ in range(5):
        desk.finding()
    desk.look()
    states = sorted(one["state"] for one in desk.deliveries())
    assert states == ["dropped", "dropped", "pending", "pending", "pending"]
    (dropped, _) = desk.deliveries(state="dropped")
    assert dropped["note"] == "3 messages wait for this channel already"


def test_after_a_day_it_is_given_up(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver, "GIVE_UP_SECONDS", 0.0)
    receiver.status = 503
    desk.webhook(receiver.url)
    desk.run()
    desk.finding()
    desk.look()
    (lost,) = desk.settled(1)
    assert lost["state"] == "given_up"
    assert lost["note"].startswith("tried for a day: ")


def test_pauses_grow_to_a_limit() -> None:
    pauses = [deliver.pause_seconds(n, 0.5) for n in range(1, 40)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == deliver.LONGEST_PAUSE_SECONDS


# --- quiet hours


def quiet(now_s: float, zone: str = "UTC", **more: str) -> dict[str, str]:
    """Return quiet hours around now."""
    start, end = (time.strftime("%H:%M", time.gmtime(now_s + by)) for by in (-3_600, 3_600))
    return {"start": start, "end": end, "zone": zone} | more


def test_messages_wait_for_the_end_of_the_quiet_hours_critical_ones_come_through(
    desk: Desk, receiver: Receiver
) -> None:
    desk.ask("PUT", "/rules/1", json={"name": "all", "when": {"about": "finding"}})
    desk.webhook(receiver.url, quiet=quiet(time.time()))
    desk.run()
    short, long = desk.finding(severity="warning", what="short"), desk.finding(severity="warning")
    desk.look()
    wait_for(lambda: all(d["note"] for d in desk.deliveries()), "they wait")
    held = desk.deliveries()
    assert {one["state"] for one in held} == {"pending"}
    assert held[0]["note"].startswith("quiet hours until ")
    assert held[0]["next_ms"] - time.time() * 1e3 < 3_660e3
    desk.finding(severity="critical", what="loud")
    desk.look()
    assert receiver.wait(1)[0].json["what"] == "loud"
    desk.change(short, "recovered")
    desk.look()
    desk.look(61)
    desk.service.alerts.deliverer._clock = lambda: time.time_ns() + 7_200 * S  # they are over
    desk.service.alerts.deliverer.wake()
    receiver.wait(2)
    states = {(d["what"], d["event"]): d["state"] for d in desk.settled(4)}
    assert states == {
        ("short", "opened"): "skipped", ("Recovered: short", "recovered"): "skipped",
        ("Rank 2 hangs", "opened"): "sent", ("loud", "opened"): "sent",
    }  # fmt: skip
    assert long


def test_quiet_hours_that_cannot_be_are_refused(desk: Desk) -> None:
    target = {"kind": "slack", "url": "http://x.example/"}
    body = {"name": "c", "target": target, "quiet": quiet(0, zone="Mars/Base")}
    refused = desk.ask("POST", "/channels", 422, json=body)["error"]
    assert refused["field"] == "quiet.zone"
    assert "Europe/Berlin" in refused["remedy"]
    body["quiet"] = {"start": "25:00", "end": "7:00", "zone": "UTC"}
    assert desk.ask("POST", "/channels", 422, json=body)["error"]["field"] == "quiet.start"


# --- addresses


def channel_at(client: TestClient, url: str) -> dict[str, Any]:
    desk = Desk(client)
    made = desk.webhook(url, name=url[:100])
    sent: dict[str, Any] = desk.ask("POST", f"/channels/{made}/test")
    return sent


@pytest.mark.parametrize(
    "url",
    ["http://169.254.169.254/latest/", "http://[fd00:ec2::254]/", "http://100.100.100.200/",
     "http://[::ffff:169.254.169.254]/", "http://0.0.0.0/", "http://224.0.0.1/"],
)  # fmt: skip
def test_services_of_clouds_are_not_asked(client: TestClient, url: str) -> None:
    sent = channel_at(client, url)
    assert sent["state"] == "given_up"
    assert "is not asked" in sent["note"]


def test_a_name_that_leads_to_this_machine_is_not_asked_by_a_server_for_others(
    tmp_path: Path, receiver: Receiver
) -> None:
    port = receiver.url.rpartition(":")[2]
    settings = Settings(data_dir=str(tmp_path), host="0.0.0.0", token="t", look_seconds=3600.0)
    headers = {"Authorization": "Bearer t"}
    with TestClient(create_app(settings), headers=headers) as client:
        sent = channel_at(client, f"http://localhost:{port}/")
    assert "loopback is the server itself" in sent["note"]
    assert receiver.got == []
    allowed = Settings(
        data_dir=str(tmp_path / "b"), host="0.0.0.0", token="t", look_seconds=3600.0,
        alert_networks="127.0.0.0/8",
    )  # fmt: skip
    with TestClient(create_app(allowed), headers=headers) as client:
        assert channel_at(client, f"http://localhost:{port}/")["state"] == "sent"
        assert "outside of alert_networks" in channel_at(client, "http://192.0.2.1/")["note"]


def test_links_begin_with_the_address_of_the_server(tmp_path: Path, receiver: Receiver) -> None:
    settings = Settings(
        data_dir=str(tmp_path), look_seconds=3600.0, public_url="https://ranks.example/x/"
    )
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        channel_at(client, receiver.url)
    assert receiver.got[0].json["link"] == "https://ranks.example/x/alerts"


# --- the dead-man switch


def test_the_dead_man_switch_is_asked_only_while_all_is_well(
    tmp_path: Path, receiver: Receiver
) -> None:
    settings = Settings(
        data_dir=str(tmp_path), look_seconds=3600.0, deadman_url=f"{receiver.url}/ping/uuid-1234",
        deadman_seconds=86_400.0,
    )  # fmt: skip
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        desk = Desk(client)
        switch = desk.service.alerts.deadman
        receiver.wait(1)
        assert receiver.got[0].path == "/ping/uuid-1234"
        wait_for(lambda: desk.ask("GET", "/status")["deadman"]["asked_ms"], "it is noted")
        switch._behind = {"the analysis": lambda: 90_000.0}
        switch.ask_now()
        assert desk.ask("GET", "/status")["deadman"]["problem"] == (
            "the analysis is behind by 90000 s"
        )
        switch._behind = {}
        raw = desk.service.writer._engine.raw_connection()
        raw.execute("PRAGMA query_only=1")
        raw.close()
        switch.ask_now()
        assert "the store takes no writes" in switch.problem
        raw = desk.service.writer._engine.raw_connection()
        raw.execute("PRAGMA query_only=0")
        raw.close()
        assert len(receiver.got) == 1
        receiver.status, receiver.answer = 404, b"no /ping/uuid-1234 here"
        switch.ask_now()
        assert "HTTP 404" in switch.problem
        assert "uuid-1234" not in switch.problem + client.get("/api/v1/settings").text
        receiver.status = 200
        switch.ask_now()
        assert desk.ask("GET", "/status")["deadman"]["problem"] == ""


def test_a_look_that_fails_does_not_end_the_watcher(
    desk: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()
    calls: list[int] = []

    def look() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("broken")
        looked.set()

    watcher = watch.Watcher(
        service.Reader(3600.0, 0.05, lambda: 0.0, lambda: 0.0, ""), desk.service.writer,
        desk.service.reader, 0.05, lambda: None, lambda: Held("alerts", "this", 1),
    )  # fmt: skip
    monkeypatch.setattr(watcher, "look_now", look)
    watcher.start()
    assert looked.wait(20)
    watcher.close()
    failed = [r for r in caplog.records if "a look at the alert rules failed" in r.getMessage()]
    assert len(failed) == 1  # once, not with every look
