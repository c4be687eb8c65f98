"""The HTTP routes: thin, each a call of a view and a reply."""

from rankscope_server.api import ingest, stream
from rankscope_server.api.commands import routes as commands
from rankscope_server.api.logs import routes as logs
from rankscope_server.api.operations import routes as operations
from rankscope_server.api.preflight import (
    network as net,
)
from rankscope_server.api.preflight import (
    results as preflight_results,
)
from rankscope_server.api.preflight import (
    routes as preflight,
)
from rankscope_server.api.runs import routes as runs
from rankscope_server.api.steps import routes as data

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
