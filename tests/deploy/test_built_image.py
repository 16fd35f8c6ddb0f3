# SPDX-License-Identifier: Apache-2.0
"""The images, built by `make image` with buildah on bases that debootstrap made, and looked at from
outside: the cpu image while it serves, the cuda image up to where it wants a GPU. No Docker, no
registry.

The bases are stand-ins for published ones, with this machine's certificates: Debian 12, and Ubuntu
24.04 with a program that says CUDA's version as its compiler. `contain.sh` runs the image: root is
read-only, and files, user, environment and processes are the container's.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from harness import oracle
from harness.checkpoint import make_checkpoint
from harness.lines import LINES
from harness.server import Server
from tests.real import PROJECT

# Building takes minutes, more on a busy machine.
pytestmark = [pytest.mark.image, pytest.mark.timeout(1800)]

MADE = PROJECT.root / "build/image"
BASE = "localhost/stand-in"
STORAGE = f"""\
[storage]
driver = "overlay"
graphroot = "{MADE}/storage"
runroot = "{MADE}/run"
"""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
CONTAIN = PROJECT.root / "tests/deploy/contain.sh"
USER = 10001
MODEL = "/models/small"
CHUNK = 64
LONG = 300
NVCC = "Cuda compilation tools, release 13.0, V13.0.88"
# Of the release's own package: debootstrap trusts what it signs. Debian 12 has no package of it.
KEYRING = "80a36b0a6de2f69f49d2df75ef473ccde121e9e190b9ea01d20a4f63778d5c31"

BOTH = pytest.mark.parametrize("image", ["cpu", "cuda"], indirect=True)
CPU = pytest.mark.parametrize("image", ["cpu"], indirect=True)
CUDA = pytest.mark.parametrize("image", ["cuda"], indirect=True)


def do(*command: str, timeout_s: float = 120) -> str:
    done = subprocess.run(
        command,
        cwd=PROJECT.root,
        env={**os.environ, "MAKEFLAGS": "", "MAKELEVEL": "0"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def storage() -> Iterator[None]:
    """Images of these tests alone, removed at the end."""
    MADE.mkdir(parents=True, exist_ok=True)
    (MADE / "storage.conf").write_text(STORAGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(MADE / "storage.conf"))
        yield
        do("buildah", "rm", "--all", timeout_s=600)
        do("buildah", "rmi", "--all", "--force", timeout_s=600)


def debian(root: Path) -> None:
    do("debootstrap", "--variant=minbase", "bookworm", str(root), timeout_s=600)


def ubuntu(root: Path) -> None:
    """Fetch the packages, and run nothing of them before their signature is checked."""
    command = ["debootstrap", "--variant=minbase", "--components=main,universe"]
    # Its default mirror, and the script of all its releases.
    release = ["noble", str(root), "", "gutsy"]
    do(*command, "--download-only", "--no-check-gpg", *release, timeout_s=600)
    (package,) = root.glob("var/cache/apt/archives/ubuntu-keyring_*.deb")
    do("dpkg-deb", "--extract", str(package), str(root / "keys"))
    keyring = root / "keys/usr/share/keyrings/ubuntu-archive-keyring.gpg"
    assert hashlib.sha256(keyring.read_bytes()).hexdigest() == KEYRING
    do(*command, f"--keyring={keyring}", *release, timeout_s=600)
    shutil.rmtree(root / "keys")
    nvcc = root / "usr/local/cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho '{NVCC}'\n")
    nvcc.chmod(0o755)


BASES = {
    "cpu": (debian, "Debian 12"),
    "cuda": (
        ubuntu,
        "Ubuntu 24.04, and instead of CUDA a program that says the compiler's version",
    ),
}


def make_base(variant: str) -> str:
    """Returns a reference, with digest, to the base image of a variant."""
    make, _ = BASES[variant]
    root = MADE / make.__name__
    if not root.exists():
        made = root.with_suffix(".new")
        shutil.rmtree(made, ignore_errors=True)
        make(made)
        made.rename(root)
    container = do("buildah", "from", "scratch")
    do("buildah", "add", container, str(root), "/")
    if CERTIFICATES.exists():
        # Packages come the same way as to this machine.
        here = "/etc/ssl/stand-in.crt"
        do("buildah", "add", container, str(CERTIFICATES), here)
        for name in ("SSL_CERT_FILE", "PIP_CERT"):
            do("buildah", "config", "--env", f"{name}={here}", container)
    do("buildah", "commit", "--rm", container, BASE)
    return f"{BASE}@{do('buildah', 'images', '--format', '{{.Digest}}', BASE)}"


@dataclass(frozen=True)
class Image:
    """The built image, on a base."""

    variant: str
    base: str
    revision: str  # the commit that it was built from
    config: dict[str, Any]  # what a container engine reads, as Docker writes it
    root: str  # its files

    def command(self, *words: str, **environment: object) -> list[str]:
        """The command that runs words in a container of its own, as the image's user.

        A line that needs the machine's stand-ins on a CPU has them: the image for tests has none.
        """
        line = LINES[PROJECT.line]
        cache = MADE / "cache"
        cache.mkdir(exist_ok=True)
        os.chown(cache, USER, USER)
        volumes = [f"{cache}:/home/vllm/.cache", f"{MADE / 'checkpoint'}:{MODEL}:ro"]
        volumes += [f"{folder}:/stand_ins/{folder.name}:ro" for folder in line.packages]
        variables = dict(variable.split("=", 1) for variable in self.config["Env"])
        if self.variant == "cpu":
            variables |= line.environment
            variables |= {"PYTHONPATH": ":".join(f"/stand_ins/{f.name}" for f in line.packages)}
        variables |= {name: str(value) for name, value in environment.items()}
        settings = [f"{name}={value}" for name, value in variables.items()]
        return [str(CONTAIN), self.root, *volumes, "--", *settings, *words]

    def command_beside(self, process: int, *words: str, **environment: object) -> list[str]:
        """The command that runs words in the container of a process, as `docker exec` does."""
        enter = ["nsenter", f"--target={process}", "--mount", "--pid", "--root"]
        user = [f"--setuid={USER}", f"--setgid={USER}"]
        variables = [f"{name}={value}" for name, value in environment.items()]
        return [*enter, *user, "env", "-i", *self.config["Env"], *variables, *words]


@pytest.fixture(scope="module")
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    """The image of a variant. Its record is written after all tests, if none failed."""
    variant = request.param
    base, name = make_base(variant), f"localhost/vllm-routed-experts:{PROJECT.line}-{variant}"
    make_checkpoint(MADE / "checkpoint")
    began = time.monotonic()
    revision = do("git", "rev-parse", "HEAD")
    build = "buildah build --format docker --isolation chroot"
    arguments = [f"ON={PROJECT.line}", f"VARIANT={variant}", f"BASE_IMAGE={base}"]
    arguments += [f"IMAGE={name}", f"BUILD={build}"]
    log = do("make", "image", *arguments, timeout_s=1500)
    took = time.monotonic() - began
    (MADE / f"build-{variant}.log").write_text(log)
    config = json.loads(do("buildah", "inspect", "--type", "image", name))["Docker"]["config"]
    root = do("buildah", "mount", do("buildah", "from", name))
    yield Image(variant, base, revision, config, root)
    size = do("buildah", "images", "--format", "{{.Size}}", name)
    suffix = "" if variant == "cpu" else "-cuda"
    record = [
        f"# The {variant} image, built and looked at from outside\n",
        f"`make image-test{suffix} ON={PROJECT.line}` on {os.cpu_count()} cores without Docker, "
        f"{datetime.date.today()}: all tests passed.\n",
        f"- built in {took / 60:.0f} minutes, packages downloaded: {do('buildah', '--version')}",
        f"- base: a stand-in that `debootstrap` made, {BASES[variant][1]}",
        f"- size: {size}",
        *(f"- {text}" for text in re.findall("^(?:compiler|source|verified): .*", log, re.M)),
        *(f"- `{name}`: `{value}`" for name, value in sorted(config["Labels"].items())),
    ]
    if not request.session.testsfailed:
        (MADE / f"image-test{suffix}.md").write_text("\n".join(record) + "\n")


def serving(image: Image, **options: Any) -> Server:
    """The image's entry point on a small checkpoint, torch.compile and its compiler included."""
    arguments = [
        "--no-enforce-eager",
        "--enable-return-routed-experts",
        "--routed-experts-opt-in",
        f"--max-num-batched-tokens={CHUNK}",
        "--shutdown-timeout=120",
    ]
    program = image.command(*image.config["Entrypoint"], HF_HUB_OFFLINE=1)
    return Server(MODEL, MADE / "server.log", arguments, program=program, **options)


@pytest.fixture(scope="module")
def server(image: Image) -> Iterator[Server]:
    with serving(image) as made:
        yield made


def inside(server: Server) -> list[psutil.Process]:
    """The processes in the container, the entry point first."""
    (outside,) = psutil.Process(server.pid).children()  # unshare
    return sorted(outside.children(recursive=True), key=lambda process: process.create_time())


@BOTH
def test_labels_name_what_was_built(image: Image) -> None:
    command = ["-m", "tools", "wheel", "identity", "--on", PROJECT.line]
    command += ["--variant", image.variant]
    identity = dict(line.split("=") for line in do(sys.executable, *command).split("\n"))
    labels = image.config["Labels"]
    assert labels["vllm-routed-experts.pin"] == identity["PIN"]
    assert labels["vllm-routed-experts.series-fingerprint"] == identity["SERIES_FINGERPRINT"]
    assert labels["org.opencontainers.image.version"] == identity["WHEEL_VERSION"]
    assert labels["org.opencontainers.image.base.name"] == image.base
    assert labels["vllm-routed-experts.line"] == PROJECT.line
    assert labels["vllm-routed-experts.variant"] == image.variant
    assert labels["org.opencontainers.image.revision"].removesuffix("-dirty") == image.revision


@BOTH
def test_an_image_for_tests_alone_is_named_so(image: Image) -> None:
    tests_only = PROJECT.pin.wheels[image.variant].tests_only
    purpose = "tests-never-published" if tests_only else "serving"
    assert image.config["Labels"]["vllm-routed-experts.purpose"] == purpose
    assert ("tests" in image.config["Labels"]["org.opencontainers.image.version"]) == tests_only


@BOTH
def test_bill_of_materials_is_of_the_installed_wheel(image: Image) -> None:
    place = image.config["Labels"]["vllm-routed-experts.sbom"]
    bom = json.loads(do(*image.command("cat", place)))
    component = bom["metadata"]["component"]
    program = "import importlib.metadata as m; print(m.version('vllm'))"
    assert component["version"] == do(*image.command("python", "-c", program))


@BOTH
def test_packages_are_those_of_the_lock(image: Image) -> None:
    """The layers hold every package of the lock at its version, the wheel, and no other package."""
    lock = PROJECT.root / "requirements" / PROJECT.line / f"{image.variant}.txt"
    locked = dict(re.findall(r"^([a-z0-9][^ =\[]*)(?:\[.*?\])?==([^ ]+)", lock.read_text(), re.M))
    wheel = image.config["Labels"]["org.opencontainers.image.version"]
    program = (
        "import importlib.metadata as m, json, re\n"
        "names = {re.sub('[-_.]+', '-', d.name).lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps(names))"
    )
    installed = json.loads(do(*image.command("/opt/vllm/bin/python", "-I", "-c", program)))
    installed.pop("pip", None)  # `python -m venv` brings it; it installed uv
    assert installed == {**locked, "vllm": wheel}


@BOTH
def test_nothing_of_the_build_is_left(image: Image) -> None:
    """Neither the sources nor git, nor lists of packages."""
    listing = do(*image.command("sh", "-c", "ls -A / /var/lib/apt/lists /opt; command -v git || :"))
    assert not {"src", "out", "wheel", "git"} & set(listing.split())
    assert not [name for name in listing.split() if "Packages" in name]


@CPU
def test_every_process_is_the_images_user(server: Server) -> None:
    processes = inside(server)
    assert "serve" in processes[0].cmdline()
    assert {p.uids().real for p in processes} == {p.gids().real for p in processes} == {USER}


@CPU
def test_the_root_is_read_only(image: Image, server: Server) -> None:
    """The server has started all the same: what it writes goes to /tmp and to the cache."""
    process = inside(server)[0].pid
    for place in ("/", "/opt/vllm", "/home/vllm", "/usr/share"):
        with pytest.raises(AssertionError, match="Read-only file system"):
            do(*image.command_beside(process, "touch", f"{place}/x"))
    for place in ("/tmp", "/home/vllm/.cache"):
        do(*image.command_beside(process, "touch", f"{place}/x"))


@CPU
def test_rows_over_http_are_the_oracles(server: Server) -> None:
    for length in (1, 40, 3 * CHUNK + 5):
        prompt = np.random.default_rng(length).integers(4, 700, length).tolist()
        asks = {"extra_args": {"return_routed_experts": True}}
        answer = server.generate(prompt, max_tokens=40, ignore_eos=True, **asks)
        routes = oracle.route(MADE / "checkpoint", answer.prompt + answer.token_ids)
        comparison = oracle.compare(answer.rows, routes)
        assert answer.start == 0
        assert comparison.agree == comparison.rows == length + 39, comparison.disagreements[0]


@CPU
def test_silent_request_has_no_rows(server: Server) -> None:
    assert not len(server.generate([5, 6, 7], max_tokens=3).rows)


@CPU
def test_health_check_asks_the_server(image: Image, server: Server) -> None:
    kind, *words = image.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    process = inside(server)[0].pid
    with pytest.raises(AssertionError, match="Connection refused"):
        do(*image.command_beside(process, *words, PORT=1))
    # It has never answered there: it could be loading.
    do(*image.command_beside(process, *words, "alive", PORT=1))
    do(*image.command_beside(process, *words, PORT=server.port))
    with pytest.raises(AssertionError, match="Connection refused"):
        do(*image.command_beside(process, *words, "alive", PORT=1))


@CPU
def test_sigterm_lets_the_answer_under_way_end(server: Server) -> None:
    """Process 1 alone gets the signal, as from `docker stop`. It ends the server."""
    processes = inside(server)
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": LONG, "ignore_eos": True, "temperature": 0.0},
        "stream": True,
    }
    url = server.url + "/inference/v1/generate"
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=120) as reply:
        events = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        tokens = [next(events)]
        processes[0].send_signal(signal.SIGTERM)
        tokens += events
    assert tokens.pop() == "[DONE]"
    assert sum(len(json.loads(e)["choices"][0]["token_ids"]) for e in tokens) == LONG
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


@CPU
def test_a_server_that_loads_is_let_alone_and_one_that_is_dead_ends(image: Image) -> None:
    words = image.config["Healthcheck"]["Test"][1:]
    seen: list[tuple[int, int]] = []

    def ask(*more: str) -> int:
        command = image.command_beside(inside(started)[0].pid, *words, *more, PORT=started.port)
        return subprocess.run(command, capture_output=True, timeout=60).returncode

    def while_it_loads(seconds: float, line: str) -> None:
        if line and not seen:
            seen.append((ask(), ask("alive")))

    started = serving(image, progress=while_it_loads)
    with started:
        assert seen == [(1, 0)]
        assert (ask(), ask("alive")) == (0, 0)
        first, *others = inside(started)
        (engine,) = [process for process in others if "EngineCore" in process.cmdline()[0]]
        engine.kill()
        # What supervises the container starts another.
        psutil.wait_procs([first], timeout=60)
        assert not first.is_running()


@CUDA
def test_what_clusters_need_is_there(image: Image) -> None:
    """Ray starts, and NIXL makes an agent whose backend is UCX."""
    do(*image.command("ray", "--version"))
    program = (
        "from nixl._api import nixl_agent, nixl_agent_config\n"
        "print(*nixl_agent('a', nixl_agent_config(backends=['UCX'])).backends)"
    )
    assert do(*image.command("python", "-c", program)).endswith("UCX")


@CUDA
def test_server_starts_up_to_where_it_wants_a_gpu(image: Image) -> None:
    """As its user, with the wheel's compiled modules loaded. Kernels are not run."""
    words = image.command(*image.config["Entrypoint"], MODEL, HF_HUB_OFFLINE=1)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "Failed to infer device type" in done.stderr
