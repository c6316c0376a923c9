"""What a person deploys: parsed and validated by each format's own tool, with tokens on and no default password.

KubeRay's schemas are not on the package index. What is checked of RayCluster and RayJob is that every field is one of
KubeRay's (the lists below, of its v1 API), and that every pod template is one by Kubernetes' own schema.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compose_spec
import jsonschema
import kubernetes_validate
import psutil
import pytest
import ray
import ray.autoscaler
import yaml

from raydp import cluster
from raydp.errors import InvalidValue
from tests.cluster.heads import free_port

DEPLOYED = Path(__file__).parents[2] / "cluster"
BIN = Path(sys.executable).parent
SCRIPTS = ("local.sh", "slurm.sh", "mlflow/serve.sh")
KUBERNETES = "1.33"

# The fields of ray.io/v1 that these files may use (ray-operator/apis/ray/v1 of KubeRay 1.5 and later).
RAY_CLUSTER = {"rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec", "suspend"}
RAY_CLUSTER |= {
    "workerGroupSpecs",
    "headServiceAnnotations",
    "gcsFaultToleranceOptions",
    "managedBy",
    "upgradeStrategy",
}
AUTOSCALER = {"resources", "image", "imagePullPolicy", "env", "envFrom", "volumeMounts", "securityContext", "version"}
AUTOSCALER |= {"idleTimeoutSeconds", "upscalingMode"}
HEAD_GROUP = {"serviceType", "headService", "enableIngress", "rayStartParams", "template", "resources", "labels"}
WORKER_GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"}
WORKER_GROUP |= {"scaleStrategy", "idleTimeoutSeconds", "suspend", "resources", "labels"}
RAY_JOB = {"activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "metadata", "jobId"}
RAY_JOB |= {"clusterSelector", "submitterConfig", "managedBy", "deletionStrategy", "entrypoint", "runtimeEnvYAML"}
RAY_JOB |= {"submissionMode", "entrypointResources", "entrypointNumCpus", "entrypointNumGpus", "suspend"}
RAY_JOB |= {"ttlSecondsAfterFinished", "shutdownAfterJobFinishes"}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOYED / name).read_text(encoding="utf-8")))


def interpolated(text: str, given: dict[str, str]) -> str:
    """Compose's ``${NAME:-default}`` and ``${NAME:?why it must be set}`` as compose itself replaces them."""
    return re.sub(r"\$\{(\w+):[-?]([^}]*)\}", lambda match: given.get(match[1], match[2]), text)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse_and_shellcheck_finds_nothing(name: str) -> None:
    shell = "sh" if name.startswith("mlflow") else "bash"
    subprocess.run([shell, "-n", str(DEPLOYED / name)], check=True)
    found = subprocess.run([str(BIN / "shellcheck"), str(DEPLOYED / name)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", ["Dockerfile", "mlflow/Dockerfile"])
def test_images_are_built_without_root_and_hadolint_finds_nothing(name: str) -> None:
    found = subprocess.run([str(BIN / "hadolint"), str(DEPLOYED / name)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    text = (DEPLOYED / name).read_text()
    assert re.search(r"^USER 1000$", text, re.MULTILINE)
    for line in text.splitlines():
        if line.startswith("COPY"):
            copied = line.split()[1:-1]
            root = DEPLOYED.parent if name == "Dockerfile" else DEPLOYED / "mlflow"
            assert all((root / path).exists() for path in copied if not path.startswith("--"))


def test_the_image_has_the_ray_that_submits() -> None:
    tag = re.search(r"^ARG RAY_TAG=(\S+)$", (DEPLOYED / "Dockerfile").read_text(), re.MULTILINE)
    assert tag is not None
    version, python, _ = tag[1].split("-")
    assert version.split(".")[:2] == ray.__version__.split(".")[:2]
    assert python == f"py{sys.version_info.major}{sys.version_info.minor}"


def test_the_cloud_cluster_is_valid_by_rays_schema_scales_and_uses_spot_workers() -> None:
    (config,) = documents("aws.yaml")
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    types = config["available_node_types"]
    head, workers = types[config["head_node_type"]], [t for name, t in types.items() if name != "head"]
    assert head["resources"] == {"CPU": 0}
    assert all(worker["min_workers"] == 0 < worker["max_workers"] <= config["max_workers"] for worker in workers)
    assert any(worker["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot" for worker in workers)
    assert "~/.ray/auth_token" in config["file_mounts"]
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        start = next(command for command in config[name] if "ray start" in command)
        assert "RAY_AUTH_MODE=token" in start and "RAY_AUTH_TOKEN_PATH" in start
    assert any("--dashboard-host=127.0.0.1" in command for command in config["head_start_ray_commands"])


def _ray_clusters() -> Iterator[dict[str, Any]]:
    for name in ("kuberay/raycluster.yaml", "kuberay/rayjob.yaml"):
        for document in documents(name):
            if document["apiVersion"] == "ray.io/v1":
                yield document["spec"].get("rayClusterSpec", document["spec"])


def test_kuberay_objects_have_known_fields_and_pods_that_kubernetes_takes() -> None:
    specs = list(_ray_clusters())
    assert len(specs) == 2
    for spec in specs:
        assert spec.keys() <= RAY_CLUSTER and spec["autoscalerOptions"].keys() <= AUTOSCALER
        assert spec["authOptions"] == {"mode": "token"}
        assert spec["rayVersion"].split(".")[:2] == ray.__version__.split(".")[:2]
        head = spec["headGroupSpec"]
        assert head.keys() <= HEAD_GROUP and head["serviceType"] == "ClusterIP"
        assert head["rayStartParams"] == {"num-cpus": "0", "dashboard-host": "127.0.0.1"}
        assert spec["enableInTreeAutoscaling"] is True
        for group in spec["workerGroupSpecs"]:
            assert group.keys() <= WORKER_GROUP
            assert group["minReplicas"] == group["replicas"] == 0 < group["maxReplicas"]
        for group in (head, *spec["workerGroupSpecs"]):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
            assert group["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
            for container in group["template"]["spec"]["containers"]:
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["resources"]["requests"] == container["resources"]["limits"]
                assert {"name": "shared", "mountPath": "/shared"} in container["volumeMounts"]


def test_a_pod_that_kubernetes_does_not_take_is_noticed() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"container": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_the_ray_job_resumes_and_the_other_objects_are_kubernetes_own() -> None:
    (job,) = documents("kuberay/rayjob.yaml")
    assert job["spec"].keys() <= RAY_JOB
    assert job["spec"]["backoffLimit"] > 0 and job["spec"]["submissionMode"] == "SidecarMode"
    assert "raydp run" in job["spec"]["entrypoint"] and "--storage /shared/" in job["spec"]["entrypoint"]
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_SIGNAL"] == "SIGINT"
    for document in documents("kuberay/raycluster.yaml"):
        if document["apiVersion"] != "ray.io/v1":
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_compose_file_is_one_and_has_no_default_password() -> None:
    text = (DEPLOYED / "mlflow" / "compose.yaml").read_text()
    found = compose_spec.PyCompose.from_yaml(interpolated(text, {"RAYDP_MLFLOW_SECRETS": "/secrets"}))
    found.validate()
    assert set(found.service_names()) == {"postgres", "mlflow"}
    (config,) = documents("mlflow/compose.yaml")
    secrets = config["secrets"]
    assert all(":?" in secret["file"] for secret in secrets.values())  # compose refuses to start without it
    assert set(config["services"]["mlflow"]["secrets"]) == set(secrets)
    assert config["services"]["mlflow"]["ports"] == ["${RAYDP_MLFLOW_BIND:-127.0.0.1}:5000:5000"]
    assert "ports" not in config["services"]["postgres"] and config["networks"]["inside"]["internal"] is True
    environment = config["services"]["postgres"]["environment"]
    assert "POSTGRES_PASSWORD" not in environment and environment["POSTGRES_PASSWORD_FILE"].startswith("/run/secrets/")
    assert not re.search(r"(?i)(password|secret|key)\s*[:=]\s*[\"']?\w+[\"']?\s*$", text, re.MULTILINE)


def test_a_compose_file_that_is_none_is_noticed() -> None:
    with pytest.raises(ValueError):
        compose_spec.PyCompose.from_yaml("services:\n  a:\n    image: x\n    no_such_field: 1\n")


def test_the_tracking_server_does_not_start_without_its_secrets(tmp_path: Path) -> None:
    script = (DEPLOYED / "mlflow" / "serve.sh").read_text().replace("/run/secrets", str(tmp_path))
    (tmp_path / "postgres_password").write_text("")
    started = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert started.returncode != 0
    assert "postgres_password is missing or empty" in started.stderr


def test_the_slurm_script_says_how_it_is_used() -> None:
    used = subprocess.run(["bash", str(DEPLOYED / "slurm.sh")], capture_output=True, text=True)
    assert used.returncode == 2 and "usage: sbatch" in used.stderr
    alone = {"PATH": os.environ["PATH"]}
    outside = subprocess.run(["bash", str(DEPLOYED / "slurm.sh"), "x", "y"], capture_output=True, text=True, env=alone)
    assert outside.returncode != 0 and "must be run by sbatch" in outside.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_local_cluster_of_two_nodes_starts_with_a_token_and_stops(tmp_path: Path) -> None:
    directory, port = Path(f"/tmp/rl-{os.getpid()}"), free_port()
    environment = {
        **os.environ,
        "RAYDP_CLUSTER_DIR": str(directory),
        "RAYDP_CLUSTER_PORT": str(free_port()),
        "RAYDP_DASHBOARD_PORT": str(port),
        "RAY": str(BIN / "ray"),
    }
    address, script = f"http://127.0.0.1:{port}", str(DEPLOYED / "local.sh")
    started: list[psutil.Process] = []

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script, *arguments], env=environment, capture_output=True, text=True, timeout=180)

    try:
        begun = run("start", "2", "1")
        assert begun.returncode == 0, begun.stderr
        assert f"RAYDP_ADDRESS={address}" in begun.stdout
        assert (directory / "token").stat().st_mode & 0o777 == 0o600
        assert run("start").returncode == 1  # it runs already
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("RAY_AUTH_TOKEN", raising=False)
            patch.setenv("RAY_AUTH_TOKEN_PATH", str(directory / "token"))
            deadline = time.monotonic() + 120
            while " 2 node" not in (status := run("status").stdout) and status.count("node_") < 2:
                assert time.monotonic() < deadline, status
                time.sleep(1)
            assert cluster.jobs(address) == []
            patch.setenv("RAY_AUTH_TOKEN", "wrong")
            with pytest.raises(InvalidValue, match="token"):
                cluster.jobs(address)
        for pid in (directory / "pids").read_text().split():
            process = psutil.Process(int(pid))
            started += [process, *process.children(recursive=True)]
    finally:
        stopped = run("stop")
    assert "Stopped" in stopped.stdout
    _, alive = psutil.wait_procs(started, timeout=20)
    for process in alive:
        process.kill()
    assert not alive
    assert not (directory / "token").exists()
    subprocess.run(["rm", "-r", str(directory)], check=True)
