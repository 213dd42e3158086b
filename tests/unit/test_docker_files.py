"""docker/ and the Dockerfile agree with each other and with the server. No engine runs here."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from server.config import ServerConfig
from tests.support.promql import check, needs_promtool, promtool

yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def read(path: str) -> Any:
    return yaml.safe_load((DOCKER / path).read_text(encoding="utf-8"))


COMPOSE = read("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
RULES: list[dict[str, Any]] = [rule for g in read("alerts.yaml")["groups"] for rule in g["rules"]]


def mounts(service: str) -> dict[str, str]:
    """Return {path in the container: file, folder or volume}."""
    volumes = [volume.split(":") for volume in SERVICES[service]["volumes"]]
    return {parts[1]: parts[0] for parts in volumes}


def test_what_is_mounted_exists() -> None:
    """Bug: for a missing path, Docker creates an empty folder."""
    for service in SERVICES:
        for source in mounts(service).values():
            known = (DOCKER / source).exists() if source[0] == "." else source in COMPOSE["volumes"]
            assert known, (service, source)


def test_nothing_is_reachable_from_outside() -> None:
    """Law: every port is published on the loopback address only; images are pinned by version."""
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        if "build" not in service:
            assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name


def test_grafana_finds_the_dashboard_and_its_data() -> None:
    """Law: the paths and addresses of Grafana's provisioning are those of compose."""
    mounted = mounts("grafana")
    for kind in ("datasources", "dashboards"):
        assert mounted[f"/etc/grafana/provisioning/{kind}"] == f"./grafana/provisioning/{kind}"
    [provider] = read("grafana/provisioning/dashboards/foredraft.yaml")["providers"]
    folder = provider["options"]["path"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(folder)
    assert (DOCKER / mounted[folder] / Path(home).name).is_file()
    [source] = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == f"http://prometheus:{_port('prometheus')}"
    assert (
        source["jsonData"]["timeInterval"] == read("prometheus.yaml")["global"]["scrape_interval"]
    )


def test_prometheus_finds_foredraft_and_the_rules() -> None:
    """Law: the scrape target is compose's service at the port of image and server."""
    [scrape] = read("prometheus.yaml")["scrape_configs"]
    assert scrape["job_name"] == "foredraft", "an alert names it"
    assert scrape["static_configs"] == [{"targets": [f"foredraft:{_port('foredraft')}"]}]
    assert f"EXPOSE {_port('foredraft')}\n" in DOCKERFILE
    assert ServerConfig().port == _port("foredraft")
    [rules] = read("prometheus.yaml")["rule_files"]
    assert mounts("prometheus")[f"/etc/prometheus/{rules}"] == f"./{rules}"


def _port(service: str) -> int:
    """Return the port inside the container."""
    [published] = SERVICES[service]["ports"]
    return int(published.rpartition(":")[2])


def test_foredraft_is_built_as_the_dockerfile_says() -> None:
    """Law: the build target exists, its volume belongs to its user, and the grace period lets
    replies end before the container is killed."""
    service = SERVICES["foredraft"]
    assert f" AS {service['build']['target']}\n" in DOCKERFILE
    assert (DOCKER / service["build"]["context"]).resolve() == ROOT
    assert all(f"ARG {name}=" in DOCKERFILE for name in service["build"]["args"])
    [kept] = mounts("foredraft")
    assert f"--owner=foredraft --group=foredraft {kept}\n" in DOCKERFILE
    assert int(service["stop_grace_period"].rstrip("s")) > ServerConfig().grace_seconds
    start_period = re.search(r"--start-period=(\d+)s", DOCKERFILE)
    assert start_period is not None
    assert int(start_period[1]) >= ServerConfig().start_timeout_seconds


def test_the_image_gets_all_packages() -> None:
    """Law: all copied paths exist, with every package and the readme that installation needs."""
    copied = [
        word for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M) for word in line.split()
    ]
    assert all((ROOT / one).exists() for one in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.removesuffix("*") for name in included} <= set(copied)
    assert {project["project"]["readme"], "pyproject.toml", "requirements.lock"} <= set(copied)
    for top in ("engine", "server"):  # a folder without __init__.py is not installed
        for path in ROOT.glob(f"{top}/**/*.py"):
            assert (path.parent / "__init__.py").exists(), path


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_alerts_name_what_exists(rule: dict[str, Any]) -> None:
    """Law: as for the dashboards' expressions."""
    check(rule["expr"])


@needs_promtool
def test_prometheus_reads_its_configuration() -> None:
    promtool("check", "config", str(DOCKER / "prometheus.yaml"))


# Series minute by minute. At minute 30 only the alert that the key names fires; its problem
# ends at minute 40, and at minute 90 none fires.
TIMES = ("30m", "90m")
PLAIN = 'foredraft_spec_decode_compared_seconds_total{kind="plain"}'
TAKEN = 'foredraft_spec_decode_compared_seconds_total{kind="taken"}'
FIRST = "foredraft_time_to_first_token_seconds_bucket"
HISTORIES = {
    "none, since all is well": {
        "up{}": "1+0x90",
        'foredraft_engine_state{state="ready"}': "1+0x90",
        'foredraft_requests_total{reason="error"}': "0+1x90",
        'foredraft_requests_total{reason="stop"}': "0+99x90",
        "foredraft_engine_restarts_total{}": "2+0x90",
        FIRST + '{le="10.0"}': "0+96x90",
        FIRST + '{le="30.0"}': "0+100x90",
        FIRST + '{le="+Inf"}': "0+100x90",
        "foredraft_requests_waiting{}": "5+0x90",
        'foredraft_rejected_requests_total{reason="queue_full"}': "7+0x90",
        "foredraft_preemptions_total{}": "0+5x90",
        "process_open_fds{}": "700+0x90",
        "process_max_fds{}": "1024+0x90",
        PLAIN: "0+50x90",
        TAKEN: "0+40x90",
        'foredraft_build_info{version="1"}': "1+0x90",
    },
    "none, since nothing runs": {
        'foredraft_requests_total{reason="error"}': "9+0x90",
        FIRST + '{le="10.0"}': "0+0x90",
        FIRST + '{le="+Inf"}': "9+0x90",
        PLAIN: "90+0x90",
        TAKEN: "99+0x90",
    },
    "none, since next to nothing runs": {PLAIN: "0+1x90", TAKEN: "0+2x90"},
    "ForedraftDown": {"up{}": "0+0x40 1+0x50"},
    "ForedraftNotReady": {'foredraft_engine_state{state="ready"}': "0+0x40 1+0x50"},
    "ForedraftErrors": {
        'foredraft_requests_total{reason="error"}': "0+6x40 240+0x50",
        'foredraft_requests_total{reason="stop"}': "0+94x90",
    },
    "ForedraftRestarted": {"foredraft_engine_restarts_total{}": "0+0x20 1+0x70"},
    "ForedraftSlowFirstToken": {
        FIRST + '{le="10.0"}': "0+90x40 3600+99x50",
        FIRST + '{le="30.0"}': "0+100x90",
        FIRST + '{le="+Inf"}': "0+100x90",
    },
    "ForedraftQueueGrows": {"foredraft_requests_waiting{}": "1+1x40 0+0x50"},
    "ForedraftQueueFull": {
        'foredraft_rejected_requests_total{reason="queue_full"}': "0+1x40 40+0x50"
    },
    "ForedraftPreempts": {"foredraft_preemptions_total{}": "0+9x40 360+0x50"},
    "ForedraftFewDescriptors": {
        "process_open_fds{}": "900+0x40 30+0x50",
        "process_max_fds{}": "1024+0x90",
    },
    "ForedraftSpeculationLoses": {PLAIN: "0+48x40 1920+55x50", TAKEN: "0+50x90"},
    "ForedraftVersions": {
        'foredraft_build_info{version="1"}': "1+0x90",
        'foredraft_build_info{version="2"}': "1+0x40",
    },
}


def test_every_alert_has_its_history() -> None:
    """Law: every alert has a history in which it fires and resolves."""
    assert {name for name in HISTORIES if " " not in name} == {rule["alert"] for rule in RULES}


@needs_promtool
@pytest.mark.parametrize("history", HISTORIES)
def test_alerts_fire_and_resolve(history: str, tmp_path: Path) -> None:
    """Law: each alert fires on its own problem; none fires on a good day or after the problem."""
    labels = 'job="foredraft",instance="a:8000"'
    series = [
        {"series": name.replace("}", f",{labels}}}").replace("{,", "{"), "values": values}
        for name, values in HISTORIES[history].items()
    ]
    cases = [
        {"eval_time": time, **_expected(rule, history if time == TIMES[0] else "none")}
        for time in TIMES
        for rule in RULES
    ]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": cases}
    file = tmp_path / "tests.json"
    file.write_text(json.dumps({"rule_files": [str(DOCKER / "alerts.yaml")], "tests": [test]}))
    promtool("test", "rules", str(file))


def _expected(rule: dict[str, Any], history: str) -> dict[str, Any]:
    fires = rule["alert"] == history
    own = dict(re.findall(r'(reason|state)="(\w+)"', rule["expr"]))
    own = {} if "ignoring" in rule["expr"] else own
    labels = {"job": "foredraft", "instance": "a:8000", **own, **rule["labels"]}
    if rule["alert"] == "ForedraftVersions":
        del labels["instance"]
    texts = rule["annotations"]
    summary = re.sub(r"{{ \$labels.(\w+) }}", lambda match: labels[match[1]], texts["summary"])
    alert = {"exp_labels": labels, "exp_annotations": {**texts, "summary": summary}}
    return {"alertname": rule["alert"], "exp_alerts": [alert] if fires else []}


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    """Law: each alert has one of three severities and a runbook section that says where to look and
    what to do; every section belongs to an alert."""
    sections = re.split(r"^## (\w+)$", (ROOT / "docs/runbooks.md").read_text("utf-8"), flags=re.M)
    pages = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert [*pages] == [rule["alert"] for rule in RULES]
    for rule in RULES:
        name, severity = rule["alert"], rule["labels"]["severity"]
        assert severity in ("critical", "warning", "info"), name
        assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{name.lower()}"
        assert pages[name].strip().startswith(f"{severity.capitalize()}. "), name
        assert all(f"- **{word}:** " in pages[name] for word in ("Look", "Do")), name
