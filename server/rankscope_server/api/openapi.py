"""The OpenAPI document: FastAPI knows the paths, msgspec the answers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

import rankscope
from rankscope_server.api.replies import documented_answers

_TEMPLATE = "#/components/schemas/{name}"


def install(app: FastAPI) -> None:
    """Make `/api/v1/openapi.json` complete."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title="Rankscope", version=rankscope.__version__, routes=app.routes,
        description="Observability and diagnostics for distributed PyTorch.",
    )  # fmt: skip
    _, components = msgspec.json.schema_components(documented_answers(), ref_template=_TEMPLATE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    return document
