"""The compose files: in the specification's format, pinned, closed, over files that are tested."""

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from compose_spec import PyCompose

from tests.deploy.dockerfile import ROOT, is_pinned, read_dockerfile
from tests.deploy.shoal_help import options
from tests.grafana.scraper import RULES, need

FOLDER = ROOT / "deploy" / "compose"
FILES = ("compose.yaml", "compose.gpu.yaml")
GRAFANA = ROOT / "grafana"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_ENDING_SECONDS = 15
"""What the processes of a node may take to end, after the requests."""


def read(file: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read a compose file as Docker Compose does: YAML after its variables, of known format."""
    values = environ or {}
    text = _VARIABLE.sub(lambda m: values.get(m[1]) or m[2] or "", (FOLDER / file).read_text())
    check_format(text)
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def check_format(text: str) -> None:
    """Raise ValueError if a compose file has a key, a type or a value that there is not."""
    # Docker takes an image by tag and digest at once, the parser by one of them. It knows no merge
    # keys either, so it gets what they make.
    untagged = re.sub(r"(image: \S+):[^:@\s]+@", r"\1@", text)
    PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(untagged)))


BASE = read("compose.yaml")
SERVICES: Mapping[str, dict[str, Any]] = BASE["services"]


def mounts(service: str) -> list[list[str]]:
    """Return source, target and mode of every volume."""
    return [volume.split(":") for volume in SERVICES[service].get("volumes", [])]


def binds(service: str) -> dict[str, Path]:
    """Return what of this machine is mounted, by target."""
    return {
        target: (FOLDER / source).resolve()
        for source, target, *_ in mounts(service)
        if source.startswith(".")
    }


@pytest.mark.parametrize("file", FILES)
def test_it_has_the_format_of_the_specification(file: str) -> None:
    assert read(file)["services"]


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("read_only:", "readonly:", "readonly"),
        ("service_healthy", "service_is_healthy", "service_is_healthy"),
        ("interval: 10s", "interval: ten", "duration"),
        ("retries: 6", "retries: many", "many"),
        ("\nservices:", "\nservice:", "missing field `services`"),
    ],
)
def test_the_format_is_checked(right: str, wrong: str, complaint: str) -> None:
    text = "\n" + yaml.safe_dump(BASE)
    assert right in text
    with pytest.raises(ValueError, match=complaint):
        check_format(text.replace(right, wrong))


def test_the_gpu_file_changes_the_node_alone() -> None:
    services = read("compose.gpu.yaml")["services"]
    assert list(services) == ["shoal"]
    (device,) = services["shoal"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert not {"command", "volumes", "ports", "environment"} & set(services["shoal"])


@pytest.mark.parametrize("service", SERVICES)
def test_containers_can_do_little(service: str) -> None:
    settings = SERVICES[service]
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "user"} & set(settings)


@pytest.mark.parametrize("service", SERVICES)
def test_only_this_machine_reaches_them(service: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[service]["ports"])


@pytest.mark.parametrize("service", SERVICES)
def test_images_are_pinned_or_built_here(service: str) -> None:
    settings = SERVICES[service]
    assert is_pinned(settings["image"]) != ("build" in settings)


@pytest.mark.parametrize(("file", "kind"), [(FILES[0], "cpu"), (FILES[1], "cuda")])
def test_the_node_is_built_from_its_dockerfile(file: str, kind: str) -> None:
    node = read(file)["services"]["shoal"]
    assert node["image"] == f"shoal:{kind}"
    context = (FOLDER / node["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / node["build"]["dockerfile"]).name == f"Dockerfile.{kind}"


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_mounted_exists_and_cannot_be_changed(service: str) -> None:
    for source, _, *mode in mounts(service):
        if source.startswith("."):
            assert (FOLDER / source).is_dir(), source
            assert mode == ["ro"], source
        else:
            assert source in BASE["volumes"], source
    used = {source for name in SERVICES for source, *_ in mounts(name)}
    assert set(BASE["volumes"]) <= used


def test_what_the_node_writes_to_is_mounted() -> None:
    node = SERVICES["shoal"]
    writable = {target for source, target, *_ in mounts("shoal") if source in BASE["volumes"]}
    writable |= {mount.partition(":")[0] for mount in node["tmpfs"]}
    for name, path in read_dockerfile("cpu").image.environment.items():
        if name in ("HOME", "TMPDIR") or name.endswith(("_HOME", "_ROOT", "_DIR")):
            assert any(path == place or path.startswith(f"{place}/") for place in writable), name
    assert node["shm_size"] == "1gb"


def test_every_service_says_whether_it_is_well() -> None:
    assert read_dockerfile("cpu").image.all("HEALTHCHECK")
    assert all("healthcheck" in SERVICES[name] for name in set(SERVICES) - {"shoal"})
    for settings in SERVICES.values():
        for name, when in settings.get("depends_on", {}).items():
            assert name in SERVICES
            assert when == {"condition": "service_healthy"}


@pytest.mark.parametrize("environ", [{}, {"SHOAL_MODEL": "/models/m", "SHOAL_ARGS": "--seed 1"}])
def test_the_node_has_options_that_there_are(environ: dict[str, str]) -> None:
    words = shlex.split(read("compose.yaml", environ)["services"]["shoal"]["command"])
    assert words[0] == "serve"
    assert words[1] == environ.get("SHOAL_MODEL", "--host")
    assert {word for word in words if word.startswith("--")} <= options("serve")
    assert words[words.index("--host") + 1] == "0.0.0.0"


def test_the_node_has_time_to_end() -> None:
    words = shlex.split(SERVICES["shoal"]["command"])
    running = int(words[words.index("--shutdown-timeout") + 1])
    grace = int(SERVICES["shoal"]["stop_grace_period"].removesuffix("s"))
    assert grace >= running + _ENDING_SECONDS


def test_the_page_explains_every_variable() -> None:
    page = (FOLDER / "README.md").read_text()
    named = {name for file in FILES for name, _ in _VARIABLE.findall((FOLDER / file).read_text())}
    assert named
    assert {name for name in named if f"`{name}`" not in page} == set()


# --- Prometheus and Grafana get what tests/grafana tests ---


def flag(service: str, name: str) -> str:
    """Return the value of an option of a service's command."""
    (value,) = (word[len(name) + 1 :] for word in SERVICES[service]["command"] if name in word)
    return value


def test_prometheus_watches_the_node_by_the_tested_rules() -> None:
    target = Path(flag("prometheus", "--config.file"))
    config = binds("prometheus")[str(target.parent)] / target.name
    settings = yaml.safe_load(config.read_text())
    rules = [path for glob in settings["rule_files"] for path in config.parent.glob(glob)]
    assert set(rules) == set(RULES.glob("*.yml"))
    (job,) = settings["scrape_configs"]
    assert job["job_name"] == "shoal"
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert host in SERVICES
    words = shlex.split(SERVICES["shoal"]["command"])
    assert port == words[words.index("--metrics-port") + 1]


def test_prometheus_accepts_its_configuration() -> None:
    config = GRAFANA / "prometheus" / "prometheus.yml"
    checked = subprocess.run(
        [need("promtool"), "check", "config", str(config)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_grafana_finds_the_dashboards_and_prometheus() -> None:
    provisioning = binds("grafana")["/etc/grafana/provisioning"]
    assert provisioning == GRAFANA / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/shoal.yml").read_text())["providers"]
    assert binds("grafana")[provider["options"]["path"]] == GRAFANA / "dashboards"
    (source,) = yaml.safe_load((provisioning / "datasources/shoal.yml").read_text())["datasources"]
    address = urlsplit(source["url"])
    assert address.hostname in SERVICES
    assert f":{address.port}" in SERVICES["prometheus"]["ports"][0]


def test_grafana_begins_with_a_dashboard_that_is_there() -> None:
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (binds("grafana")[str(home.parent)] / home.name).is_file()
