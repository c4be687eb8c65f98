"""Every way of dying, once with one seed: step, collective, last line, status, reason are right.

More seeds: `python benchmarks/torture.py --seeds 5`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import capabilities
from tests.scenarios.torture.harness import Case, Torture
from tests.scenarios.torture.ways import WAYS, Way

pytestmark = [pytest.mark.multiproc, pytest.mark.core]


@pytest.fixture(scope="module")
def torture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torture]:
    place = Torture(tmp_path_factory.mktemp("torture"))
    yield place
    place.close()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_the_record_is_right(torture: Torture, way: Way) -> None:
    if way.name == "oom-killer":
        capabilities.need("memory-cgroup")
    case = Case(way, seed=1, attempt=WAYS.index(way))
    problems = torture.run(case)
    logs = sorted(torture.directory.glob(f"{case.attempt}.*.log"))
    assert not problems, "\n".join([*problems, *(path.read_text()[-1500:] for path in logs)])
