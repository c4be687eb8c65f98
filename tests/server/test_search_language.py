"""The language of the search box: a tree, or a mistake with its place; never anything else."""

from __future__ import annotations

import logging

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rankscope_server.search.filters import HELP
from rankscope_server.search.parse import MAX_CHARS, parse
from rankscope_server.search.tree import (
    EVERYTHING,
    And,
    Names,
    Node,
    Not,
    Numbers,
    Or,
    QueryError,
    Regex,
    Text,
    Time,
    leaves,
)

NOW_NS = 1_700_000_000 * 10**9
MOST = 1 << 62
PIECES = (
    "loss", "out", "*", '"', "\\", "(", ")", "-", "OR", "AND", "NOT", "/", "[0-9]+", " ", " ",
    "rank:", "3-7", "level:", ">=warning", "step:", "400..500", "since:", "-10m", "host:", ",",
    "i", ":", "h\u00e9", "\n", "nccl", "colour:",
)  # fmt: skip


def tree(query: str) -> Node:
    """Return a tree without the places of its leaves."""

    def bare(node: Node) -> Node:
        if isinstance(node, Not):
            return Not(bare(node.node))
        if isinstance(node, And | Or):
            return type(node)(tuple(map(bare, node.nodes)))
        values = {name: getattr(node, name) for name in node.__slots__ if name != "place"}
        return type(node)(**values)

    return bare(parse(query, NOW_NS))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", EVERYTHING),
        ("  ", EVERYTHING),
        ("loss", Text("loss")),
        ("grad.norm=12.7", Text("grad.norm=12.7")),
        ("ckpt*", Text("ckpt", False, True)),
        ("*point", Text("point", True, False)),
        ("*heck*", Text("heck", True, True)),
        ('"out of memory"', Text("out of memory")),
        ('"out of mem"*', Text("out of mem", False, True)),
        (r'"say \"hi\" \\ x"', Text(r'say "hi" \ x')),
        ("CUDA memory", And((Text("CUDA"), Text("memory")))),
        ("CUDA AND memory", And((Text("CUDA"), Text("memory")))),
        ("a b OR c", Or((And((Text("a"), Text("b"))), Text("c")))),
        ("a (b OR c)", And((Text("a"), Or((Text("b"), Text("c")))))),
        ("-a", Not(Text("a"))),
        ("NOT a", Not(Text("a"))),
        ("-(a b)", Not(And((Text("a"), Text("b"))))),
        ("or and not", And((Text("or"), Text("and"), Text("not")))),
        (r"/took \d+ ms/", Regex(r"took \d+ ms")),
        ("/oom/i", Regex("oom", True)),
        (r"/a\/b/", Regex("a/b")),
        ("/data/shard-0042.tar", Text("/data/shard-0042.tar")),
        ("/data", Text("/data")),
        ("rank:3", Numbers("rank", ((3, 3),))),
        ("rank:0,3-7,node", Numbers("rank", ((0, 0), (3, 7), (-1, -1)))),
        ("level:error", Numbers("level", ((40, 49),))),
        ("level:>=warning", Numbers("level", ((30, MOST),))),
        ("level:<warning", Numbers("level", ((-MOST, 29),))),
        ("LEVEL:warn", Numbers("level", ((30, 39),))),
        ("step:400..500", Numbers("step", ((400, 500),))),
        ("step:>400", Numbers("step", ((401, MOST),))),
        ("attempt:1", Numbers("attempt", ((1, 1),))),
        ("host:node-b,node-c", Names("host", ("node-b", "node-c"))),
        ('logger:"my logger"', Names("logger", ("my logger",))),
        ("since:-10m", Time(NOW_NS - 600 * 10**9, None)),
        ("until:1.5h", Time(None, NOW_NS - 5400 * 10**9)),
        ("since:2023-11-14T22:13:20", Time(NOW_NS, None)),
        ("since:2023-11-15T00:13:20+02:00", Time(NOW_NS, None)),
        ("RuntimeError: bad", And((Text("RuntimeError:"), Text("bad")))),
        ("train.py:42", Text("train.py:42")),
        ("-", Text("-")),
    ],
)
def test_what_is_read(query: str, expected: Node) -> None:
    assert tree(query) == expected


@pytest.mark.parametrize(
    ("query", "what", "marked"),
    [
        ("a levle:error", "levle: is not a filter", "levle:"),
        ("http://x", "http: is not a filter", "http:"),
        ("rank:3,x", "'x' is no rank", "x"),
        ("step:5..3", "5..3 runs backwards", "5..3"),
        ("level:loud", "'loud' is no level", "loud"),
        ("since:soon", "'soon' is no time", "soon"),
        ("since:-1m,-2m", "one time is enough", "-2m"),
        ("host: x", "a filter without a value", " "),
        ("rank:1,", "a filter without a value", "1,"),
        ("a (b c", "a ( without its )", "("),
        ("a b)", "a ) without its (", ")"),
        ("a OR", "here something to search for is missing", ""),
        ("OR a", "OR stands between two searches", "OR"),
        ("()", "here something to search for is missing", ")"),
        ('say "hello', "a quotation mark without its second one", '"'),
        ('""', "an empty phrase", '""'),
        ("*", "here is nothing to search for", "*"),
        ("a*b", "a * within a word", "*"),
        ("x /[/", "not a regular expression of RE2: missing ]: [", "["),
        ("/(?=a)/", "not a regular expression of RE2: invalid perl operator", "(?="),
        ("x /a(b/", "not a regular expression of RE2: missing ): a(b", "a(b"),
        ("/rank a** b/i", "not a regular expression of RE2: bad repetition operator: **", "**"),
        (r"/a\/b**/", "not a regular expression of RE2: bad repetition", r"/a\/b**/"),
        ("stream:stdout,stdot", "'stdot' is no stream", "stdot"),
        ("stream:x*", "'x*' is no stream", "x*"),
        ("//", "an empty regular expression", "//"),
        ("/a? b", "a regular expression without its closing /", "/"),
        ("/a?b/gm x", "'gm' behind a regular expression", "gm"),
        ("(" * 30 + "a" + ")" * 30, "too many levels", "("),
        ("a " * 100, "a query of too many parts", "a"),
    ],
)
def test_a_mistake_names_its_place(query: str, what: str, marked: str) -> None:
    with pytest.raises(QueryError) as caught:
        parse(query, NOW_NS)
    error = caught.value
    assert error.what.startswith(what)
    assert query[error.place.start : error.place.end] == marked
    assert error.remedy


def test_a_query_that_is_too_long_is_refused_where_it_is_too_long() -> None:
    with pytest.raises(QueryError) as caught:
        parse("a" * (MAX_CHARS + 5), NOW_NS)
    assert (caught.value.place.start, caught.value.place.end) == (MAX_CHARS, MAX_CHARS + 5)


def test_levels_are_those_of_logging() -> None:
    for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "FATAL", "WARN"):
        (leaf,) = leaves(parse(f"level:{name}", NOW_NS))
        assert isinstance(leaf, Numbers)
        assert leaf.ranges[0][0] == getattr(logging, name)


@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=14).map("".join)))
def test_any_text_gives_a_tree_or_a_mistake_at_a_place(query: str) -> None:
    node = read(query)
    if isinstance(node, QueryError):
        assert 0 <= node.place.start < node.place.end <= len(query) + 1
        assert node.what
        assert node.remedy
        return
    for leaf in leaves(node):
        assert not isinstance(leaf, Not | And | Or)
        written = query[leaf.place.start : leaf.place.end]
        # What a leaf is depends on nothing around it.
        assert tree(written) == tree_of(leaf)


def read(query: str) -> Node | QueryError:
    try:
        return parse(query, NOW_NS)
    except QueryError as error:
        return error


def tree_of(leaf: Node) -> Node:
    values = {name: getattr(leaf, name) for name in leaf.__slots__ if name != "place"}
    return type(leaf)(**values)


def test_every_filter_has_a_help_that_is_true() -> None:
    for name, text in HELP.items():
        for example in text.split(";")[0].replace(", or a time as", " or").split(" or "):
            if example.startswith(("the name", "logging,")):
                continue
            assert leaves(parse(f"{name}:{example}", NOW_NS)), (name, example)
