# SPDX-License-Identifier: Apache-2.0
"""The cpu image, built by `make image` with buildah on a base that debootstrap made, and looked at
from outside while it serves. No Docker, no registry.

The base is a stand-in for a published one: Debian 12, with this machine's certificates. Isolation
is chroot: files, user and environment are the container's, processes and network the machine's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from harness import oracle, text
from harness.checkpoint import make_checkpoint
from harness.server import Server
from tests.real import PROJECT

pytestmark = pytest.mark.image

MADE = PROJECT.root / "build/image"
BASE, IMAGE = "localhost/stand-in", "localhost/vllm-routed-experts:cpu"
STORAGE = f"""\
[storage]
driver = "overlay"
graphroot = "{MADE}/storage"
runroot = "{MADE}/run"
"""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
USER = 10001
MODEL = "/models/small"
CHUNK = 64


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


@pytest.fixture(scope="module")
def record() -> Iterator[list[str]]:
    """Lines for the committed record; written when all tests are done."""
    lines: list[str] = []
    yield lines
    (MADE / "image.md").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module", autouse=True)
def storage() -> Iterator[None]:
    """Images of these tests alone, removed at the end."""
    MADE.mkdir(parents=True, exist_ok=True)
    (MADE / "storage.conf").write_text(STORAGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(MADE / "storage.conf"))
        yield
        do("buildah", "rm", "--all")
        do("buildah", "rmi", "--all", "--force")


@pytest.fixture(scope="module")
def base(storage: None) -> str:
    """A reference, with digest, to a base image of Debian 12."""
    root = MADE / "debian"
    if not root.exists():
        made = MADE / "debian.new"
        shutil.rmtree(made, ignore_errors=True)
        do("debootstrap", "--variant=minbase", "bookworm", str(made), timeout_s=600)
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
    """The built image.

    Attributes:
        base: what it stands on.
        revision: the commit that it was built from.
        config: what a container engine reads, as Docker writes it.
        size: as buildah says it.
        container: a container of it, not running.
    """

    base: str
    revision: str
    config: dict[str, Any]
    size: str
    container: str

    def command(self, *words: str, **environment: object) -> list[str]:
        """The command that runs words in the container, as the image's user."""
        variables = [f"--env={name}={value}" for name, value in environment.items()]
        volume = f"--volume={MADE / 'checkpoint'}:{MODEL}:ro"
        return [
            *("buildah", "run", "--isolation", "chroot", volume, *variables),
            *(self.container, "--", *words),
        ]


@pytest.fixture(scope="module")
def image(base: str, record: list[str]) -> Image:
    make_checkpoint(MADE / "checkpoint")
    began = time.monotonic()
    revision = do("git", "rev-parse", "HEAD")
    build = "buildah build --format docker --isolation chroot"
    arguments = ["VARIANT=cpu", f"BASE_IMAGE={base}", f"IMAGE={IMAGE}", f"BUILD={build}"]
    log = do("make", "image", *arguments, timeout_s=1500)
    took = time.monotonic() - began
    (MADE / "build.log").write_text(log)
    size = do("buildah", "images", "--format", "{{.Size}}", IMAGE)
    told = [line for line in log.splitlines() if re.match("(compiler|source|verified): ", line)]
    record += [
        "# The cpu image, built and run\n",
        f"`make image-test` on {os.cpu_count()} cores without Docker, `--isolation chroot`: "
        f"{do('buildah', '--version')}.",
        "The base is a stand-in that `debootstrap` made (Debian 12). Built in "
        f"{took:.0f} s, packages downloaded. Size {size}.\n",
        "```text",
        *told,
        "```\n",
    ]
    config = json.loads(do("buildah", "inspect", "--type", "image", IMAGE))["Docker"]["config"]
    return Image(base, revision, config, size, do("buildah", "from", IMAGE))


@pytest.fixture(scope="module")
def server(image: Image) -> Iterator[Server]:
    """The image's entry point on a small checkpoint, torch.compile and its compiler included."""
    program = image.command(*image.config["Entrypoint"], HF_HUB_OFFLINE=1)
    arguments = [
        "--no-enforce-eager",
        "--enable-return-routed-experts",
        "--routed-experts-opt-in",
        f"--max-num-batched-tokens={CHUNK}",
        "--shutdown-timeout=60",
    ]
    with Server(MODEL, MADE / "server.log", arguments, program=program) as made:
        yield made


def inside(server: Server) -> list[psutil.Process]:
    """The processes in the container, the entry point first."""
    tree = psutil.Process(server.pid).children(recursive=True)
    # buildah's own, outside and inside, run the entry point.
    own = [p for p in tree if not p.cmdline()[:1] or not p.cmdline()[0].startswith("buildah")]
    return sorted(own, key=lambda process: process.create_time())


def test_labels_name_what_was_built(image: Image, record: list[str]) -> None:
    command = [*("-m", "tools", "wheel", "identity", "--variant", "cpu")]
    identity = dict(
        line.split("=") for line in do(str(PROJECT.root / ".venv/bin/python"), *command).split("\n")
    )
    labels = image.config["Labels"]
    assert labels["vllm-routed-experts.pin"] == identity["PIN"]
    assert labels["vllm-routed-experts.series-fingerprint"] == identity["SERIES_FINGERPRINT"]
    assert labels["org.opencontainers.image.version"] == identity["WHEEL_VERSION"]
    assert labels["org.opencontainers.image.base.name"] == image.base
    assert labels["vllm-routed-experts.variant"] == "cpu"
    assert labels["org.opencontainers.image.revision"].removesuffix("-dirty") == image.revision
    told = ("vllm-routed-experts.", "org.opencontainers.image.")
    record += ["Labels:\n"]
    record += [
        f"- `{name}`: `{value}`" for name, value in sorted(labels.items()) if name.startswith(told)
    ]
    record.append("\nFrom outside:\n")


def test_bill_of_materials_is_of_the_installed_wheel(image: Image, record: list[str]) -> None:
    place = image.config["Labels"]["vllm-routed-experts.sbom"]
    bom = json.loads(do(*image.command("cat", place)))
    component = bom["metadata"]["component"]
    program = "import importlib.metadata as m; print(m.version('vllm'))"
    assert component["version"] == do(*image.command("python", "-c", program))
    record.append(
        f"- bill of materials: {component['name']} {component['version']}, "
        f"{len(bom['components'])} components"
    )


def test_nothing_of_the_build_is_left(image: Image) -> None:
    """Neither the sources nor git, nor lists of packages."""
    listing = do(*image.command("sh", "-c", "ls -A / /var/lib/apt/lists /opt; command -v git || :"))
    assert not {"src", "out", "wheel", "git"} & set(listing.split())
    assert not [name for name in listing.split() if "Packages" in name]


def test_every_process_is_the_images_user(server: Server, record: list[str]) -> None:
    processes = inside(server)
    assert "serve" in processes[0].cmdline()
    assert {p.uids().real for p in processes} == {p.gids().real for p in processes} == {USER}
    record.append(f"- {len(processes)} processes serve, all as user {USER}")


def test_rows_over_http_are_the_oracles(server: Server, record: list[str]) -> None:
    checkpoint = MADE / "checkpoint"
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    prompts = text.prompts(lambda passage: tokenizer.encode(passage).ids, CHUNK)
    total = oracle.Comparison()
    for wave in sorted({prompt.wave for prompt in prompts}):
        with ThreadPoolExecutor() as pool:
            answers = pool.map(
                lambda prompt: server.generate(
                    prompt.token_ids,
                    max_tokens=prompt.max_tokens,
                    ignore_eos=True,
                    repetition_penalty=1.3,
                    extra_args={"return_routed_experts": True},
                ),
                [prompt for prompt in prompts if prompt.wave == wave],
            )
        for answer in answers:
            routes = oracle.route(checkpoint, answer.prompt + answer.token_ids)
            assert answer.rows is not None
            assert answer.start == 0
            total += oracle.compare(answer.rows, routes)
    assert total.agree == total.rows > 1000, total.disagreements[0]
    record.append(f"- rows over HTTP: {total.agree:,} of {total.rows:,} are those of transformers")


def test_silent_request_has_no_rows(server: Server) -> None:
    assert server.generate([5, 6, 7], max_tokens=3).rows is None


def test_health_check_asks_the_server(image: Image, server: Server, record: list[str]) -> None:
    kind, *words = image.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    do(*image.command(*words, PORT=server.port))
    with pytest.raises(AssertionError, match="Connection refused"):
        do(*image.command(*words, PORT=1))
    record.append("- the health check passes, and fails at a port where nothing listens")


def test_sigterm_lets_the_answer_under_way_end(server: Server, record: list[str]) -> None:
    """The entry point alone gets the signal, as from `docker stop`. Last: it ends the server."""
    processes = inside(server)
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 900, "ignore_eos": True, "temperature": 0.0},
        "stream": True,
    }
    url = server.url + "/inference/v1/generate"
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=60) as reply:
        events = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        tokens = [next(events)]
        processes[0].send_signal(signal.SIGTERM)
        began = time.monotonic()
        tokens += events
    assert tokens.pop() == "[DONE]"
    assert sum(len(json.loads(e)["choices"][0]["token_ids"]) for e in tokens) == 900
    answered = time.monotonic() - began
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    took = time.monotonic() - began
    record.append(
        f"- SIGTERM, `--shutdown-timeout=60`: the answer under way was whole after "
        f"{answered:.1f} s, no process was left after {took:.1f} s"
    )
