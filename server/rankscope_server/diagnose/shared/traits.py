"""What some ranks have in common that no other rank has: where to look, when several are slow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rankscope_server.diagnose.shared.topology import switches_of
from rankscope_server.diagnose.window import Window
from rankscope_server.observe.environment_rules import level_of

_MOST = 3  # that are reported
_MOST_HOSTS = 4  # of more hosts than that the names say little
_LONGEST = 40  # characters of a value


def shared_by(window: Window, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return what all of `ranks` have and no other rank, the smallest part of the cluster first.

    Nothing where one rank is looked at, or all.
    """
    mine = set(ranks)
    others = set(window.ranks) - mine
    if len(mine) < 2 or not others or not mine <= set(window.ranks):
        return ()
    found = [*_places(window, mine, others), *_facts(window, mine, others)]
    return tuple(found[:_MOST])


def _places(window: Window, mine: set[int], others: set[int]) -> Iterator[str]:
    hosts, theirs = ({window.host(rank) for rank in some} for some in (mine, others))
    if hosts.isdisjoint(theirs) and "" not in hosts and len(hosts) <= _MOST_HOSTS:
        names = ", ".join(sorted(hosts))
        yield f"they are the ranks of {'host' if len(hosts) == 1 else 'hosts'} {names}"
    below = _only_here([set(switches_of(window, rank)) for rank in mine],
                       (set(switches_of(window, rank)) for rank in others))  # fmt: skip
    if below and len(hosts) > 1:
        yield f"their hosts are those below switch {below[0]}"
    for name, word in (("stage", "pipeline stage"), ("local_rank", "local rank")):
        values = {getattr(window.ranks[rank], name) for rank in mine}
        alone = values.isdisjoint(getattr(window.ranks[rank], name) for rank in others)
        if len(values) == 1 and alone and len(hosts | theirs) > (name == "local_rank"):
            (value,) = values
            yield (
                f"they are the ranks of {word} {value}"
                if name == "stage"
                else (f"each is {word} {value} of its host")
            )


def _only_here(mine: Sequence[set[str]], others: Iterable[set[str]]) -> list[str]:
    return sorted(set.intersection(*mine).difference(*others))


def _facts(window: Window, mine: set[int], others: set[int]) -> Iterator[str]:
    """Yield the facts of their environment that have one value on all of them and no other."""
    for fact, values in sorted(window.facts.environments.by_fact.items()):
        if len(values) < 2 or level_of(fact, tuple(sorted(values))) == "own":
            continue
        known = set().union(*values.values())
        value = next((text for text, ranks in values.items() if ranks == mine & known), None)
        if value is None or not mine <= known or not others & known:
            continue
        rest = sorted(text for text in values if text != value)
        theirs = _short(rest[0]) if len(rest) == 1 else f"{len(rest)} other values"
        yield f"{fact} is {_short(value)} on them, {theirs} on others"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
