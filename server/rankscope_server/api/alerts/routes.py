"""Alerts: what is open, rules, channels, messages, and the test of a channel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from rankscope_server.alerts import rules as rules_of_alerts
from rankscope_server.alerts import store
from rankscope_server.alerts.channels import Channel, check_quiet
from rankscope_server.alerts.rules import Name, RefusedError, Rule
from rankscope_server.api.access.rules import sender
from rankscope_server.api.alerts import queries
from rankscope_server.api.alerts.schema import (
    AlertRow,
    Alerts,
    AlertStatus,
    ChannelRow,
    Channels,
    DeadMan,
    Deleted,
    Deliveries,
    DeliveryRow,
    RuleRow,
    Rules,
)
from rankscope_server.api.bodies import field_of, read_body, takes
from rankscope_server.api.parameters import one_of
from rankscope_server.api.replies import documented, send
from rankscope_server.api.service import Service, service_of
from rankscope_server.problems import Problem
from rankscope_server.store import tables
from rankscope_server.store.locks import ALERTS
from rankscope_server.store.unit import Unit

router = APIRouter(prefix="/api/v1/alerts", tags=["alerts"])
MAX_BODY_BYTES = 64 << 10
_STATES = ("open", "recovered", "closed")
_DELIVERY_STATES = ("pending", "sent", "given_up", "dropped", "skipped")
_TESTS = threading.BoundedSemaphore(4)  # each takes a thread for as long as the receiver likes
_REMEDY = "see docs/alerts.md for the fields"
Id = Annotated[int, Path(ge=0, lt=1 << 62)]
Limit = Annotated[int, Query(ge=1, le=queries.MAX_LIMIT)]
_Done = TypeVar("_Done")


class NamedRule(Rule, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule as it is given."""

    name: Name


@router.get("", **documented(Alerts))
def alerts(
    request: Request,
    run: str = "",
    state: Annotated[str, one_of(("", *_STATES))] = "",
    limit: Limit = 100,
) -> Response:
    """List alerts, open ones first; who sees one project sees those of its runs."""
    _known(state, _STATES)
    with service_of(request).read() as connection:
        project = sender(request).only_project
        body = queries.alerts(connection, _text(run), state, limit, project)
    return send(request, body, body.alerts)


@router.get("/status", **documented(AlertStatus))
def status(request: Request) -> Response:
    """Say how alerting itself is: what waits, and the dead-man switch."""
    service = service_of(request)
    deadman = service.alerts.deadman
    with service.read() as connection:
        number = queries.num_open(connection)
        progress = service.alerts.progress_of_owner(connection)
    body = AlertStatus(
        deadman=DeadMan(
            is_set=deadman.is_set, pause_seconds=service.settings.deadman_seconds,
            asked_ms=progress.asked_ms, problem=progress.deadman_problem,
        ),
        problem=progress.problem, public_url=service.settings.public_url,
        num_open=number,
        num_waiting=service.alerts.num_messages("pending"),
        num_given_up=service.alerts.num_messages("given_up"),
        behind_seconds=service.analysis.behind_seconds,
    )  # fmt: skip
    return send(request, body, [body])


@router.get("/rules", **documented(Rules))
def rules(request: Request) -> Response:
    """List the rules."""
    with service_of(request).read() as connection:
        body = queries.rules(connection)
    return send(request, body, body.rules)


@router.post("/rules", openapi_extra=takes(NamedRule), **documented(RuleRow))
async def add_rule(request: Request) -> Response:
    """Add a rule."""
    given = await _read(request, NamedRule)
    return await run_in_threadpool(_put_rule, request, given, None)


@router.put("/rules/{id}", openapi_extra=takes(NamedRule), **documented(RuleRow))
async def change_rule(request: Request, id: Id) -> Response:
    """Change a rule."""
    given = await _read(request, NamedRule)
    return await run_in_threadpool(_put_rule, request, given, id)


@router.delete("/rules/{id}", **documented(Deleted))
def delete_rule(request: Request, id: Id) -> Response:
    """Delete a rule; its open alerts are closed."""
    if not _write(service_of(request), lambda unit: store.delete(unit, tables.alert_rule, id)):
        raise queries.no_rule(id)
    return send(request, Deleted(id=id))


def _put_rule(request: Request, given: NamedRule, rule_id: int | None) -> Response:
    service, values = service_of(request), msgspec.structs.asdict(given)
    name = values.pop("name")
    rule = Rule(**values)
    try:
        rules_of_alerts.check(rule)
    except RefusedError as error:
        raise _refused(error) from error
    with service.read() as connection:
        known = {one.id for one in store.channels(connection)}
    if missing := [one for one in rule.channels if one not in known]:
        raise Problem(
            422, f"no channel {missing[0]}", "channels", "see /api/v1/alerts/channels, or name none"
        )
    made = _write(service, lambda unit: store.put_rule(unit, name, rule, rule_id))
    if made is None:
        raise queries.no_rule(rule_id or 0)
    with service.read() as connection:
        body = queries.rule(connection, made)
    return send(request, body, [body])


@router.get("/channels", **documented(Channels))
def channels(request: Request) -> Response:
    """List the channels, without their secrets."""
    with service_of(request).read() as connection:
        body = queries.channels(connection)
    return send(request, body, body.channels)


@router.post("/channels", openapi_extra=takes(Channel), **documented(ChannelRow))
async def add_channel(request: Request) -> Response:
    """Add a channel; its secrets can be changed later, never read."""
    given = await _read(request, Channel)
    return await run_in_threadpool(_put_channel, request, given, None)


@router.put("/channels/{id}", openapi_extra=takes(Channel), **documented(ChannelRow))
async def change_channel(request: Request, id: Id) -> Response:
    """Change a channel; secrets that are empty stay as they are."""
    given = await _read(request, Channel)
    return await run_in_threadpool(_put_channel, request, given, id)


@router.delete("/channels/{id}", **documented(Deleted))
def delete_channel(request: Request, id: Id) -> Response:
    """Delete a channel; what waits for it is dropped."""
    if not _write(service_of(request), lambda unit: store.delete(unit, tables.alert_channel, id)):
        raise queries.no_channel(id)
    return send(request, Deleted(id=id))


@router.post("/channels/{id}/test", **documented(DeliveryRow))
def try_channel(request: Request, id: Id) -> Response:
    """Send a test message now, and say what became of it."""
    service = service_of(request)
    with service.read() as connection:
        one = store.channel(connection, id)
    if one is None:
        raise queries.no_channel(id)
    if not _TESTS.acquire(blocking=False):
        raise Problem(429, "other tests are under way", "id", "try again in some seconds")
    try:
        made = service.alerts.try_channel(one)
    finally:
        _TESTS.release()
    with service.read() as connection:
        body = queries.delivery(connection, made)
    return send(request, body, [body])


def _put_channel(request: Request, given: Channel, channel_id: int | None) -> Response:
    service = service_of(request)
    try:
        check_quiet(given.quiet)
    except RefusedError as error:
        raise _refused(error) from error
    made = _write(service, lambda unit: store.put_channel(unit, given, channel_id))
    if made is None:
        raise queries.no_channel(channel_id or 0)
    service.alerts.wake()
    with service.read() as connection:
        body = queries.channel(connection, made)
    return send(request, body, [body])


@router.get("/deliveries", **documented(Deliveries))
def deliveries(
    request: Request,
    state: Annotated[str, one_of(("", *_DELIVERY_STATES))] = "",
    channel: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None,
    limit: Limit = 100,
) -> Response:
    """List messages, the newest first."""
    _known(state, _DELIVERY_STATES)
    with service_of(request).read() as connection:
        body = queries.deliveries(connection, state, channel, limit)
    return send(request, body, body.deliveries)


@router.post("/deliveries/{id}/send", **documented(DeliveryRow))
def send_again(request: Request, id: Id) -> Response:
    """Try a message again that was given up."""
    service = service_of(request)
    if not _write(service, lambda unit: store.send_again(unit, id)):
        with service.read() as connection:
            now = queries.delivery(connection, id)
        raise Problem(
            409, f"message {id} is {now.state}", "id", "only what was given up is sent again"
        )
    service.alerts.wake()
    with service.read() as connection:
        body = queries.delivery(connection, id)
    return send(request, body, [body])


@router.post("/{id}/close", **documented(AlertRow))
def close_alert(request: Request, id: Id) -> Response:
    """Close an open alert; it stays quiet until its problem is over and comes again."""
    service = service_of(request)
    _write(service, lambda unit: store.close_alert(unit, id))
    service.alerts.wake()
    with service.read() as connection:
        body = queries.alert(connection, id)
    return send(request, body, [body])


def _write(service: Service, work: Callable[[Unit], _Done]) -> _Done:
    """Do work in a transaction. Raises Problem where it is refused."""

    def attempt(unit: Unit) -> _Done | RefusedError:
        try:
            return work(unit)
        except RefusedError as error:  # an answer, no failure of the store
            return error

    done = service.writer.run(attempt, lock=ALERTS)
    if isinstance(done, RefusedError):
        raise _refused(done)
    return done


def _refused(error: RefusedError) -> Problem:
    return Problem(error.status, str(error), error.field, error.remedy)


_Body = TypeVar("_Body", bound=msgspec.Struct)


async def _read(request: Request, kind: type[_Body]) -> _Body:
    data = await read_body(request, MAX_BODY_BYTES)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        # the error names the field and what it must be, never its value
        raise Problem(
            422, f"not a {kind.__name__}: {str(error)[:300]}", field_of(error), _REMEDY
        ) from error


def _known(state: str, states: tuple[str, ...]) -> None:
    if state and state not in states:
        raise Problem(
            422, f"state {state[:20]!r} is not known", "state", f"use {', '.join(states)}"
        )


def _text(value: Any) -> str:
    return str(value)[:128].replace("\x00", "")
