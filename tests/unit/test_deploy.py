"""What is in deploy/: systemd's units, container files, the Helm chart and what Helm makes of it.

Oracle: systemd-analyze, kubernetes-validate (Kubernetes' own schemas), Helm itself where its
library is installed (`pip install 'kvcast[charts]'`) or `helm` is on the path, and the daemons' own
option parsers for every configuration file. Cannot see: a cluster.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kvcast.cli.main import COMMANDS, EXTRAS
from kvcast.controller.flags import ControllerFlags
from kvcast.hostagent.flags import AgentFlags
from kvcast.routing.flags import RouteFlags
from kvcast.service.options import CommonOptions, parse_options
from kvcast.switchsim.flags import DaemonOptions

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
RENDERED = sorted((DEPLOY / "helm/rendered").glob("*.yaml"))
KINDS: dict[str, type[CommonOptions]] = {
    "agent": AgentFlags,
    "controller": ControllerFlags,
    "route": RouteFlags,
    "switch": DaemonOptions,
}


def render_module() -> Any:
    spec = importlib.util.spec_from_file_location("render", DEPLOY / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- systemd -------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    here = []
    for unit in UNITS:
        text = unit.read_text().replace("/opt/kvcast/bin/kvcast", sys.executable)
        here.append(tmp_path / unit.name)
        here[-1].write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, here)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = [line for line in done.stderr.splitlines() if "kvcast-" in line]
    assert not told, told
    assert done.returncode == 0, done.stderr


def test_units_start_commands_that_there_are_with_files_that_they_read() -> None:
    started = set()
    for unit in UNITS:
        found = re.search(
            r"^ExecStart=/opt/kvcast/bin/kvcast (\w+) --config /etc/kvcast/(\w+).toml",
            unit.read_text(),
            re.MULTILINE,
        )
        assert found is not None, unit
        assert found[1] == found[2]
        started.add(found[1])
        assert found[1] in COMMANDS
        words = ["--config", str(DEPLOY / "systemd" / f"{found[2]}.toml"), "--log-format=json"]
        parse_options(KINDS[found[1]], words)
    assert started == set(KINDS)


# --- containers ----------------------------------------------------------------------------------


def test_the_container_files_say_what_the_package_has() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    text = (DEPLOY / "containers/Containerfile").read_text()
    named = set(re.findall(r"EXTRAS=(\w+)", text))
    assert named
    assert named <= set(extras)
    assert set(EXTRAS) <= set(extras)
    for path in (DEPLOY / "containers").iterdir():
        instructions = re.sub(r"\\\n", " ", path.read_text())
        words = [
            line.split()[0] for line in instructions.splitlines() if line and line[0] not in "# "
        ]
        assert words.index("FROM") > words.index("ARG"), "which image is the builder's choice"
        assert set(words) <= {
            *("ARG", "FROM", "COPY", "RUN", "USER", "WORKDIR"),
            *("STOPSIGNAL", "ENTRYPOINT", "CMD"),
        }


@pytest.mark.slow
def test_an_image_can_be_built(tmp_path: Path) -> None:
    builder = next((name for name in ("podman", "docker") if shutil.which(name)), None)
    if builder is None or subprocess.run([builder, "info"], capture_output=True).returncode:
        pytest.skip("neither podman nor docker is running")
    words = ["build", "-f", "deploy/containers/Containerfile", "--build-arg", "EXTRAS=agent"]
    done = subprocess.run(
        [builder, *words, "-t", "kvcast:test", "."], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode and re.search("pull|registry|manifest|lookup", done.stderr):
        pytest.skip("the base image cannot be had here")
    assert done.returncode == 0, done.stderr[-2000:]
    done = subprocess.run(
        [builder, "run", "--rm", "kvcast:test", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("kvcast")


# --- the chart -----------------------------------------------------------------------------------


def objects(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def pods(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What runs pods, and the pods' specifications."""
    for each in objects(path):
        if each["kind"] in ("DaemonSet", "Deployment", "StatefulSet"):
            yield each, each["spec"]["template"]["spec"]


def test_there_is_a_rendering_of_each_file_of_values_and_it_is_of_this_chart() -> None:
    render = render_module()
    values = sorted((DEPLOY / "helm/values").glob("*.yaml"))
    assert [path.name for path in values] == [path.name for path in RENDERED]
    for given, made in zip(values, RENDERED, strict=True):
        assert f"\n# of: {render.stamp(given)}\n" in made.read_text(), "run deploy/render.py"


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", ["1.27", "1.35"])
def test_kubernetes_schemas_allow_what_is_rendered(path: Path, version: str) -> None:
    kinds = []
    for each in objects(path):
        kubernetes_validate.validate(each, version, strict=True)
        kinds.append(each["kind"])
    assert {"ConfigMap", "DaemonSet", "Deployment", "PersistentVolumeClaim", "Service"} <= set(
        kinds
    )


def test_kubernetes_schemas_refuse_what_is_wrong() -> None:
    wrong = next(each for each in objects(RENDERED[0]) if each["kind"] == "DaemonSet")
    wrong["spec"]["template"]["spec"]["hostNetwrok"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.31", strict=True)


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.stem)
def test_daemons_read_the_configuration_that_the_chart_writes(path: Path, tmp_path: Path) -> None:
    read = 0
    for each in objects(path):
        for name, text in each.get("data", {}).items():
            part = name.removesuffix(".toml")
            file = tmp_path / f"{each['metadata']['name']}.toml"
            file.write_text(text)
            flags = parse_options(KINDS[part], ["--config", str(file)])
            read += 1
            if isinstance(flags, AgentFlags):
                assert flags.socket == "/run/kvcast/agent.sock"
                assert flags.arena_bytes in (64 << 30, 128 << 30)
                assert flags.transport == "udp"
            if isinstance(flags, RouteFlags):
                assert [engine.name for engine in flags.engine][-1] == "other"
                assert len(flags.engine) == 4
                assert flags.kv_bytes_per_token == 128 << 10
    assert read >= 3


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.stem)
def test_what_the_chart_names_is_there(path: Path) -> None:
    """Volumes, ports, selectors, configuration maps and commands that refer to one another."""
    maps = {each["metadata"]["name"] for each in objects(path) if each["kind"] == "ConfigMap"}
    labels = []
    for owner, pod in pods(path):
        template = owner["spec"]["template"]["metadata"]["labels"]
        labels.append(template)
        assert owner["spec"]["selector"]["matchLabels"].items() <= template.items()
        volumes = {each["name"]: each for each in pod["volumes"]}
        for each in volumes.values():
            if "configMap" in each:
                assert each["configMap"]["name"] in maps
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {each["name"] for each in container["volumeMounts"]} <= set(volumes)
            ports = {each["name"] for each in container.get("ports", [])}
            for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
                probe = container.get(kind, {})
                how = probe.get("httpGet") or probe.get("tcpSocket") or {"port": None}
                assert how["port"] is None or how["port"] in ports
            if container["image"] == "kvcast:0.1.0" and "args" in container:
                command, config, _ = container["args"]
                assert command in COMMANDS
                folder, file = config.removeprefix("--config=").rsplit("/", 1)
                assert file == f"{command}.toml"
                assert folder in {each["mountPath"] for each in container["volumeMounts"]}
    for each in objects(path):
        if each["kind"] == "Service":
            chosen = each["spec"]["selector"].items()
            assert any(chosen <= one.items() for one in labels)


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.stem)
def test_nothing_of_ours_runs_with_more_rights_than_it_needs(path: Path) -> None:
    for owner, pod in pods(path):
        assert pod["automountServiceAccountToken"] is False
        part = owner["metadata"]["labels"]["app.kubernetes.io/component"]
        assert pod.get("hostNetwork", False) is (part == "agent")
        for container in pod["containers"]:
            if part != "vllm":
                rights = container["securityContext"]
                assert rights["runAsNonRoot"] is True
                assert rights["allowPrivilegeEscalation"] is False
                assert rights["capabilities"] == {"drop": ["ALL"]}
                assert rights["readOnlyRootFilesystem"] is True


def test_an_agent_has_the_memory_that_its_arena_takes() -> None:
    agents = {
        path.stem: pod
        for path in RENDERED
        for owner, pod in pods(path)
        if owner["kind"] == "DaemonSet"
    }
    huge, plain = agents["engines"], agents["pool"]
    assert huge["containers"][0]["resources"]["limits"]["hugepages-2Mi"] == "128Gi"
    assert "memory" in huge["containers"][0]["resources"]["limits"], "Kubernetes wants it beside"
    assert {"name": "hugepages", "emptyDir": {"medium": "HugePages-2Mi"}} in huge["volumes"]
    assert "limits" not in plain["containers"][0]["resources"], "its arena counts as its memory"
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in plain["volumes"]


needs_helm = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None,
    reason="Helm's library is not installed (pip install 'kvcast[charts]')",
)


@needs_helm
def test_helm_makes_what_is_committed() -> None:
    render = render_module()
    for path in RENDERED:
        assert render.rendered(DEPLOY / "helm/values" / path.name) == path.read_text()


@needs_helm
@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "switch"),
        ({"controller": {"switch": "s:1"}, "agent": {"nodes": []}}, "nodes"),
        ({"insecure": False}, "insecure"),
        ({"agent": {"nodes": [{"name": "A b"}]}}, "nodes"),
        ({"vllm": {"enabled": True}}, "vllm.image"),
        ({"route": {"enabled": True}}, "no engine"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_helm_refuses_values_that_make_no_pool(values: dict[str, Any], why: str) -> None:
    import helm_python

    node = {"name": "n", "host": "h", "ip": "10.0.0.1", "mac": "02:00:00:00:00:01", "switchPort": 1}
    good: dict[str, Any] = {
        "insecure": True,
        "controller": {"switch": "s:1"},
        "agent": {"nodes": [node]},
    }
    given = good | values if values else {}
    with helm_python.Chart.load(str(DEPLOY / "helm/kvcast")) as chart:
        chart.validate_schema(good)
        chart.render(good, name="r", namespace="n")

        def make() -> None:
            chart.validate_schema(given)
            chart.render(given, name="r", namespace="n")

        with pytest.raises(helm_python.HelmError, match=why):
            make()


@pytest.mark.skipif(shutil.which("helm") is None, reason="no helm")
@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.stem)
def test_the_helm_command_makes_the_same_objects(path: Path) -> None:
    words = ["helm", "template", "pool", str(DEPLOY / "helm/kvcast"), "--namespace", "inference"]
    values = str(DEPLOY / "helm/values" / path.name)
    done = subprocess.run([*words, "-f", values], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

    def named(each: dict[str, Any]) -> tuple[str, str]:
        return each["kind"], each["metadata"]["name"]

    made = [each for each in yaml.safe_load_all(done.stdout) if each]
    assert sorted(made, key=named) == sorted(objects(path), key=named)
