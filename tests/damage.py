"""Bytes that came to harm, for readers that must refuse them and not believe them."""

from __future__ import annotations

from hypothesis import strategies as st


def damaged(good: bytes, reach: int | None = None) -> st.SearchStrategy[bytes]:
    """Return `good` cut off somewhere, with some of its first `reach` bytes changed."""
    edits = st.lists(
        st.tuples(st.integers(0, min(len(good), reach or len(good)) - 1), st.integers(0, 255)),
        max_size=4,
    )
    return st.builds(_change, st.just(good), st.integers(1, len(good)) | st.just(len(good)), edits)


def _change(good: bytes, length: int, edits: list[tuple[int, int]]) -> bytes:
    data = bytearray(good)
    for at, value in edits:
        data[at] = value
    return bytes(data[:length])
