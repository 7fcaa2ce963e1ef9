"""deploy/ by the schemas and parsers of other projects, without a cluster, Prometheus or Grafana.

``promtool`` (Debian's package ``prometheus``) and ``systemd-analyze`` are used if they are there.
"""

import argparse
import importlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import grafana_foundation_sdk.cog.plugins
import kubernetes_validate
import promql_parser
import pytest
import yaml
from commands import run
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from pydantic import BaseModel

from attnres_serve.server import launcher, metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCS = ROOT / "docs"
MANIFESTS = DEPLOY / "kubernetes"
MONITORING = DEPLOY / "monitoring"
UNIT = DEPLOY / "systemd" / "attnres-serve.service"
ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"
UID = 10001
VERSIONS = ("1.29", "1.37")  # of Kubernetes: the chart's oldest, and the newest schema at hand


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


# Kubernetes.


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_manifests_follow_the_schema_of_kubernetes(path, version):
    manifest = read(path)
    kubernetes_validate.validate(manifest, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError, match="intervall"):
        kubernetes_validate.validate(manifest | {"intervall": "15s"}, version, strict=True)


def applied() -> list[Path]:
    """The folders that a page gives to kubectl."""
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    return [ROOT / name for name in re.findall(r"kubectl apply -f (\S+/)\s", pages)]


def test_kubectl_finds_a_kind_in_every_file_of_a_folder_that_it_applies():
    assert set(applied()) == {MANIFESTS, MONITORING}
    for folder in applied():
        # It reads these three, and ends with an error where one is no resource.
        for path in (one for one in folder.iterdir() if one.suffix in (".json", ".yaml", ".yml")):
            assert {"apiVersion", "kind"} <= read(path).keys(), path


def test_pods_are_confined_as_compose_yaml_confines():
    pod = read(MANIFESTS / "deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), UID),
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not pod["automountServiceAccountToken"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {"/model", "/cache", "/tmp", "/dev/shm"} < set(mounts) and mounts["/model"]["readOnly"]
    assert {mount["name"] for mount in mounts.values()} == {
        volume["name"] for volume in pod["volumes"]
    }
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert Path(env["ATTNRES_API_KEY_FILE"]).parent == Path("/run/secrets/attnres-serve")
    assert env["ATTNRES_API_KEY_FILE"].rpartition("/")[0] in mounts and "VLLM_API_KEY" not in env
    drain = int(re.search(r"--shutdown-timeout (\d+)", ENTRYPOINT.read_text())[1])
    delay = int(container["args"][container["args"].index("--drain-delay") + 1])
    assert pod["terminationGracePeriodSeconds"] >= delay + drain + 10
    readiness = container["readinessProbe"]
    assert delay > readiness["periodSeconds"] * readiness["failureThreshold"]


def probes(values: dict) -> dict[str, str]:
    return {
        name: probe["httpGet"]["path"] for name, probe in values.items() if name.endswith("Probe")
    }


def test_a_budget_leaves_a_node_that_can_be_drained():
    """One that wants as many as there are lets no node be drained."""
    replicas = read(MANIFESTS / "deployment.yaml")["spec"]["replicas"]
    fewest = read(MONITORING / "keda-scaled-object.yaml")["spec"]["minReplicaCount"]
    budget = read(MANIFESTS / "pod-disruption-budget.yaml")["spec"]["minAvailable"]
    assert 0 < budget < replicas and budget <= fewest


def test_readiness_is_ready_and_liveness_is_health():
    (container,) = read(MANIFESTS / "deployment.yaml")["spec"]["template"]["spec"]["containers"]
    assert probes(container) == {
        "startupProbe": "/health",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    chart = read(ROOT / "docker" / "production-stack.yaml")["servingEngineSpec"]
    assert probes(chart) == {"startupProbe": "/health", "readinessProbe": "/ready"}


def test_the_selectors_find_the_pods():
    names = ("deployment", "service", "pod-disruption-budget")
    deployment, service, budget = (read(MANIFESTS / f"{name}.yaml") for name in names)
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    monitor = read(MONITORING / "pod-monitor.yaml")["spec"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"],
        monitor["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert monitor["podMetricsEndpoints"][0]["port"] == port["name"]
    scaled = read(MONITORING / "keda-scaled-object.yaml")["spec"]["scaleTargetRef"]["name"]
    assert scaled == deployment["metadata"]["name"]


# Custom resources, by models that were made of their definitions.

RESOURCES = {
    "pod-monitor": "prometheus_operator.v1:PodMonitor",
    "prometheus-rule": "prometheus_operator.v1:PrometheusRule",
    "keda-scaled-object": "keda.v1alpha1:ScaledObject",
}


def model_of(name: str) -> type[BaseModel]:
    module, _, kind = RESOURCES[name].partition(":")
    return getattr(importlib.import_module(f"cloudcoil.models.{module}"), kind)


def validate(model: type[BaseModel], resource: dict) -> None:
    """Types by the model; and what comes back is all of it, as the models skip unknown fields."""
    found = model.model_validate(resource)
    assert found.model_dump(mode="json", by_alias=True, exclude_unset=True) == resource


def test_every_custom_resource_has_a_model():
    assert {path.stem for path in MONITORING.glob("*.yaml")} == set(RESOURCES)


@pytest.mark.parametrize("name", RESOURCES)
def test_custom_resources_follow_their_definitions(name):
    resource = read(MONITORING / f"{name}.yaml")
    validate(model_of(name), resource)
    resource["spec"]["intervall"] = "15s"
    with pytest.raises(AssertionError):
        validate(model_of(name), resource)


# Queries.


def dashboard() -> dict:
    return json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())


def queries() -> Iterator[tuple[str, str]]:
    """Where a query stands, and the query with Grafana's variables filled in."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
            yield panel["title"], query
    for group in read(MONITORING / "prometheus-rule.yaml")["spec"]["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for trigger in read(MONITORING / "keda-scaled-object.yaml")["spec"]["triggers"]:
        yield "KEDA", trigger["metadata"]["query"]


def metric_names(query: str) -> set[str]:
    """Names of the metrics that a query selects, which has to be PromQL."""
    promql_parser.parse(query)
    return set(re.findall(r"(?:attnres_|vllm:|http_|process_)\w+", query))


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_queries_are_promql(where, query):
    """``test_observability`` asks a server for their metrics."""
    assert metric_names(query), where


def test_every_metric_of_ours_is_on_the_dashboard():
    families = [family for one in metrics.SERVED for family in one.describe()]
    ours = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert ours <= set().union(*(metric_names(query) for _, query in queries()))


# Prometheus.


def test_every_alert_leads_to_its_part_of_a_page():
    page = DOCS / "use" / "operations" / "alerts.md"
    parts = re.findall(r"^## (\w+)$", page.read_text(), re.M)
    rules = read(MONITORING / "prometheus-rule.yaml")["spec"]["groups"][0]["rules"]
    assert sorted(parts) == sorted(rule["alert"] for rule in rules)
    for rule in rules:
        address = f"{page.relative_to(ROOT)}#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == address


RULES_TEST = """
rule_files: [rules.yaml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'attnres_traces_total{outcome="failed", instance="a"}', values: "0 0 0 1 1 1"}
      - {series: 'attnres_bank_bytes{instance="a"}', values: "1x10 stale"}
      - {series: 'attnres_bank_bytes{instance="b"}', values: "1x20 stale"}
      - {series: 'up{instance="b"}', values: "1x20 0x20"}
      - {series: 'up{job="other", instance="a"}', values: "0x40"}
      - {series: 'attnres_bank_bytes{job="two", instance="a"}', values: "1x20 stale"}
      - {series: 'up{job="two", instance="a"}', values: "1x20"}
      - {series: 'up{job="two", instance="b"}', values: "0x20"}
      - {series: 'process_start_time_seconds{job="two", instance="a"}', values: "5 5 6 6 7x16"}
      - {series: 'process_start_time_seconds{job="two", instance="b"}', values: "5 5 6 6 6x16"}
      - {series: 'process_start_time_seconds{job="other", instance="a"}', values: "5 6 7 8 9x16"}
      - {series: 'vllm:time_to_first_token_seconds_bucket{instance="a", le="5"}', values: "0x30"}
      - {series: 'vllm:time_to_first_token_seconds_bucket{instance="a", le="9"}', values: "0+9x30"}
      - {series: 'vllm:time_to_first_token_seconds_bucket{instance="a", le="Inf"}', values: 0+9x30}
      - {series: 'vllm:time_to_first_token_seconds_bucket{instance="b", le="5"}', values: "0+9x30"}
      - {series: 'vllm:time_to_first_token_seconds_bucket{instance="b", le="Inf"}', values: 0+9x30}
      - {series: 'vllm:num_requests_waiting{instance="a", engine="0"}', values: "20x30"}
      - {series: 'attnres_forward_passes_total{mode="eager", instance="a"}', values: "0+60x40"}
      - {series: 'attnres_forward_passes_total{mode="compiled", instance="a"}', values: "1x40"}
      - {series: 'attnres_forward_passes_total{mode="eager", instance="b"}', values: "0+60x40"}
      - {series: 'attnres_forward_passes_total{mode="compiled", instance="b"}', values: "0x40"}
    alert_rule_test:
      - {eval_time: 2m, alertname: AttnResTraceFailed}
      - eval_time: 5m
        alertname: AttnResTraceFailed
        exp_alerts: [{exp_labels: {severity: warning, outcome: failed, instance: a}}]
      - {eval_time: 20m, alertname: AttnResNoServer}
      - {eval_time: 25m, alertname: AttnResNoServer}
      - eval_time: 27m
        alertname: AttnResNoServer
        exp_alerts: [{exp_labels: {severity: critical}}]
      - {eval_time: 4m, alertname: AttnResServerDown}
      - eval_time: 6m
        alertname: AttnResServerDown
        exp_alerts: [{exp_labels: {severity: warning, job: two, instance: b}}]
      - {eval_time: 3m, alertname: AttnResRestarts}
      - eval_time: 6m
        alertname: AttnResRestarts
        exp_alerts: [{exp_labels: {severity: warning, job: two, instance: a}}]
      - {eval_time: 5m, alertname: AttnResSlowFirstToken}
      - eval_time: 25m
        alertname: AttnResSlowFirstToken
        exp_alerts: [{exp_labels: {severity: warning, instance: a}}]
      - {eval_time: 5m, alertname: AttnResRequestsWait}
      - eval_time: 15m
        alertname: AttnResRequestsWait
        exp_alerts: [{exp_labels: {severity: warning, instance: a}}]
      - eval_time: 30m
        alertname: AttnResEagerPasses
        exp_alerts: [{exp_labels: {severity: warning, instance: a}}]
"""


def filled(texts: dict[str, str], labels: dict[str, str]) -> dict[str, str]:
    """The annotations of a rule, with the labels of an alert."""
    return {
        key: re.sub(r"{{ [$]labels[.](\w+) }}", lambda name: labels[name[1]], text)
        for key, text in texts.items()
    }


def test_promtool_accepts_the_rules_and_they_fire(tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no `promtool` on PATH; on Debian: apt-get install prometheus")
    spec = read(MONITORING / "prometheus-rule.yaml")["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    for alert in (case := yaml.safe_load(RULES_TEST))["tests"][0]["alert_rule_test"]:
        (rule,) = (one for one in spec["groups"][0]["rules"] if one["alert"] == alert["alertname"])
        for expected in alert.get("exp_alerts", ()):
            expected["exp_annotations"] = filled(rule["annotations"], expected["exp_labels"])
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(case))
    for words in (["check", "rules", "rules.yaml"], ["test", "rules", "test.yaml"]):
        run(promtool, *words, cwd=tmp_path)


# Grafana.


def through_grafanas_types(board: dict) -> dict:
    grafana_foundation_sdk.cog.plugins.register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


def lost(given: object, kept: object, at: str = "") -> list[str]:
    """Paths of what is not the same in ``kept``; what that has beside it does not count."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            path
            for key, value in given.items()
            for path in (lost(value, kept[key], f"{at}/{key}") if key in kept else [f"{at}/{key}"])
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [path for n, pair in enumerate(zip(given, kept, strict=True))
                for path in lost(*pair, f"{at}/{n}")]  # fmt: skip
    return [] if given == kept else [at]


def test_the_dashboard_is_one_of_grafanas():
    board = dashboard()
    assert lost(board, through_grafanas_types(board)) == []
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    wrong = {**board, "tokken": 1, "panels": [{**board["panels"][1], "gridpos": {}}]}
    assert set(lost(wrong, through_grafanas_types(wrong))) == {"/tokken", "/panels/0/gridpos"}


# systemd.


def service() -> dict[str, str]:
    """Keys of the unit's section of that name; of one that is repeated the last."""
    section = UNIT.read_text().partition("[Service]")[2].partition("\n[")[0]
    return dict(re.findall(r"^(\w+)=(.*)$", section, re.M))


def test_the_unit_drains_and_starts_a_dead_engine_again():
    said = service()
    assert said["KillMode"] == "mixed" and said["Restart"] == "on-failure"
    words = shlex.split(said["ExecStart"])
    drain = int(words[words.index("--shutdown-timeout") + 1])
    assert int(said["TimeoutStopSec"]) >= drain + 10
    parser = argparse.ArgumentParser()
    launcher.add_arguments(parser)
    own = {flag for action in parser._actions for flag in action.option_strings}
    flags = {word for word in words if word.startswith("--")}
    assert flags - {"--shutdown-timeout"} == {"--api-key-file"} and flags - own == {
        "--shutdown-timeout"
    }


def test_systemd_accepts_the_unit(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no `systemd-analyze` on PATH")
    # What the unit names has to be there.
    text = UNIT.read_text().replace("/opt/attnres-serve/.venv", sys.prefix)
    for key in ("User", "Group"):
        text = re.sub(rf"^{key}=attnres$", f"{key}=root", text, flags=re.M)

    def verify(content: str) -> str:
        path = tmp_path / UNIT.name
        path.write_text(content)
        return run(analyze, "verify", "--man=no", path).stderr

    assert verify(text) == ""
    assert "KillMod" in verify(text.replace("KillMode=", "KillMod="))
    assert "mxied" in verify(text.replace("KillMode=mixed", "KillMode=mxied"))
