"""A real Prometheus beside a real server: what is in deploy/ for it works as it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.ports import free_port
from tests.server.conftest import ServerProcess
from tests.server.seed import seed_run

pytestmark = pytest.mark.needs("prometheus")
DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rankscope.rules.yml"
TOKEN, SECONDS = "a-token-of-the-scraper", 60.0
SLOW = 2


class Prometheus:
    """Asks the configuration of deploy/, with only its pace, its target and its token changed."""

    def __init__(self, folder: Path, target: str) -> None:
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "rankscope.token").write_text(TOKEN)
        shutil.copy(RULES, folder)
        address = f"127.0.0.1:{free_port()}"
        self._process = subprocess.Popen(
            [
                "prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
                f"--web.listen-address={address}",
            ],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._http = httpx.Client(base_url=f"http://{address}/api/v1", timeout=10, trust_env=False)

    def query(self, text: str) -> list[dict[str, Any]]:
        """Return the series of an instant query. Raises where it is not one."""
        reply = self._http.get("/query", params={"query": text})
        assert reply.status_code == 200, reply.text
        found: list[dict[str, Any]] = reply.json()["data"]["result"]
        return found

    def alerts(self) -> dict[str, dict[str, Any]]:
        """Return each alert that is pending or fires, by its name."""
        found = self._http.get("/alerts").json()["data"]["alerts"]
        return {each["labels"]["alertname"]: each for each in found}

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                if condition():
                    return
            except httpx.TransportError:  # it starts
                assert self._process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(SECONDS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    found = ServerProcess(tmp_path_factory.mktemp("data"), RANKSCOPE_TOKEN=TOKEN).start()
    seed_run(found.url, TOKEN, run_id="slow", slow_rank=SLOW, end=False)
    seed_run(found.url, TOKEN, run_id="crashed", fault="crash")
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def prometheus(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    found = Prometheus(tmp_path_factory.mktemp("prometheus"), server.url.removeprefix("http://"))
    found.wait_for(lambda: bool(found.query('rankscope_run_answer{answer="culprit"} == 1')))
    try:
        yield found
    finally:
        found.close()


def test_a_slow_rank_is_a_series_with_its_host(prometheus: Prometheus) -> None:
    (found,) = prometheus.query('rankscope_run_rank_cost_ratio{run="slow"}')
    assert (found["metric"]["rank"], found["metric"]["host"]) == (str(SLOW), "node-b")
    assert float(found["value"][1]) > 0.05


def test_alerts_come_of_what_is_so(prometheus: Prometheus) -> None:
    prometheus.wait_for(lambda: "RankscopeRunFailed" in prometheus.alerts())
    failed = prometheus.alerts()["RankscopeRunFailed"]
    assert failed["state"] == "firing"
    assert failed["annotations"]["summary"] == "Run crashed failed"
    lost = prometheus.alerts()["RankscopeThroughputLost"]
    assert lost["state"] == "pending"  # for five minutes
    assert lost["labels"]["run"] == "slow"
    assert not {"RankscopeDown", "RankscopeBehind", "RankscopeStoreRefuses"} & {
        *prometheus.alerts()
    }


def panels() -> list[dict[str, Any]]:
    board = json.loads((DEPLOY / "grafana" / "rankscope.json").read_text())
    found: list[dict[str, Any]] = board["panels"]
    return found


EXPRESSIONS = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in panels()
    for target in panel.get("targets", ())
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_each_panel_of_the_dashboard_shows_something(prometheus: Prometheus, name: str) -> None:
    text = EXPRESSIONS[name].replace("$run", ".*")
    prometheus.wait_for(lambda: bool(prometheus.query(text)))


def test_panels_of_the_dashboard_are_beside_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels():
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in panels()}) == len(panels())


# what each alert looks at, and what the series are minute by minute (promtool's notation)
CASES: dict[str, tuple[dict[str, str], str, str]] = {
    "RankscopeRunFailed": ({'rankscope_run_status{run="a",status="failed"}': "0 1x9"}, "1m", "0m"),
    "RankscopeRunStuck": ({'rankscope_run_status{run="a",status="stuck"}': "0 1x9"}, "1m", "0m"),
    "RankscopeRunSilent": ({'rankscope_run_ranks{run="a",state="silent"}': "0 2x9"}, "3m", "1m"),
    "RankscopeCriticalFinding": (
        {'rankscope_run_open_findings{run="a",severity="critical"}': "0 1x9"}, "3m", "1m",
    ),
    "RankscopeThroughputLost": (
        {'rankscope_run_verdict_cost_ratio{run="a"}': "0.09 0.3x9"}, "7m", "4m",
    ),
    "RankscopeRecordsLost": ({'rankscope_run_records_lost{run="a"}': "4 4 5x9"}, "3m", "1m"),
    "RankscopeDown": ({'up{job="rankscope",instance="s"}': "1 0x9"}, "4m", "2m"),
    "RankscopeBehind": ({'rankscope_queue_delay_seconds{instance="s"}': "1 40x9"}, "4m", "2m"),
    "RankscopeStoreRefuses": ({'rankscope_disk_full{instance="s"}': "0 1x9"}, "1m", "0m"),
    "RankscopeSeriesUnreadable": ({'rankscope_run_series_up{instance="s"}': "1 0x9"}, "3m", "1m"),
}  # fmt: skip


def test_every_rule_has_a_case() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    assert {rule["alert"] for group in groups for rule in group["rules"]} == CASES.keys()


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should_and_not_before(alert: str, tmp_path: Path) -> None:
    inputs, at, before = CASES[alert]
    series = [{"series": name, "values": values} for name, values in inputs.items()]
    if alert != "RankscopeDown":  # which fires where nothing is scraped at all
        series.append({"series": 'up{job="rankscope",instance="s"}', "values": "1x20"})
    firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    one: list[Any] = [{"value": 1, "labels": "{}"}]
    expected = [
        {"expr": firing, "eval_time": moment, "exp_samples": samples}
        for moment, samples in ((at, one), (before, []))
    ]
    group = {"interval": "1m", "input_series": series, "promql_expr_test": expected}
    tests = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [group]}
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
