"""The image and the compose file of `deploy/container`: built by a real builder, and run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def composed() -> dict[str, Any]:
    """Return the compose file, its variables put in."""
    given = {"RANKSCOPE_NAME": "rankscope.example", "RANKSCOPE_TOKEN": "t" * 20,
             "POSTGRES_PASSWORD": "p" * 20}  # fmt: skip
    text = (CONTAINER / "compose.yaml").read_text()
    filled = re.sub(r"\$\{(\w+)(?::\?[^}]*)?\}", lambda found: given[found[1]], text)
    found: dict[str, Any] = yaml.safe_load(filled)
    return found


def test_the_servers_of_the_compose_file_start_with_their_settings() -> None:
    services = composed()["services"]
    address = services["balancer"]["networks"]["inside"]["ipv4_address"]
    known = {setting.variable for setting in SETTINGS}
    for name in ("server-a", "server-b"):
        environ = services[name]["environment"]
        assert {key for key in environ if key.startswith("RANKSCOPE_")} <= known
        settings = parse([], environ | {"RANKSCOPE_SERVER_HOST": "0.0.0.0"})
        assert settings.proxies() == (f"{address}/32",)
        assert settings.host_names() == ("rankscope.example",)
        assert services[name]["read_only"]
        assert services[name]["cap_drop"] == ["ALL"]
        assert (
            int(services[name]["stop_grace_period"].removesuffix("s")) > settings.shutdown_seconds
        )
    assert services["server-b"]["depends_on"] == {"server-a": {"condition": "service_healthy"}}


def test_the_balancer_of_the_compose_file_has_the_variables_of_its_configuration() -> None:
    services = composed()["services"]
    balancer = services["balancer"]
    text = (DEPLOY / "haproxy" / "rankscope.cfg").read_text()
    assert set(balancer["environment"]) == set(re.findall(r"presetenv (\w+)", text))
    for letter in "ab":
        server = services[f"server-{letter}"]["networks"]["inside"]["ipv4_address"]
        assert balancer["environment"][f"SERVER_{letter.upper()}"] == f"{server}:8787"
    (mounted,) = balancer["volumes"]
    assert (CONTAINER / mounted.partition(":")[0]).resolve() == DEPLOY / "haproxy" / "rankscope.cfg"
