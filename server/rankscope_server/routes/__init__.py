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
    preflight.router,  # early: a thousand agents ask these at a time, and paths are tried in order
    runs.router,
    data.router,
    logs.router,
    commands.router,
    preflight_results.router,
    net.router,
    stream.router,
)
