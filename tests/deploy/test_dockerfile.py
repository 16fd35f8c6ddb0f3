# SPDX-License-Identifier: Apache-2.0
"""The lines of the Dockerfile keep its promises. hadolint reads them too (make lint)."""

from __future__ import annotations

import os
import re
import shlex

from tests.deploy.conftest import ROOT

# Instruction and argument of each logical line.
INSTRUCTIONS = [
    tuple(line.split(None, 1))
    for line in re.sub(
        r"\\\n",
        " ",
        re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE),
    ).splitlines()
    if line.strip()
]


def of(kind: str) -> list[str]:
    return [argument.strip() for name, argument in INSTRUCTIONS if name == kind]


def test_the_base_has_no_default_and_every_stage_stands_on_it() -> None:
    assert of("ARG")[0] == "BASE_IMAGE"
    assert not [argument for argument in of("ARG") if "=" in argument]
    first, *others = of("FROM")
    assert first == "${BASE_IMAGE} AS base"
    assert others
    assert all(stage.startswith("base AS ") for stage in others)
    assert not re.search(r"sha256:[0-9a-f]", (ROOT / "Dockerfile").read_text())


def test_the_base_is_checked_before_anything_else_runs() -> None:
    assert of("RUN")[0].startswith('/opt/deploy/image/base.sh "${BASE_IMAGE}" "${VARIANT}" && ')


def test_every_step_is_a_script_that_is_there() -> None:
    scripts = set()
    for step in of("RUN"):
        for command in step.split("&&"):
            words = [word for word in shlex.split(command) if not word.startswith("--mount=")]
            name = words[0].removeprefix("/opt/")
            assert name.startswith("deploy/image/"), command
            assert os.access(ROOT / name, os.X_OK), name
            scripts.add(name)
    tested = (ROOT / "tests/deploy/test_image.py").read_text()
    assert all(f'"{name.removeprefix("deploy/")}"' in tested for name in scripts)


def test_it_does_not_run_as_root() -> None:
    assert of("USER") == ["10001:10001"]
    last_step = max(i for i, (name, _) in enumerate(INSTRUCTIONS) if name in ("RUN", "COPY"))
    user = next(i for i, (name, _) in enumerate(INSTRUCTIONS) if name == "USER")
    assert user > last_step


def test_health_and_entry_are_programs_of_the_image() -> None:
    (health,) = of("HEALTHCHECK")
    assert 'CMD ["/opt/deploy/image/health.sh"]' in health
    assert os.access(ROOT / "deploy/image/health.sh", os.X_OK)
    assert of("ENTRYPOINT") == ['["vllm", "serve"]']


def test_labels_name_pin_series_and_bill_of_materials() -> None:
    (labels,) = of("LABEL")
    found = dict(word.split("=", 1) for word in shlex.split(labels))
    assert found["vllm-routed-experts.pin"] == "${PIN}"
    assert found["vllm-routed-experts.series-fingerprint"] == "${SERIES_FINGERPRINT}"
    assert found["org.opencontainers.image.version"] == "${WHEEL_VERSION}"
    assert found["org.opencontainers.image.base.name"] == "${BASE_IMAGE}"
    directory, name = found["vllm-routed-experts.sbom"].rsplit("/", 1)
    assert f"--from=wheel /out/{name} {directory}/" in of("COPY")


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for argument in of("COPY"):
        *sources, _ = shlex.split(argument)
        for source in sources:
            if not argument.startswith("--from") and source != ".":
                for variant in ("cuda", "cpu"):
                    assert (ROOT / source.replace("${VARIANT}", variant)).exists(), source
                assert source.split("/")[0] not in ignored
    assert {".git", ".venv", "build/*"} <= set(ignored)
