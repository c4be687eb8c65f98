"""Puts the server together: service, routes, guards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

from fastapi import APIRouter, Depends, FastAPI
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import BaseRoute

import rankscope
from rankscope_server.api import failures, ingest, openapi, stream, web
from rankscope_server.api.access import oidc
from rankscope_server.api.access import routes as access
from rankscope_server.api.access.rules import authorize
from rankscope_server.api.advice import routes as advice
from rankscope_server.api.alerts import routes as alerts
from rankscope_server.api.batches_first import BatchesFirst
from rankscope_server.api.body_limits import BodyLimits
from rankscope_server.api.commands import routes as commands
from rankscope_server.api.communication import routes as communication
from rankscope_server.api.compare import routes as compare
from rankscope_server.api.cost import routes as cost
from rankscope_server.api.data import routes as data
from rankscope_server.api.findings import routes as findings
from rankscope_server.api.fleet import routes as fleet
from rankscope_server.api.gone_away import GoneAway, bound_threads
from rankscope_server.api.hang import routes as hang
from rankscope_server.api.logs import routes as logs
from rankscope_server.api.machines import routes as machines
from rankscope_server.api.operations import routes as operations
from rankscope_server.api.otlp import routes as otlp
from rankscope_server.api.overview import routes as overview
from rankscope_server.api.parallelism import routes as parallelism
from rankscope_server.api.pictures import routes as pictures
from rankscope_server.api.preflight import network as preflight_network
from rankscope_server.api.preflight import results as preflight_results
from rankscope_server.api.preflight import routes as preflight
from rankscope_server.api.proxies import Proxies
from rankscope_server.api.ranks import routes as ranks
from rankscope_server.api.report import routes as report
from rankscope_server.api.request_log import RequestLog
from rankscope_server.api.resources import routes as resources
from rankscope_server.api.runs import routes as runs
from rankscope_server.api.saved import routes as saved
from rankscope_server.api.security import Guard
from rankscope_server.api.selection import routes as selection
from rankscope_server.api.server import routes as server
from rankscope_server.api.service import Service, open_service
from rankscope_server.api.shared_answers import SharedAnswers
from rankscope_server.api.steps import routes as steps
from rankscope_server.api.storage import routes as storage
from rankscope_server.api.timeline import routes as timeline
from rankscope_server.api.what_if import routes as what_if
from rankscope_server.settings import Settings

GZIP_FROM_BYTES = 1_000
GZIP_LEVEL = 1  # of a map of 1.4 MB level 5 spares 8 % of the bytes and takes 40 ms, this takes 9
# Paths are tried in order; of preflight a thousand agents ask at a time.
ROUTERS = (
    operations.router,
    operations.metrics_router,
    ingest.router,
    otlp.router,
    preflight.router,
    *(
        part.router
        for part in (runs, overview, report, findings, steps, selection, timeline, ranks)
    ),
    *(part.router for part in (machines, logs, communication, hang, resources, compare)),
    *(part.router for part in (cost, data, fleet, parallelism, pictures, saved, what_if)),
    commands.router,
    preflight_results.router,
    preflight_network.router,
    storage.router,
    server.router,
    alerts.router,
    advice.router,
    stream.router,
    access.router,
    oidc.router,
    web.router,  # last: it answers every other path
)


def create_app(settings: Settings) -> FastAPI:
    """Return the application; its store opens with the lifespan. Raises nothing by itself."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with open_service(settings) as service:
            app.state.service = service
            bound_threads()
            await service.broker.start()
            await service.preflights.start()
            yield
            await service.preflights.stop()
            await service.broker.stop()

    app = FastAPI(
        title="Rankscope",
        version=rankscope.__version__,
        lifespan=lifespan,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.assets = web.Assets(web.assets_directory())
    app.add_middleware(GZipMiddleware, minimum_size=GZIP_FROM_BYTES, compresslevel=GZIP_LEVEL)
    app.add_middleware(SharedAnswers)
    app.add_middleware(GoneAway)
    app.add_middleware(BatchesFirst)
    app.add_middleware(BodyLimits, settings=settings)
    app.add_middleware(Guard, settings=settings)  # refuses before anything is read
    app.add_middleware(RequestLog)  # sees what was refused too
    if settings.trusted_proxies:  # outermost: all others see the caller's address, not the proxy's
        app.add_middleware(Proxies, settings=settings)
    failures.install(app)
    openapi.install(app)
    app.router.routes += _routes()
    return app


@cache
def _routes() -> list[BaseRoute]:
    """Return the routes that all applications share: FastAPI reads each at its first request."""
    together = APIRouter(dependencies=[Depends(authorize)])
    for router in ROUTERS:
        together.include_router(router)
    return together.routes


__all__ = ["Service", "create_app"]
