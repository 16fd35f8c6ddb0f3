# SPDX-License-Identifier: Apache-2.0
"""The scripts of the Dockerfile do their work, and refuse bad input."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from tests.deploy.conftest import IMAGE, Stage
from tests.stub import Stub
from tests.tools.toy import VERSION, Toy, add_series, make_toy

NVCC = "Cuda compilation tools, release 13.0, V13.0.88\n"


# --- references -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "ubuntu:24.04",
        "name@sha256:" + "0" * 63,
        "name; true@sha256:" + "0" * 64,
        "--privileged@sha256:" + "0" * 64,
        IMAGE + "\nname",
    ],
)
def test_a_reference_without_a_digest_is_refused(stage: Stage, reference: str) -> None:
    done = stage.run("pinned-image.sh", IMAGE)
    assert (done.returncode, done.stdout) == (0, f"{IMAGE}\n")
    done = stage.run("pinned-image.sh", reference)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "name@sha256:<64 hexadecimal digits>" in done.stderr


# --- base.sh --------------------------------------------------------------------------------------


@pytest.fixture
def base(stage: Stage) -> Stage:
    """A base image that is accepted."""
    stage.program("uname", "x86_64\n")
    stage.program("getconf", "glibc 2.39\n")
    stage.program("nvcc", NVCC)
    return stage


@pytest.mark.parametrize(
    ("variant", "said"), [("cuda", "nvcc 13.0"), ("cpu", "gcc"), ("cuda", "no nvcc")]
)
def test_a_base_that_does_is_let_through(base: Stage, variant: str, said: str) -> None:
    if said == "no nvcc":
        base.program("nvcc", status=127)
    done = base.run("image/base.sh", IMAGE, variant, CUDA_VERSION="13.0.2")
    assert done.returncode == 0
    assert f"compiler: {said}" in done.stdout


@pytest.mark.parametrize(
    ("variant", "program", "out", "said"),
    [
        ("rocm", "uname", "x86_64\n", "cuda or cpu"),
        ("cuda", "getconf", "glibc 2.31\n", "glibc is too old"),
        ("cpu", "getconf", "glibc 2.27\n", "glibc is too old"),
        ("cuda", "nvcc", NVCC.replace("13.0", "12.9"), "not for CUDA 13"),
        ("cuda", "nvcc", "", "found:    no CUDA"),
        ("cuda", "uname", "riscv64\n", "no CUDA base wheel for its machine"),
        ("cpu", "uname", "aarch64\n", "no CPU base wheel for its machine"),
    ],
)
def test_a_base_that_cannot_carry_the_wheel_is_refused(
    base: Stage, variant: str, program: str, out: str, said: str
) -> None:
    base.program(program, out)
    done = base.run("image/base.sh", IMAGE, variant)
    assert done.returncode != 0
    assert said in done.stderr


# --- wheel.sh -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _project(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    toy = make_toy(tmp_path_factory.mktemp("image") / "project")
    add_series(toy)
    return toy


@pytest.fixture
def project(_project: Toy, stage: Stage) -> Toy:
    stage.program("uname", "x86_64\n")
    return _project.copy(stage.place / "project")


def labels(project: Toy, variant: str = "cuda") -> dict[str, str]:
    lines = project.do("wheel", "identity", "--variant", variant).splitlines()
    return dict(line.split("=", 1) for line in lines)


def make_wheel(stage: Stage, project: Toy, said: dict[str, str], variant: str = "cuda"):
    return stage.run(
        "image/wheel.sh",
        project.line,
        variant,
        str(stage.place / "out"),
        ROOT=str(project.root),
        PYTHON=sys.executable,
        **said,
    )


def test_the_wheel_is_built_proved_and_put_out_with_its_bill_of_materials(
    stage: Stage, project: Toy
) -> None:
    shutil.rmtree(project.tree)
    done = make_wheel(stage, project, labels(project))
    assert done.returncode == 0, done.stderr
    assert "verified: " in done.stdout
    out = stage.place / "out"
    (wheel,) = out.glob("*.whl")
    assert sorted(path.name for path in out.iterdir()) == ["sbom.cdx.json", wheel.name]
    bom = json.loads((out / "sbom.cdx.json").read_text())
    assert bom["metadata"]["component"]["version"] == f"{VERSION}+re.3"


@pytest.mark.parametrize(
    ("place", "variants"), [("wheels-cuda", ("cuda", "cuda-aarch64")), ("wheels", ("cpu",))]
)
def test_a_wheel_that_is_there_is_taken(
    stage: Stage, project: Toy, place: str, variants: tuple[str, ...]
) -> None:
    out = project.build / place
    for variant in variants:
        project.do("wheel", "build", "--variant", variant, "--out", str(out))
    done = make_wheel(stage, project, labels(project, variants[0]), variants[0])
    assert done.returncode == 0, done.stderr
    assert "wheel: " not in done.stdout
    (wheel,) = (stage.place / "out").glob("*.whl")
    assert wheel.read_bytes() == (out / wheel.name).read_bytes()


@pytest.mark.parametrize("name", ["PIN", "SERIES_FINGERPRINT", "WHEEL_VERSION", "PURPOSE"])
def test_labels_that_would_not_be_true_are_refused(stage: Stage, project: Toy, name: str) -> None:
    done = make_wheel(stage, project, labels(project) | {name: "untrue"})
    assert done.returncode == 1
    assert "the labels would not be true" in done.stderr
    assert not (stage.place / "out").exists()


# --- health.sh, dp-node.sh, ray-node.sh -----------------------------------------------------------
# Nodes that serve: tests/behaviour/test_layouts.py and test_ray.py.


@pytest.mark.parametrize(
    "place", [{}, {"RANK": "1", "HEAD": "127.0.0.1"}], ids=["server", "another rank"]
)
def test_a_node_is_as_healthy_as_the_server(stage: Stage, place: dict[str, str]) -> None:
    with Stub().running() as server:
        place = {**place, "TMPDIR": str(stage.place), "PORT": server.url.rpartition(":")[2]}
        assert stage.run("image/health.sh", **place).returncode == 0
        server.health = 503
        assert stage.run("image/health.sh", **place).returncode != 0
    # Now nobody listens.
    assert stage.run("image/health.sh", **place).returncode != 0


def test_a_server_is_dead_only_if_it_has_answered_before(stage: Stage) -> None:
    def alive(port: str) -> bool:
        return stage.run("image/health.sh", "alive", **place, PORT=port).returncode == 0

    place = {"TMPDIR": str(stage.place)}
    with Stub().running() as server:
        port = server.url.rpartition(":")[2]
        server.health = 503
        assert alive(port)
        server.health = 200
        assert alive(port)
        server.health = 503
        assert not alive(port)
    assert not alive(port)
    # A restart may keep what is in /tmp.
    for mark in stage.place.glob("answered-*"):
        mark.rename(mark.with_name("answered-1"))
    assert alive(port)


def test_another_node_finds_the_head_by_its_name(stage: Stage) -> None:
    stage.program("vllm")
    stage.program("getent", "10.0.0.1 STREAM vllm-0\n10.0.0.1 DGRAM\n")
    place = {"NODES": "2", "RANK": "1", "NODE": "10.0.0.2", "HEAD": "vllm-0.vllm"}
    assert stage.run("image/dp-node.sh", "some/model", **place).returncode == 0
    call = stage.calls()[-1]
    assert "--data-parallel-address=10.0.0.1" in call
    assert call[-2:] == ["--headless", "--data-parallel-start-rank=1"]


def test_a_head_without_an_address_is_told(stage: Stage) -> None:
    stage.program("vllm")
    stage.program("getent", status=2)
    place = {"NODES": "2", "RANK": "1", "NODE": "10.0.0.2", "HEAD": "vllm-0.vllm"}
    done = stage.run("image/dp-node.sh", "some/model", **place, PAUSE_S="0")
    assert done.returncode == 1
    assert "HEAD is vllm-0.vllm" in done.stderr
    assert all(call[0] == "getent" for call in stage.calls())


@pytest.mark.parametrize(
    ("script", "words", "place"),
    [
        ("dp-node.sh", ["some/model"], {"RANK": "0", "NODE": "10.0.0.1"}),
        ("dp-node.sh", ["some/model"], {"NODES": "2", "RANK": "0"}),
        ("ray-node.sh", ["head"], {}),
        ("ray-node.sh", [], {"NODE": "10.0.0.2"}),
    ],
)
def test_a_node_that_is_not_told_its_place_starts_nothing(
    stage: Stage, script: str, words: list[str], place: dict[str, str]
) -> None:
    for name in ("vllm", "ray"):
        stage.program(name)
    assert stage.run(f"image/{script}", *words, **place).returncode != 0
    assert stage.calls() == []
