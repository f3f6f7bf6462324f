"""The files in `deploy/`: what they name exists in the code, and what a cluster needs of them is there."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from inlay.cli.serve import app
from inlay.service.settings import ServeSettings
from inlay.service.web.health_routes import router
from inlay.service.web.identity import make_host_check

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
HEALTH = {route.path for route in router.routes}


def read(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf8")))


def walk(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping in a document."""
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value)


def find_pods(path: Path) -> list[dict[str, Any]]:
    """Return the specs of all pods of a file."""
    return [node for document in read(path) for node in walk(document) if "containers" in node]


def find_containers(path: Path) -> list[dict[str, Any]]:
    return [container for pod in find_pods(path) for container in pod["containers"]]


def find_options() -> dict[str, Any]:
    """Return the options of `inlay serve` by their names."""
    options = typer.main.get_command(app).params
    return {name: option for option in options for name in (*option.opts, *option.secondary_opts)}


def split_arguments(arguments: list[str]) -> list[tuple[str, str | None]]:
    """Return the options of a command line, each with its value."""
    found: list[tuple[str, str | None]] = []
    for word in arguments:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found.append((name, value or None))
        else:
            found[-1] = (found[-1][0], word)
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_commands_of_manifests_are_commands_of_inlay(path):
    options = find_options()
    for container in find_containers(path):
        arguments = container.get("args", [])
        if not arguments:
            continue
        assert arguments[0] == "serve"
        for name, value in split_arguments(arguments[1:]):
            assert name in options, name
            assert (value is None) == options[name].is_flag, name


def test_the_service_of_manifests_waits_as_long_as_it_drains():
    for path in MANIFESTS:
        for pod in find_pods(path):
            for name, value in split_arguments(pod["containers"][0].get("args", ["serve"])[1:]):
                if name == "--drain":
                    assert pod["terminationGracePeriodSeconds"] > int(str(value).removesuffix("s"))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_probes_ask_routes_of_health_that_answer_their_host(path):
    for container in find_containers(path):
        if "args" not in container:
            continue
        settings = dict(split_arguments(container["args"][1:]))
        answers = make_host_check(
            ServeSettings(Path("/data"), host=str(settings["--host"]), hosts=(str(settings["--allow-host"]),))
        )
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["http"] == ServeSettings.port
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[kind]["httpGet"]
            assert asked["path"] in HEALTH
            assert asked["port"] == "http"
            assert answers({header["name"]: header["value"] for header in asked["httpHeaders"]}["Host"])
        # What restarts the pod must not depend on what a restart does not mend.
        assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_secrets_come_by_reference_and_their_variables_are_read(path):
    code = "".join(file.read_text(encoding="utf8") for file in (ROOT / "src").rglob("*.py"))
    text = path.read_text(encoding="utf8")
    assert not any(document["kind"] == "Secret" for document in read(path))
    assert not re.search(r"postgres(ql)?://\w+:\w", text)
    for document in read(path):
        for node in walk(document):
            for variable in node.get("env", ()):
                assert "value" not in variable or not re.search("TOKEN|KEY|SECRET|PASSWORD", variable["name"])
    for name in re.findall(r"\b(INLAY_[A-Z_]+|AWS_[A-Z_]+)\b", text):
        assert name in code, name


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_container_is_bounded_and_has_no_rights(path):
    for pod in find_pods(path):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == int(find_in_dockerfile(r"--uid (\d+)"))
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            for bound in ("requests", "limits"):
                assert set(container["resources"][bound]) >= {"cpu", "memory"}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            folders = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert find_in_dockerfile(r"INLAY_HOME=(\S+)") in folders
            names = {volume["name"] for volume in pod["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= names


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_images_are_one_version_of_ours(path):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]["version"]
    images = {container["image"] for container in find_containers(path)}
    assert images == {f"registry.example.org/inlay:{version}"}


def test_every_pod_that_serves_is_behind_a_network_policy():
    for path in MANIFESTS:
        documents = read(path)
        chosen = [
            document["spec"]["podSelector"]["matchLabels"]
            for document in documents
            if document["kind"] == "NetworkPolicy"
        ]
        for document in documents:
            for node in walk(document):
                if "containers" in node.get("spec", {}) and document["kind"] not in ("Pod", "PersistentVolumeClaim"):
                    assert node["metadata"]["labels"] in chosen, (path.name, node["metadata"])
        for document in documents:
            if document["kind"] == "NetworkPolicy":
                assert set(document["spec"]["policyTypes"]) == {"Ingress", "Egress"}
                assert all(rule.get("from") for rule in document["spec"]["ingress"])
            if document["kind"] == "Service":
                assert document["spec"].get("type", "ClusterIP") == "ClusterIP"


def test_the_service_reaches_the_pods_it_selects():
    for path in MANIFESTS:
        documents = read(path)
        for service in (document for document in documents if document["kind"] == "Service"):
            deployment = next(document for document in documents if document["kind"] == "Deployment")
            labels = deployment["spec"]["template"]["metadata"]["labels"]
            assert service["spec"]["selector"].items() <= labels.items()
            assert deployment["spec"]["selector"]["matchLabels"] == labels
            (container,) = deployment["spec"]["template"]["spec"]["containers"]
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= {p["name"] for p in container["ports"]}
            keeps_home = any("persistentVolumeClaim" in volume for pod in find_pods(path) for volume in pod["volumes"])
            assert keeps_home == ("strategy" in deployment["spec"]), "two services refuse each other one home"
            if keeps_home:
                assert deployment["spec"]["strategy"] == {"type": "Recreate"}
                assert deployment["spec"]["replicas"] == 1


def test_ray_lets_in_who_has_the_token_and_gives_engines_what_they_ask_for():
    for path in MANIFESTS:
        documents = read(path)
        for cluster in (document for document in documents if document["kind"] == "RayCluster"):
            spec, name = cluster["spec"], cluster["metadata"]["name"]
            (web,) = (document for document in documents if document["kind"] == "Deployment")
            (container,) = web["spec"]["template"]["spec"]["containers"]
            settings = dict(split_arguments(container["args"][1:]))
            # 1. the token
            assert spec["authOptions"]["mode"] == "token"
            given = {variable["name"]: variable for variable in container["env"]}
            assert given["RAY_AUTH_MODE"]["value"] == "token"
            reference = given["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
            assert reference == {"name": spec["authOptions"]["secretName"], "key": "auth_token"}
            assert spec["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "127.0.0.1"
            # 2. the address, as KubeRay names the head's service
            assert settings["--on"] == f"ray://{name}-head-svc:10001"
            # 3. room for as many engines and trainers as may be asked for, and at least for the fewest
            (workers,) = spec["workerGroupSpecs"]
            (worker,) = workers["template"]["spec"]["containers"]
            assert worker["resources"]["limits"]["cpu"] == settings["--ray-cpus"]
            ranges = [str(settings[option]).split("-") for option in ("--engines", "--trainers")]
            fewest, most = (sum(int(one[place]) for one in ranges) for place in (0, 1))
            assert workers["minReplicas"] == fewest
            assert workers["maxReplicas"] == most
            # 4. one version of Ray
            constraints = (ROOT / "constraints.txt").read_text(encoding="utf8").split()
            assert f"ray=={spec['rayVersion']}" in constraints


def test_the_serve_application_of_a_manifest_is_ours_and_finds_its_resources():
    from importlib import import_module

    pytest.importorskip("ray.serve")
    for path in MANIFESTS:
        for service in (document for document in read(path) if document["kind"] == "RayService"):
            (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
            module, _, name = application["import_path"].partition(":")
            rooms = import_module(module)
            settings = rooms.make_settings(rooms.GatewayArguments(**application["args"]))
            assert callable(getattr(rooms, name))
            assert settings.store == application["args"]["store"]
            # 1. the token
            cluster = service["spec"]["rayClusterConfig"]
            assert cluster["authOptions"]["mode"] == "token"
            constraints = (ROOT / "constraints.txt").read_text(encoding="utf8").split()
            assert f"ray=={cluster['rayVersion']}" in constraints
            # 2. each replica has a pod
            (deployment,) = application["deployments"]
            assert deployment["name"] == rooms.NAME
            (wanted,) = deployment["ray_actor_options"]["resources"].items()
            gateways, engines = cluster["workerGroupSpecs"]
            assert json.loads(gateways["rayStartParams"]["resources"].strip('"').replace("\\", "")) == dict([wanted])
            assert gateways["replicas"] == gateways["minReplicas"] == deployment["num_replicas"]
            # 3. each engine and trainer has one, and nothing else is placed there
            (worker,) = engines["template"]["spec"]["containers"]
            assert settings.cluster is not None
            assert float(worker["resources"]["limits"]["cpu"]) == settings.cluster.num_cpus
            fewest, most = (settings.cluster.engines[place] + settings.cluster.trainers[place] for place in (0, 1))
            assert (engines["minReplicas"], engines["maxReplicas"]) == (fewest, most)
            assert (
                gateways["rayStartParams"]["num-cpus"] == cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
            )


def test_the_image_is_built_with_extras_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
    asked = [DEPLOY / "Dockerfile", *MANIFESTS]
    found = [re.findall(r"EXTRAS=([a-z0-9,-]+)", path.read_text(encoding="utf8")) for path in asked]
    extras = {extra for lines in found for line in lines for extra in line.split(",")}
    assert "serve" in extras
    assert extras <= set(project["optional-dependencies"])


def find_in_dockerfile(pattern: str) -> str:
    found = re.search(pattern, (DEPLOY / "Dockerfile").read_text(encoding="utf8"))
    assert found is not None
    return found[1]
