"""What people keep under a name."""

from __future__ import annotations

from rankscope_server.answers import Schema


class SavedSearch(Schema, frozen=True):
    """A search that a person keeps."""

    id: int
    name: str
    q: str
    created_ms: float


class SavedSearches(Schema, frozen=True):
    """All searches that are kept, by name."""

    searches: list[SavedSearch]


class SavedView(Schema, frozen=True):
    """A view of the dashboard that a person keeps; with `*` as its run it is one of every run."""

    id: int
    name: str
    address: str
    created_ms: float


class SavedViews(Schema, frozen=True):
    """All views that are kept, by name."""

    views: list[SavedView]
