# SPDX-License-Identifier: Apache-2.0
"""Files and commands for Docker, Ray and Kubernetes: digests, probes, memory, existing flags."""

from __future__ import annotations

import re
import shlex
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.conftest import DEPLOY, IMAGE, Stage

COMPOSE = (DEPLOY / "compose.yaml").read_text()


def substitute(text: str, **values: str) -> str:
    """Put values in the place of ${NAME}, ${NAME:-default}, ${NAME:?message}, as Compose does."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match[1], match[2], match[3]
        if values.get(name):
            return values[name]
        if kind == ":?":
            raise ValueError(f"{name}: {rest}")
        return rest or ""

    return re.sub(r"\$\{(\w+)(?:(:[?-])([^}]*))?\}", value, text)


SETTINGS = {
    "IMAGE_NAME": IMAGE.split("@")[0],
    "IMAGE_SHA256": IMAGE.split(":")[-1],
    "MODEL": "some/model",
    "VLLM_API_KEY": "a key",
}


def service() -> dict:
    return yaml.safe_load(substitute(COMPOSE, **SETTINGS))["services"]["vllm"]


def documents(stage: Stage, *more: str) -> list[dict]:
    done = stage.run("kubernetes.sh", IMAGE, "some/model", *more)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def manifest(stage: Stage) -> dict[str, dict]:
    return {document["kind"]: document for document in documents(stage)}


def container(stage: Stage) -> dict:
    (only,) = manifest(stage)["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


def nodes(stage: Stage) -> dict:
    """The pods of the server over several nodes."""
    (only,) = [d for d in documents(stage, "nodes") if d["kind"] == "StatefulSet"]
    return only["spec"]


def node(stage: Stage) -> dict:
    (only,) = nodes(stage)["template"]["spec"]["containers"]
    return only


def settings(of: dict) -> dict[str, Any]:
    """Variables of a container, with their values or where these come from."""
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in of["env"]}


# --- compose --------------------------------------------------------------------------------------


def test_compose_puts_the_image_together_with_its_digest() -> None:
    assert service()["image"] == IMAGE


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_compose_wants_every_setting(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        substitute(COMPOSE, **{k: v for k, v in SETTINGS.items() if k != name})


def test_compose_opens_its_port_to_the_machine_alone() -> None:
    assert all(port.startswith("127.0.0.1:") for port in service()["ports"])


# --- Kubernetes -----------------------------------------------------------------------------------


def test_the_manifest_names_image_and_model(stage: Stage) -> None:
    found = container(stage)
    assert found["image"] == IMAGE
    assert found["args"][0] == "some/model"


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


def test_the_pod_gets_traffic_only_when_it_answers(stage: Stage) -> None:
    found = container(stage)
    (port,) = found["ports"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert found[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    startup = found["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 30 * 60
    service = manifest(stage)["Service"]["spec"]
    labels = manifest(stage)["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert service["ports"][0]["targetPort"] == port["name"]


def test_the_pod_has_a_gpu_for_each_worker_and_shared_memory(stage: Stage) -> None:
    found = container(stage)
    size = next(a for a in found["args"] if a.startswith("--tensor-parallel-size="))
    assert found["resources"]["limits"]["nvidia.com/gpu"] == size.split("=")[1]
    volumes = manifest(stage)["Deployment"]["spec"]["template"]["spec"]["volumes"]
    mounts = {mount["mountPath"]: mount["name"] for mount in found["volumeMounts"]}
    (memory,) = [volume for volume in volumes if volume["name"] == mounts["/dev/shm"]]
    assert memory["emptyDir"]["medium"] == "Memory"
    assert {volume["name"] for volume in volumes} == set(mounts.values())


def test_the_pod_runs_as_the_images_user_without_rights(stage: Stage) -> None:
    pod = manifest(stage)["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    user = (DEPLOY.parent / "Dockerfile").read_text().split("USER ")[1].split(":")[0]
    assert pod["securityContext"]["runAsUser"] == int(user)
    own = container(stage)["securityContext"]
    assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_a_pod_ends_after_its_answers(stage: Stage) -> None:
    """Kubernetes waits longer than the pause before SIGTERM and vLLM's own limit together."""
    for pod in (manifest(stage)["Deployment"]["spec"]["template"], nodes(stage)["template"]):
        (found,) = pod["spec"]["containers"]
        _, pause = found["lifecycle"]["preStop"]["exec"]["command"]
        (limit,) = (a for a in found["args"] if a.startswith("--shutdown-timeout="))
        waits = int(pause) + int(limit.split("=")[1])
        assert pod["spec"]["terminationGracePeriodSeconds"] > waits


def test_secrets_are_not_in_the_manifests(stage: Stage) -> None:
    for found in (container(stage), node(stage)):
        assert settings(found)["VLLM_API_KEY"] == {
            "secretKeyRef": {"name": "vllm", "key": "api-key"}
        }
        token = {"name": "vllm", "key": "hf-token", "optional": True}
        assert settings(found)["HF_TOKEN"] == {"secretKeyRef": token}


def test_nodes_know_each_other(stage: Stage) -> None:
    found, pods = settings(node(stage)), nodes(stage)
    assert found["NODES"] == str(pods["replicas"])
    label = "metadata.labels['apps.kubernetes.io/pod-index']"
    assert found["RANK"] == {"fieldRef": {"fieldPath": label}}
    made = documents(stage, "nodes")
    head, clients = (d for d in made if d["kind"] == "Service")
    name = next(d["metadata"]["name"] for d in made if d["kind"] == "StatefulSet")
    assert found["HEAD"] == f"{name}-0.{head['metadata']['name']}"
    assert head["metadata"]["name"] == pods["serviceName"]
    assert head["spec"]["publishNotReadyAddresses"] is True
    assert pods["podManagementPolicy"] == "Parallel"
    assert clients["spec"]["selector"] == {"statefulset.kubernetes.io/pod-name": f"{name}-0"}


def test_a_node_runs_the_script_of_the_image_as_its_user(stage: Stage) -> None:
    found = node(stage)
    (command,) = found["command"]
    assert (DEPLOY / command.removeprefix("/opt/deploy/")).exists()
    assert nodes(stage)["template"]["spec"]["securityContext"]["runAsUser"] == 10001
    size = next(a for a in found["args"] if a.startswith("--tensor-parallel-size="))
    assert found["resources"]["limits"]["nvidia.com/gpu"] == size.split("=")[1]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        (script,) = found[probe]["exec"]["command"]
        assert (DEPLOY / script.removeprefix("/opt/deploy/")).exists()


# --- Ray ------------------------------------------------------------------------------------------


def test_the_head_is_run_with_gpus_on_the_hosts_network(stage: Stage) -> None:
    stage.program("docker")
    environment = {"IMAGE": IMAGE, "NODE": "10.0.0.1", "INFINIBAND": "/nonexistent"}
    done = stage.run("ray.sh", "head", "some/model", "--tensor-parallel-size=8", **environment)
    assert done.returncode == 0, done.stderr
    (call,) = stage.calls()
    at = call.index(IMAGE)
    assert call[at - 2 : at] == ["--entrypoint", "/opt/deploy/image/ray-node.sh"]
    assert call[at + 1 :] == ["head", "some/model", "--tensor-parallel-size=8"]
    for words in ("--network host", "--gpus all", "--shm-size 16g", "--env NODE=10.0.0.1"):
        assert words in " ".join(call)
    assert "--device" not in call


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


def test_keys_do_not_appear_on_the_command_line(stage: Stage) -> None:
    stage.program("docker")
    stage.run("ray.sh", "head", "m", IMAGE=IMAGE, NODE="10.0.0.1", VLLM_API_KEY="secret")
    (call,) = stage.calls()
    assert "secret" not in " ".join(call)
    assert stage.environment()["VLLM_API_KEY"] == "secret"


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
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    text = (DEPLOY / "README.md").read_text().replace("\\\n", " ")
    ray = next(line for line in text.splitlines() if "ray.sh head" in line)
    lines = {
        "compose": service()["command"],
        "kubernetes": container(stage)["args"],
        "nodes": [*node(stage)["args"], "--headless", "--data-parallel-start-rank=1"],
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
