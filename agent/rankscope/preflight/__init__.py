"""Preflight: why a distributed launch would fail, hang, shrink or crawl, found before it does.

Facts (`facts/`, `probe/`, `smoke/`) are measured on every node and hold no verdict; they travel as
one `NodeReport` per node over the `board/`; `checks/` are pure functions from the merged reports
to findings, so that every node, the server and the tests on stored JSON say the same.
"""
