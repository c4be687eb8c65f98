"""The HTTP routes: thin, each a call of a view and a reply."""

from rankscope_server.routes import (
    commands,
    data,
    ingest,
    logs,
    net,
    operations,
    preflight,
    preflight_results,
    runs,
    stream,
)

ROUTERS = (
    operations.router,
    operations.metrics_router,
    ingest.router,
    runs.router,
    data.router,
    logs.router,
    commands.router,
    preflight.router,
    preflight_results.router,
    net.router,
    stream.router,
)
