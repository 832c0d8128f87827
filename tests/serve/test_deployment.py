"""The examples for systemd, Docker and Kubernetes: they parse, name options that exist, and leave time to drain."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from bertblocks.cli.main import app
from bertblocks.serve.auth import VARIABLE
from bertblocks.serve.front import Front
from bertblocks.serve.metrics import Metrics

FOLDER = Path(__file__).parents[2] / "examples" / "serve"


def parse(arguments: list[str]) -> dict[str, Any]:
    """The parameters that `bertblocks serve` reads from arguments; an unknown option is an error."""
    main: Any = get_command(app)
    return dict(main.commands["serve"].make_context("serve", list(arguments)).params)


def read_unit() -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((FOLDER / "bertblocks.service").read_text())
    return unit


def docker_entrypoint() -> list[str]:
    (line,) = re.findall(r"^ENTRYPOINT (.+)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    return list(json.loads(line))


def read_pod() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The specification of the pod, its container, and the service."""
    deployment, service = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container, service


def test_the_unit_waits_for_the_drain() -> None:
    service = read_unit()["Service"]
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("bertblocks", "serve")
    options = parse(arguments)
    assert int(service["TimeoutStopSec"]) > options["drain"]
    assert int(service["LimitNOFILE"]) > options["max_connections"]
    assert str(options["api_key_file"]) == "${CREDENTIALS_DIRECTORY}/" + service["LoadCredential"].partition(":")[0]


def test_the_image_starts_the_server() -> None:
    entrypoint = docker_entrypoint()
    assert entrypoint[:2] == ["bertblocks", "serve"]
    options = parse([*entrypoint[2:], "a-model"])
    text = (FOLDER / "Dockerfile").read_text()
    assert f"EXPOSE {options['port']}\n" in text
    assert f":{options['port']}/ready" in text
    assert options["host"] == "0.0.0.0"
    assert set(re.findall(r"^([A-Z]+) ", text, re.MULTILINE)) >= {"FROM", "RUN", "USER", "ENTRYPOINT"}


def test_the_pod_is_probed_and_drained() -> None:
    pod, container, service = read_pod()
    options = parse([*docker_entrypoint()[2:], *container["args"]])
    (port,) = container["ports"]
    assert port["containerPort"] == options["port"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    paths = {
        probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert paths == {"startupProbe": "/ready", "livenessProbe": "/live", "readinessProbe": "/ready"}
    assert set(paths.values()) <= set(Front(Metrics())._routes)
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > sleep + options["drain"]
    assert [variable["name"] for variable in container["env"]] == [VARIABLE]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_an_option_that_does_not_exist_would_be_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["model", "--no-such-option"])
