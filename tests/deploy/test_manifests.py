# SPDX-License-Identifier: Apache-2.0
"""Files and commands for Docker, Ray and Kubernetes: refusals, schemas, and whether what one part
names is in another."""

from __future__ import annotations

import re
import shlex
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.conftest import DEPLOY, IMAGE, Stage


def documents(stage: Stage, *more: str) -> list[dict[str, Any]]:
    done = stage.run("kubernetes.sh", IMAGE, "some/model", *more)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def pods(stage: Stage) -> list[dict[str, Any]]:
    """The pod of the server on one node, and the pods of the server over several nodes."""
    made = [*documents(stage), *documents(stage, "nodes")]
    kinds = ("Deployment", "StatefulSet")
    return [d["spec"]["template"] for d in made if d["kind"] in kinds]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return only


def argument(found: dict[str, Any], name: str) -> str:
    (value,) = (a.split("=")[1] for a in found["args"] if a.startswith(f"--{name}="))
    return value


# --- Kubernetes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("name:tag", "some/model"), 1),
        ((IMAGE, "some/model", "all"), 2),
        ((IMAGE, ""), 1),
        ((IMAGE, "a|b"), 1),
        ((IMAGE, "x\n- --trust-remote-code"), 1),
    ],
    ids=["image without a digest", "unknown manifest", "no model", "bar", "line"],
)
def test_bad_words_print_no_manifest(stage: Stage, words: tuple[str, ...], status: int) -> None:
    done = stage.run("kubernetes.sh", *words)
    assert (done.returncode, done.stdout) == (status, "")


@pytest.mark.parametrize("which", [(), ("nodes",)])
@pytest.mark.parametrize("version", ["1.31", "1.35"])
def test_manifests_meet_the_schemas_of_kubernetes(
    stage: Stage, which: tuple[str, ...], version: str
) -> None:
    for document in documents(stage, *which):
        kubernetes_validate.validate(document, version, strict=True)


def test_each_pod_has_what_its_server_needs(stage: Stage) -> None:
    """A GPU for each worker, the user and the scripts of the image, and mounted volumes."""
    user = (DEPLOY.parent / "Dockerfile").read_text().split("USER ")[1].split(":")[0]
    for pod in pods(stage):
        found, spec = container(pod), pod["spec"]
        assert (found["image"], found["args"][0]) == (IMAGE, "some/model")
        size = argument(found, "tensor-parallel-size")
        assert found["resources"]["limits"]["nvidia.com/gpu"] == size
        assert spec["securityContext"]["runAsUser"] == int(user)
        mounts = {mount["name"] for mount in found["volumeMounts"]}
        assert {volume["name"] for volume in spec["volumes"]} <= mounts
        probes = [found[probe]["exec"]["command"] for probe in ("readinessProbe", "livenessProbe")]
        for script in [*(command[0] for command in probes), *found.get("command", ())]:
            assert (DEPLOY / script.removeprefix("/opt/deploy/")).exists()


def test_a_server_that_loads_is_not_restarted(stage: Stage) -> None:
    """Nothing limits how long it loads; `health.sh alive` fails only if it has answered before."""
    for pod in pods(stage):
        found = container(pod)
        assert "startupProbe" not in found
        assert found["livenessProbe"]["exec"]["command"][1:] == ["alive"]
        assert found["readinessProbe"]["exec"]["command"][1:] == []


def test_a_server_can_write_what_it_must_to_a_read_only_container(stage: Stage) -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["vllm"]
    assert compose["read_only"]
    # Docker's own default would not let it run what it compiles.
    assert compose["tmpfs"] == ["/tmp:exec"]
    assert compose["volumes"] == ["cache:/home/vllm/.cache"]
    for pod in pods(stage):
        found = container(pod)
        assert found["securityContext"]["readOnlyRootFilesystem"]
        places = {mount["mountPath"] for mount in found["volumeMounts"]}
        assert places == {"/tmp", "/dev/shm", "/home/vllm/.cache"}


def test_a_pod_ends_after_its_answers(stage: Stage) -> None:
    """Kubernetes waits longer than the pause before SIGTERM and vLLM's own limit together."""
    for pod in pods(stage):
        found = container(pod)
        _, pause = found["lifecycle"]["preStop"]["exec"]["command"]
        waits = int(pause) + int(argument(found, "shutdown-timeout"))
        assert pod["spec"]["terminationGracePeriodSeconds"] > waits


def test_services_find_their_pods(stage: Stage) -> None:
    made = {document["kind"]: document for document in documents(stage)}
    pod = made["Deployment"]["spec"]["template"]
    service = made["Service"]["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] in {p["name"] for p in container(pod)["ports"]}


def test_nodes_know_each_other(stage: Stage) -> None:
    made = documents(stage, "nodes")
    (nodes,) = (d for d in made if d["kind"] == "StatefulSet")
    head, clients = (d for d in made if d["kind"] == "Service")
    name, service = nodes["metadata"]["name"], head["metadata"]["name"]
    found = container(nodes["spec"]["template"])["env"]
    settings = {v["name"]: v.get("value", v.get("valueFrom")) for v in found}
    assert settings["NODES"] == str(nodes["spec"]["replicas"])
    assert settings["HEAD"] == f"{name}-0.{service}"
    assert service == nodes["spec"]["serviceName"]
    assert clients["spec"]["selector"] == {"statefulset.kubernetes.io/pod-name": f"{name}-0"}


# --- Ray ------------------------------------------------------------------------------------------


def test_the_head_is_run_with_gpus_and_its_keys_are_not_on_the_command_line(stage: Stage) -> None:
    stage.program("docker")
    environment = {"IMAGE": IMAGE, "NODE": "10.0.0.1", "INFINIBAND": "/nonexistent"}
    environment["VLLM_API_KEY"] = "secret"
    done = stage.run("ray.sh", "head", "some/model", "--tensor-parallel-size=8", **environment)
    assert done.returncode == 0, done.stderr
    (call,) = stage.calls()
    at = call.index(IMAGE)
    assert call[at - 2 : at] == ["--entrypoint", "/opt/deploy/image/ray-node.sh"]
    assert call[at + 1 :] == ["head", "some/model", "--tensor-parallel-size=8"]
    for words in ("--network host", "--gpus all", "--shm-size 16g", "--env NODE=10.0.0.1"):
        assert words in " ".join(call)
    assert "--device" not in call
    assert "secret" not in " ".join(call)
    assert stage.environment()["VLLM_API_KEY"] == "secret"


def test_a_worker_knows_its_head(stage: Stage) -> None:
    stage.program("docker")
    environment = {"IMAGE": IMAGE, "NODE": "10.0.0.2", "HEAD": "10.0.0.1"}
    stage.run("ray.sh", "worker", **environment, INFINIBAND=str(stage.place))
    (call,) = stage.calls()
    for words in (
        "--env ROLE=worker",
        "--env HEAD=10.0.0.1",
        "--env RAY_ADDRESS=10.0.0.1:6379",
        f"--device {stage.place}",
    ):
        assert words in " ".join(call)


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (("head", "m"), {"NODE": "10.0.0.1"}),
        (("head", "m"), {"NODE": "10.0.0.1", "IMAGE": "name:tag"}),
        (("head", "m"), {"IMAGE": IMAGE}),
        (("worker",), {"IMAGE": IMAGE, "NODE": "10.0.0.2"}),
        (("other",), {"IMAGE": IMAGE, "NODE": "10.0.0.2"}),
        ((), {"IMAGE": IMAGE, "NODE": "10.0.0.2"}),
    ],
)
def test_a_node_that_is_not_told_enough_is_not_run(
    stage: Stage, words: tuple[str, ...], environment: dict[str, str]
) -> None:
    stage.program("docker")
    assert stage.run("ray.sh", *words, **environment).returncode != 0
    assert stage.calls() == []


# --- all of them ----------------------------------------------------------------------------------


def test_every_flag_is_one_of_the_installed_vllm(stage: Stage) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["vllm"]["command"]
    one, several = (container(pod)["args"] for pod in pods(stage))
    text = (DEPLOY / "README.md").read_text().replace("\\\n", " ")
    ray = next(line for line in text.splitlines() if "ray.sh head" in line)
    lines = {
        "compose": [re.sub(r"\$\{.*\}", "1", word) for word in compose],
        "kubernetes": one,
        "nodes": [*several, "--headless", "--data-parallel-start-rank=1"],
        "ray": ["--distributed-executor-backend", "ray", *shlex.split(ray.split("head", 1)[1])],
    }
    for name, words in lines.items():
        parser = make_arg_parser(FlexibleArgumentParser())
        # Complete names: the parser would accept the beginning of a flag.
        flags = {word.split("=")[0] for word in words if word.startswith("--")}
        assert flags <= parser._option_string_actions.keys(), name
        parsed = parser.parse_args(words)
        assert parsed.enable_return_routed_experts, name
        assert parsed.routed_experts_opt_in, name
