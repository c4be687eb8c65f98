"""What a draw is made of: the laboratory, what is broken in it, and what must be said of that."""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from tests.preflight.injections import Injection
from tests.preflight.nslab import Wire
from tests.preflight.scene import Mode

Truth = Literal["breaks", "sometimes", "works", "slow"]
Remedy = Literal["command", "either", "none"]
NETS = ("10.77.0", "10.140.33", "172.25.9", "192.168.77")
PORTS = (29500, 29500, 29400, 12355, 6001)
RANDOM_PORTS = (32768, 60999)  # Linux's default of ip_local_port_range
HIGHEST_TAIL = 90  # last number of a node's address; 99 is nobody's
DEAD_TAIL = 99


@dataclass(frozen=True)
class World:
    """A healthy laboratory, before anything is broken; node 0 is the master."""

    num_hosts: int
    net: str
    tails: tuple[int, ...]  # last numbers of the addresses, by node
    master_port: int
    mode: Mode

    @property
    def everywhere(self) -> range:
        """Return the numbers of all nodes."""
        return range(self.num_hosts)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all nodes."""
        return tuple(f"node{number}" for number in self.everywhere)

    def ip(self, number: int) -> str:
        """Return the address of a node."""
        return f"{self.net}.{self.tails[number]}"

    @property
    def nobody(self) -> str:
        """Return an address of the network that nobody has."""
        return f"{self.net}.{DEAD_TAIL}"

    @property
    def by_address(self) -> list[int]:
        """Return the nodes, the one with the lowest address first."""
        return sorted(self.everywhere, key=lambda number: ipaddress.ip_address(self.ip(number)))

    @property
    def dialled(self) -> list[int]:
        """Return the nodes that some node dials under gloo: the higher address dials."""
        return self.by_address[:-1]

    @property
    def dialling(self) -> list[int]:
        """Return the nodes that dial some node under gloo."""
        return self.by_address[1:]


@dataclass(frozen=True)
class Place:
    """Whom a finding is about: exactly these nodes, or exactly these pairs."""

    nodes: tuple[str, ...] | None = None
    pairs: frozenset[frozenset[str]] | None = None

    def is_of(self, nodes: Iterable[str], edges: Iterable[tuple[str, str]]) -> bool:
        """Return whether a finding with these nodes and edges is about this place."""
        if self.pairs is not None:
            told = set(nodes)
            is_among = any(told <= pair for pair in self.pairs) or not told
            return {frozenset(edge) for edge in edges} == self.pairs and is_among
        return self.nodes is not None and set(nodes) == set(self.nodes)


def at(*numbers: int) -> Place:
    """Return the place of these nodes."""
    return Place(nodes=tuple(f"node{number}" for number in numbers))


def between(*pairs: tuple[int, int]) -> Place:
    """Return the place of these pairs."""
    return Place(pairs=frozenset(frozenset((f"node{a}", f"node{b}")) for a, b in pairs))


@dataclass(frozen=True)
class Wanted:
    """The one finding of a fault: by one of these names, about one of these places."""

    ids: frozenset[str]
    places: tuple[Place, ...]  # none: wherever
    statuses: tuple[str, ...] = ("fail",)
    is_optional: bool = False  # the job works: to say nothing is right, too


def wanted(
    ids: str, *places: Place, statuses: tuple[str, ...] = ("fail",), is_optional: bool = False
) -> Wanted:
    """Return what is wanted, with its names in one text, separated by blanks."""
    return Wanted(frozenset(ids.split()), places, statuses, is_optional)


def warned(ids: str, *places: Place, is_optional: bool = False) -> Wanted:
    """Return a wanted warning."""
    return wanted(ids, *places, statuses=("warn",), is_optional=is_optional)


@dataclass(frozen=True)
class Case:
    """One fault at one place in one size."""

    says: str
    inject: Injection
    wanted: Wanted | None  # None: nothing may be said
    also: tuple[str, ...] = ()  # ids of warnings that may stand beside: true as well
    options: str = ""  # of preflight; {shared} is filled in
    job: str = ""  # what the job does besides: see benchmarks/preflight_drawn.py
    wire: Wire = "veth"
    mtu: int = 1500
    is_default: bool = False  # it takes more than --quick
    is_user: bool = False  # it binds ordinary users only
    has_torch: bool = False  # it lies in torch itself
    agree: bool = True  # all nodes print the same; without any carrier they cannot


@dataclass(frozen=True)
class Kind:
    """A kind of fault: draws a place and a size of it."""

    name: str
    family: str
    truth: Truth  # what the job does; benchmarks/preflight_drawn.py measures it
    draw: Callable[[World, random.Random], Case]
    remedy: Remedy = "either"
    mode: Mode | None = None  # the only one in which there is such a fault
    net: str = ""  # the only network, where its number matters
    is_timed: bool = False  # it is found by timing: it wants the machine for itself
    needs: tuple[str, ...] = ()  # of the machine: tests/capabilities.py
    world: World | None = None  # the only one there is


@dataclass
class Catalogue:
    """All kinds, filled by their decorator."""

    kinds: dict[str, Kind] = field(default_factory=dict)

    def add(
        self,
        name: str,
        family: str,
        truth: Truth,
        *,
        remedy: Remedy = "either",
        mode: Mode | None = None,
        net: str = "",
        is_timed: bool = False,
        needs: tuple[str, ...] = (),
    ) -> Callable[[Callable[[World, random.Random], Case]], Callable[[World, random.Random], Case]]:
        """Add the decorated function as a kind."""  # fmt: skip

        def take(draw: Callable[[World, random.Random], Case]) -> Callable[..., Case]:
            assert name not in self.kinds, name
            self.kinds[name] = Kind(name, family, truth, draw, remedy, mode, net, is_timed, needs)
            return draw

        return take


def draw_world(rng: random.Random, mode: Mode | None = None, net: str = "") -> World:
    """Draw a healthy laboratory of three nodes, or of four."""
    num_hosts = rng.choice((3, 3, 3, 4))
    tails = tuple(rng.sample(range(1, HIGHEST_TAIL + 1), num_hosts))
    modes: tuple[Mode, ...] = ("static", "env")
    drawn_net, port, drawn_mode = rng.choice(NETS), rng.choice(PORTS), rng.choice(modes)
    return World(num_hosts, net or drawn_net, tails, port, mode or drawn_mode)
