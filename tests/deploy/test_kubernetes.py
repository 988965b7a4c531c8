"""The manifests, as far as they can be checked without a cluster: all that they name exists."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmjax.server.flags import parse_flags
from mmjax.server.middleware import OPEN_PATHS
from mmjax.server.shutdown import CLOSE_TIMEOUT_S
from tests.deploy.conftest import Deployment

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "kubernetes"


def documents(name: str) -> dict[str, dict[str, Any]]:
    """Return a file's objects, by kind."""
    found = yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))
    return {one.get("kind", name): one for one in found}


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    return documents("deployment.yaml")["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (one,) = pod["containers"]
    return one


def test_its_arguments_are_flags(container: dict[str, Any]) -> None:
    flags = parse_flags(["--port", str(container["ports"][0]["containerPort"]), *container["args"]])
    assert flags.shutdown_timeout == 60
    assert flags.log_format == "json"
    variables = {one["name"] for one in container["env"]}
    assert variables == {"MMJAX_API_KEY"}


def test_probes_ask_what_they_should_and_need_no_key(
    container: dict[str, Any], deployment: Deployment
) -> None:
    paths = {
        name: container[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "readiness", "liveness")
    }
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert set(paths.values()) <= OPEN_PATHS
    assert all(deployment.http.get(path).status_code == 200 for path in paths.values())
    ports = {one["name"] for one in container["ports"]}
    assert {container[f"{name}Probe"]["httpGet"]["port"] for name in paths} <= ports


def test_there_is_time_to_drain(pod: dict[str, Any], container: dict[str, Any]) -> None:
    drain_s = parse_flags(container["args"]).shutdown_timeout
    before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= before_s + drain_s + CLOSE_TIMEOUT_S
    # No replica is taken away before a new one is ready.
    update = documents("deployment.yaml")["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert update["maxUnavailable"] == 0 < update["maxSurge"]


def test_it_fits_the_image(pod: dict[str, Any], container: dict[str, Any]) -> None:
    file = (ROOT / "examples" / "docker" / "Dockerfile.cpu").read_text(encoding="utf-8")
    assert f"USER {pod['securityContext']['runAsUser']}" in file
    assert f"EXPOSE {container['ports'][0]['containerPort']}" in file
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    (volume,) = re.findall(r"^VOLUME (\S+)$", file, flags=re.MULTILINE)
    assert {volume, "/tmp", "/dev/shm"} == mounts
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in pod["volumes"]
    }


def test_everything_selects_the_pods() -> None:
    objects = documents("deployment.yaml") | documents("autoscaling.yaml")
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert objects[kind]["spec"]["selector"]["matchLabels"] == labels
    target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == objects["Deployment"]["metadata"]["name"]
    named = objects["Service"]["spec"]["ports"][0]["targetPort"]
    assert named == objects["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["port"]


def test_it_scales_by_a_metric_that_is_there(deployment: Deployment) -> None:
    scaler = documents("autoscaling.yaml")["HorizontalPodAutoscaler"]["spec"]
    (metric,) = scaler["metrics"]
    (rule,) = documents("prometheus-adapter-values.yaml")["prometheus-adapter-values.yaml"][
        "rules"
    ]["custom"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    (series,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
    assert series in rule["metricsQuery"]
    monitor = documents("autoscaling.yaml")["PodMonitor"]["spec"]["podMetricsEndpoints"][0]
    for engine in deployment.engines:
        engine.heartbeat = engine.engine.stats()
    lines = deployment.http.get(monitor["path"]).text.splitlines()
    assert any(re.match(rf"{re.escape(series)}[{{ ]", line) for line in lines)


def test_the_key_is_the_one_that_the_comment_makes() -> None:
    text = (FOLDER / "deployment.yaml").read_text(encoding="utf-8")
    (command,) = re.findall(r"#\s+(kubectl create secret .*)", text)
    *_, name, literal = shlex.split(command)
    key = literal.removeprefix("--from-literal=").partition("=")[0]
    assert f"{{name: {name}, key: {key}}}" in text
    credentials = documents("autoscaling.yaml")["PodMonitor"]["spec"]["podMetricsEndpoints"][0]
    assert credentials["authorization"]["credentials"] == {"name": name, "key": key}
