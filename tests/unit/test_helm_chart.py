"""The Helm chart: helm renders it, Kubernetes accepts it, the server understands its arguments."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from server.api.info import OPEN_PATHS
from server.cli import build_parser, overrides
from server.config import Config, load_config
from server.observe.metrics_table import METRICS

yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")

CHART = Path(__file__).parents[2] / "docker/helm/foredraft"
HELM, VALIDATE = shutil.which("helm"), shutil.which("kubernetes-validate")
VERSIONS = ("1.27", "1.35")  # the oldest that Chart.yaml allows, and a recent one
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not here")
needs_schemas = pytest.mark.skipif(
    VALIDATE is None, reason="kubernetes-validate, a wheel with the API's schemas, is not installed"
)
ALL_KEYS = {"api-key": "sk-one", "admin-key": "sk-two", "keys.toml": "[[key]]"}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "cpu": {"gpu": {"count": 0}, "resources": {"limits": None}, "image": {"tag": "cpu"}},
    "stateful": {"kind": "StatefulSet", "replicas": 3, "cache": {"size": "50Gi"}},
    "shared cache": {
        "cache": {"size": "50Gi", "storageClass": "fast", "accessMode": "ReadWriteMany"}
    },
    "everything": {
        "kind": "StatefulSet",
        "autoscaling": {"enabled": True, "waitingTokens": 2_000_000},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "secret": {"create": ALL_KEYS},
        "graceSeconds": 120,
        "preStopSeconds": 15,
        "config": "[server]\nport = 9\ngrace_seconds = 1\nmax_inflight = 7\n",
        "extraArgs": ["--set=server.router_names=true"],
        "env": [{"name": "HF_HOME", "value": "/home/foredraft/.cache/hub"}],
        "updateStrategy": {"type": "RollingUpdate"},
        "podLabels": {"llm-d.ai/engine-type": "foredraft"},
        "podAnnotations": {"a": "b"},
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
            }
        ],
        "priorityClassName": "serving",
    },
    "own secret": {"secret": {"existing": "mine", "entries": ["api-key", "keys.toml"]}},
}


def helm(*words: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    command = (HELM, *words, "--values", "-")
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True)


def rendered(case: str) -> str:
    done = helm("template", "demo", str(CHART), values=CASES[case])
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(case: str) -> dict[str, list[dict[str, Any]]]:
    """Return the rendered objects by kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in yaml.safe_load_all(rendered(case)):
        found.setdefault(one["kind"], []).append(one)
    return found


def workload(found: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the Deployment or StatefulSet, and its container."""
    [one] = found.get("Deployment", []) + found.get("StatefulSet", [])
    [container] = one["spec"]["template"]["spec"]["containers"]
    return one, container


def started(found: dict[str, list[dict[str, Any]]], folder: Path) -> Config:
    """Return the server's config from its arguments, environment and ConfigMap."""
    _, container = workload(found)
    [config] = found["ConfigMap"]
    path, *options = container["args"]
    name = path.rpartition("/")[2]
    (folder / name).write_text(config["data"][name])
    parsed = build_parser().parse_args(["serve", str(folder / name), *options])
    env = {one["name"]: one.get("value", "mounted") for one in container["env"]}
    return load_config(parsed.config, overrides(parsed), env)


def test_the_default_values_are_those_of_the_schema() -> None:
    """Law: the defaults are valid, and every value in the schema has one, which documents it."""
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    jsonschema.Draft7Validator(schema).validate(values)
    assert values.keys() == schema["properties"].keys() - {"global"}
    for name, rule in schema["properties"].items():
        if "properties" in rule:
            assert values[name].keys() == rule["properties"].keys(), name


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_helm_lint_passes(case: str) -> None:
    done = helm("lint", "--strict", str(CHART), values=CASES[case])
    assert done.returncode == 0, done.stdout + done.stderr


@needs_helm
@needs_schemas
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_accepts_the_rendered_objects(case: str, version: str, tmp_path: Path) -> None:
    """Law: it is valid by the published schemas, without unknown fields. A ServiceMonitor has no
    published schema, since it belongs to the Prometheus operator."""
    assert VALIDATE is not None
    file = tmp_path / "rendered.yaml"
    file.write_text(rendered(case))
    command = (VALIDATE, "--strict", "-k", version, str(file))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    unknown = [line for line in done.stdout.splitlines() if not line.startswith("INFO")]
    assert all("kind ServiceMonitor" in line for line in unknown), unknown


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_the_server_understands_its_container(case: str, tmp_path: Path) -> None:
    """Law: it listens on the container's port, whatever the configuration says; the drain and the
    pause before it fit in the kubelet's grace period; the probes' paths need no key."""
    found = objects(case)
    one, container = workload(found)
    config = started(found, tmp_path).server
    spec, [port] = one["spec"]["template"]["spec"], container["ports"]
    assert port["containerPort"] == config.port
    [_, pause] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert spec["terminationGracePeriodSeconds"] >= config.grace_seconds + int(pause) + 10
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS
        assert container[probe]["httpGet"]["port"] == port["name"]
    if case == "everything":
        assert (config.max_inflight, config.router_names) == (7, True)


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_objects_find_each_other(case: str) -> None:
    """Law: selectors match labels of the pods or of exactly one Service; names and mounts exist."""
    found = objects(case)
    one, container = workload(found)
    template = one["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    services = {service["metadata"]["name"]: service for service in found["Service"]}
    selectors = [one["spec"]["selector"]["matchLabels"]]
    selectors += [service["spec"]["selector"] for service in services.values()]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in found["PodDisruptionBudget"]]
    assert all(selector.items() <= labels for selector in selectors)
    assert one["spec"].get("serviceName", "demo-foredraft") in services
    claims = [each["metadata"]["name"] for each in one["spec"].get("volumeClaimTemplates", ())]
    volumes = {volume["name"] for volume in template["spec"]["volumes"]} | {*claims}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    for monitor in found.get("ServiceMonitor", ()):
        chosen = monitor["spec"]["selector"]["matchLabels"].items()
        scraped = [s for s in services.values() if chosen <= s["metadata"]["labels"].items()]
        assert len(scraped) == 1, "each pod is scraped once"
        assert scraped[0]["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "foredraft"
        [endpoint] = monitor["spec"]["endpoints"]
        assert endpoint["port"] in [port["name"] for port in scraped[0]["spec"]["ports"]]
    for scaler in found.get("HorizontalPodAutoscaler", ()):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == (one["kind"], one["metadata"]["name"])
        assert "replicas" not in one["spec"]
        [metric] = scaler["spec"]["metrics"]
        name = metric["pods"]["metric"]["name"].removeprefix("foredraft_")
        assert name in {metric.name for metric in METRICS if metric.type == "gauge"}


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_keys_come_from_secrets_alone(case: str, tmp_path: Path) -> None:
    """Law: every named entry reaches the server from the right Secret, and a pod whose Secret lacks
    one does not start; no other object holds a key."""
    found = objects(case)
    _, container = workload(found)
    secret = CASES[case].get("secret", {})
    entries = {*secret.get("entries", ()), *secret.get("create", ())}
    name = secret.get("existing") or "demo-foredraft"
    config = started(found, tmp_path).server
    given = {"api-key": config.api_key, "admin-key": config.admin_key}
    given["keys.toml"] = config.api_keys_file
    assert {entry for entry, value in given.items() if value is not None} == entries
    sources = [one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one]
    assert all(source == {"name": name, "key": source["key"]} for source in sources)
    made = found.pop("Secret", [])
    assert [one["stringData"] for one in made] == ([ALL_KEYS] if "create" in secret else [])
    assert "sk-" not in json.dumps(found)


@needs_helm
@pytest.mark.parametrize(
    "values",
    [
        {"gpus": 1},
        {"gpu": {"count": -1}},
        {"kind": "DaemonSet"},
        {"secret": {"create": {"key": "x"}}},
        {"graceSeconds": 1.5},
    ],
)
def test_unknown_values_are_refused(values: dict[str, Any]) -> None:
    """Bug: a misspelt value, such as one that was to set a key, would be ignored."""
    assert helm("template", "demo", str(CHART), values=values).returncode != 0
