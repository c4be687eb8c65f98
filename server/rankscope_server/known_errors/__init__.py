"""The error book: known failures as data, and what reads logs by it."""

from __future__ import annotations

from rankscope_server.known_errors.entry import FAMILIES, ROLES, Entry, Role
from rankscope_server.known_errors.load import Book, BookError, book, read_book

__all__ = ["FAMILIES", "ROLES", "Book", "BookError", "Entry", "Role", "book", "read_book"]
