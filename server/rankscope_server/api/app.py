"""Puts the server together: service, routes, guards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware

import rankscope
from rankscope_server import problems
from rankscope_server.api import openapi, web
from rankscope_server.api.routes import ROUTERS
from rankscope_server.api.security import Guard
from rankscope_server.api.service import Service, open_service
from rankscope_server.settings import Settings

GZIP_FROM_BYTES = 1_000


def create_app(settings: Settings) -> FastAPI:
    """Return the application; its store opens with the lifespan. Raises nothing by itself."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with open_service(settings) as service:
            app.state.service = service
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
    app.add_middleware(GZipMiddleware, minimum_size=GZIP_FROM_BYTES, compresslevel=5)
    app.add_middleware(Guard, settings=settings)  # outermost: refuses before anything is read
    problems.install(app)
    openapi.install(app)
    for router in ROUTERS:
        app.include_router(router)
    app.include_router(web.router)  # last: it answers every other path
    return app


__all__ = ["Service", "create_app"]
