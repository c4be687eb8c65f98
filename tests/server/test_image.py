"""The image and the compose file of `deploy/container`: built by a real builder, and run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from rankscope_server.settings import SETTINGS, parse
from tests.fresh import carried
from tests.fresh.rows import SMALLEST
from tests.fresh.system import archive
from tests.server.balancers import DEPLOY

ROOT = DEPLOY.parent
CONTAINER = DEPLOY / "container"
_LIMIT_S = 900.0
# What runs in a namespace of its own, as the image says: read-only, but for its volume and /tmp.
RUN = """
set -eu
root=$1
mount --make-rprivate /
mount --bind "$root" "$root"
mount -o remount,ro,bind "$root"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -t tmpfs -o "mode=0700,uid=10001,gid=10001" tmpfs "$root/data"
mount -t tmpfs tmpfs "$root/tmp"
ip link set lo up
cd "$root"
inside() { exec chroot --userspec=@USER@ . env -i @ENVIRON@ "$@"; }
(inside @SERVE@) && exit 90  # without a token nothing listens to the world
(inside RANKSCOPE_TOKEN=a-secret-of-its-own @SERVE@) &
server=$!
until (inside @HEALTHCHECK@) 2>/dev/null; do kill -0 $server; sleep 0.2; done
(inside id -u)
(inside sh -c ': > /opt/rankscope/x') 2>/dev/null && exit 91
(inside rankscope backup --out /data/copy) && (inside test -s /data/copy)
kill -TERM $server
wait $server
"""


def images(folder: Path, *words: str) -> str:
    """Run `buildah` with a store of its own; return what it prints."""
    store = ("--root", str(folder / "store"), "--runroot", str(folder / "run"))
    done = subprocess.run(
        ["buildah", *store, "--storage-driver", "vfs", *words],
        capture_output=True, text=True, check=False, timeout=_LIMIT_S, cwd=ROOT,
        env=os.environ | {"BUILDAH_ISOLATION": "chroot"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of the image and its configuration, on a bare system in the place of its base."""
    folder = tmp_path_factory.mktemp("image")
    base = folder / "base"
    base.mkdir()
    packed = archive(SMALLEST.debian, SMALLEST.packages)
    subprocess.run(["tar", "-xf", packed, "-C", base, "--numeric-owner"], check=True)
    carried.copy_into(base)
    # Official images of Python have `python` and `pip` there.
    subprocess.run(["chroot", base, "python3", "-m", "venv", "/usr/local"], check=True)
    made = images(folder, "from", "scratch")
    images(folder, "copy", "--quiet", made, str(base), "/")
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", **carried.variables()}
    named = [word for name, text in variables.items() for word in ("--env", f"{name}={text}")]
    images(folder, "config", *named, made)
    images(folder, "commit", "--quiet", made, "localhost/base")
    shutil.rmtree(base)
    shown = [word for path in carried.folders() for word in ("--volume", f"{path}:{path}:ro")]
    images(
        folder, "build", "--format", "docker", "--layers=false", "--network", "host", *shown,
        "--build-arg", "BASE=localhost/base", "--file", str(CONTAINER / "Dockerfile"),
        "--tag", "localhost/rankscope", ".",
    )  # fmt: skip
    container = images(folder, "from", "localhost/rankscope")
    config = json.loads(images(folder, "inspect", "--type", "image", "localhost/rankscope"))
    yield Path(images(folder, "mount", container)), config["Docker"]["config"]
    images(folder, "unmount", container)
    shutil.rmtree(folder)


@pytest.mark.timeout(1200)  # it installs what the image holds
@pytest.mark.needs("bare-root", "buildah", "namespaces")
def test_the_image_is_built_and_runs_read_only_as_its_user(
    image: tuple[Path, dict[str, Any]],
) -> None:
    root, config = image
    health = config["Healthcheck"]["Test"]
    assert (config["User"], health[0]) == ("10001:10001", "CMD")
    own = [text for text in config["Env"] if text.startswith(("PATH=", "PYTHON", "RANKSCOPE_"))]
    script = RUN
    for mark, words in (
        ("@USER@", [config["User"]]), ("@ENVIRON@", own), ("@HEALTHCHECK@", health[1:]),
        ("@SERVE@", [*config["Entrypoint"], *config["Cmd"]]),
    ):  # fmt: skip
        script = script.replace(mark, shlex.join(words))
    done = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", script,
         "sh", str(root)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10001" in done.stdout.split()
    assert "no token is set" in done.stderr
    assert not list(root.glob("opt/rankscope/lib/python*/site-packages/pip"))
    assert list(root.glob("opt/rankscope/lib/python*/site-packages/rankscope_server/web/app"))


def test_nothing_but_the_context_is_sent_to_the_builder() -> None:
    """What the recipe copies is what is let in, and nothing else."""
    recipe = (CONTAINER / "Dockerfile").read_text()
    copied = re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", recipe)
    let_in = re.findall(r"(?m)^!(.+)$", (CONTAINER / "Dockerfile.dockerignore").read_text())
    assert sorted(" ".join(copied).split()) == sorted(let_in)
    assert all((ROOT / name).exists() for name in let_in)


def composed(name: str) -> dict[str, Any]:
    """Return a compose file, its variables put in."""
    given = {"RANKSCOPE_NAME": "rankscope.example", "RANKSCOPE_TOKEN": "t" * 20,
             "POSTGRES_PASSWORD": "p" * 20, "NATS_PASSWORD": "n" * 20,
             "AWS_SECRET_ACCESS_KEY": "a" * 20}  # fmt: skip
    text = (CONTAINER / name).read_text()
    filled = re.sub(r"\$\{(\w+)(?::\?[^}]*)?\}", lambda found: given[found[1]], text)
    found: dict[str, Any] = yaml.safe_load(filled)
    return found


COMPOSED = {
    "compose.yaml": ("server-a", "server-b"),
    "fleet.yaml": ("web-a", "web-b", "gateway-a", "gateway-b", "worker-a", "worker-b"),
}


@pytest.mark.parametrize("file", COMPOSED)
def test_the_servers_of_a_compose_file_start_with_their_settings(file: str) -> None:
    services = composed(file)["services"]
    address = services["balancer"]["networks"]["inside"]["ipv4_address"]
    known = {setting.variable for setting in SETTINGS}
    first, *later = COMPOSED[file]
    for name in (first, *later):
        environ = services[name]["environment"]
        assert {key for key in environ if key.startswith("RANKSCOPE_")} <= known
        _, *words = services[name].get("command", ["serve"])
        settings = parse(words, environ | {"RANKSCOPE_SERVER_HOST": "0.0.0.0"})
        assert settings.role == (name.partition("-")[0] if words else "all")
        assert settings.proxies() == (f"{address}/32",)
        assert settings.host_names() == ("rankscope.example",)
        assert services[name]["read_only"]
        assert services[name]["cap_drop"] == ["ALL"]
        assert (
            int(services[name]["stop_grace_period"].removesuffix("s")) > settings.shutdown_seconds
        )
    waits = {"condition": "service_healthy"}
    assert all(services[name]["depends_on"] == {first: waits} for name in later)


@pytest.mark.parametrize(
    ("file", "kinds"),
    [
        ("compose.yaml", {"SERVER": "server"}),
        ("fleet.yaml", {"SERVER": "web", "GATEWAY": "gateway"}),
    ],
)
def test_the_balancer_of_a_compose_file_has_the_variables_of_its_configuration(
    file: str, kinds: dict[str, str]
) -> None:
    services = composed(file)["services"]
    balancer = services["balancer"]
    text = (DEPLOY / "haproxy" / "rankscope.cfg").read_text()
    ours = {
        f"{variable}_{letter.upper()}": service["networks"]["inside"]["ipv4_address"] + ":8787"
        for variable, kind in kinds.items()
        for letter in "ab"
        for service in (services[f"{kind}-{letter}"],)
    }
    preset = set(re.findall(r"presetenv (\w+)", text))
    assert set(balancer["environment"]) == preset | set(ours)
    assert balancer["environment"] == balancer["environment"] | ours
    (mounted,) = balancer["volumes"]
    assert (CONTAINER / mounted.partition(":")[0]).resolve() == DEPLOY / "haproxy" / "rankscope.cfg"


def test_the_servers_of_nats_of_a_fleet_have_what_their_configuration_names() -> None:
    text = (DEPLOY / "nats" / "nats.conf").read_text()
    named = set(re.findall(r"\$(\w+)", text))
    services = composed("fleet.yaml")["services"]
    servers = [services[f"nats-{number}"] for number in range(3)]
    assert all(set(one["environment"]) == named for one in servers)
    urls = services["worker-a"]["environment"]["RANKSCOPE_SERVER_NATS_URL"].split(",")
    routes = re.findall(r"nats://([\w-]+):6222", text)
    assert [urlsplit(url).hostname for url in urls] == routes == ["nats-0", "nats-1", "nats-2"]
    program = Path(sys.executable).with_name("nats-server")
    for one in servers:
        assert (CONTAINER / one["volumes"][0].partition(":")[0]).resolve() == (
            DEPLOY / "nats" / "nats.conf"
        )
        checked = subprocess.run(
            [program, "-c", DEPLOY / "nats" / "nats.conf", "-t"], env=one["environment"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert checked.returncode == 0, checked.stderr
        assert urlsplit(urls[0]).password == one["environment"]["NATS_PASSWORD"]
