"""Preflight: why a distributed launch would fail, hang, shrink or crawl, found before it does.

Facts (`facts/`, `probe/`, `collective/`) are measured on every node and hold no verdict. They
travel as one `NodeReport` per node (`exchange/`). `checks/` are pure functions from the merged
reports to findings, so that every node, the server and the tests on stored JSON agree.
"""
