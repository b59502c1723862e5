"""Manifests and image: they parse, their parts find each other, and every command line is accepted by the program that
gets it."""

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve.cli import options
from serve.cli.commands import launch, serve

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
VARIABLES = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "127.0.0.1"}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Templates of the pods that it makes."""
    spec = document["spec"]
    if document["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    return [spec["template"]] if "template" in spec else []


def containers(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pod and container."""
    found = []
    for document in documents(path):
        for pod in pods(document):
            found += [(pod, container) for container in pod["spec"]["containers"]]
    return found


def command(container: dict[str, Any]) -> list[str]:
    words = [*container["command"], *container["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda found: VARIABLES[found[1]], word) for word in words]


def test_the_manifests_are_there():
    assert {path.stem for path in MANIFESTS} == {"one-replica", "one-machine", "replicas", "two-hosts"}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_command_lines_are_accepted(path, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("k" * 32)
    keys.chmod(0o440)
    for pod, container in containers(path):
        program, subcommand, *argv = command(container)
        if program == "smg":
            routers = pytest.importorskip("smg.launch_router", reason="needs the gateway")
            assert subcommand == "launch"
            assert routers.parse_router_args(argv).worker_urls
            continue
        assert program == "apt-jax"
        parser = options.Parser(prog=subcommand)
        {"serve": serve, "launch": launch}[subcommand].add_arguments(parser)
        args = parser.parse_args(argv)
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        if subcommand == "launch":
            if importlib.util.find_spec("smg") is None:
                pytest.skip("needs the gateway")
            seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
            argv += ["--port=0", "--grpc-port=0"]  # free ones: other servers may have the defaults
            plan = launch.plan(parser.parse_args(argv), argv, seen)
            used = ",".join(replica.env["CUDA_VISIBLE_DEVICES"] for replica in plan.replicas)
            assert used == seen["CUDA_VISIBLE_DEVICES"]  # all of them
        else:
            if args.api_key_file is not None:
                mounts = {m["mountPath"] for m in container["volumeMounts"]}
                assert str(Path(args.api_key_file).parent) in mounts
                args.api_key_file = str(keys)
            assert (args.join_key_file is not None) == (args.nnodes > 1)
            if args.join_key_file is not None:
                mounted = {
                    m["name"]
                    for m in container["volumeMounts"]
                    if m["mountPath"] == str(Path(args.join_key_file).parent)
                }
                secrets = [v["secret"] for v in pod["spec"]["volumes"] if v["name"] in mounted]
                assert [(s["secretName"], s["defaultMode"]) for s in secrets] == [("apt-jax-join-key", 0o440)]
            serve.check(args)
            assert args.tensor_parallel_size == gpus * args.nnodes


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_ports_of_containers_are_those_that_the_programs_open(path):
    for _, container in containers(path):
        program, subcommand, *argv = command(container)
        flags = dict(word.removeprefix("--").split("=", 1) for word in argv if "=" in word)
        http = int(flags.get("port", 8000))
        opened = {"http": http, "grpc": int(flags.get("grpc-port", 50051))}
        if subcommand == "launch":
            metrics = flags.get("prometheus-port") or http + int(flags.get("replicas", 1)) + 1
            opened = {"http": http, "metrics": int(metrics)}
        if "master-port" in flags:
            opened["master"] = int(flags["master-port"])
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        assert ports == ({} if "--headless" in argv else opened), program


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_names_that_refer_to_each_other_exist(path):
    made = documents(path)
    all_pods = [pod for document in made for pod in pods(document)]

    def chosen(selector: dict[str, str]) -> list[dict[str, Any]]:
        return [p for p in all_pods if selector.items() <= p["metadata"]["labels"].items()]

    for document in made:
        spec = document["spec"]
        if document["kind"] == "Service":
            [pod] = chosen(spec["selector"])
            named = {p["name"] for c in pod["spec"]["containers"] for p in c["ports"]}
            assert {port["targetPort"] for port in spec["ports"]} <= named
        elif document["kind"] == "NetworkPolicy":
            assert chosen(spec["podSelector"]["matchLabels"])
            assert chosen(spec["ingress"][0]["from"][0]["podSelector"]["matchLabels"])
        elif "selector" in spec:
            assert chosen(spec["selector"]["matchLabels"]) == pods(document)
        if document["kind"] == "StatefulSet":
            services = {d["metadata"]["name"] for d in made if d["kind"] == "Service"}
            assert spec["serviceName"] in services
            urls = [word for _, c in containers(path) for word in command(c) if "://" in word]
            name = document["metadata"]["name"]
            assert urls == [f"grpc://{name}-{i}.{spec['serviceName']}:50051" for i in range(spec["replicas"])]
    for pod, container in containers(path):
        named = {port["name"] for port in container.get("ports", ())}
        probes = [container[key] for key in container if key.endswith("Probe")]
        assert {probe["httpGet"]["port"] for probe in probes} <= named
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_pods_are_given_the_time_to_drain(path):
    for pod, container in containers(path):
        flags = dict(word.split("=", 1) for word in command(container) if "=" in word)
        drain = flags.get("--shutdown-timeout") or flags["--shutdown-grace-period-secs"]
        before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        needed = float(drain) + (float(before[1]) if before else 0)
        assert pod["spec"]["terminationGracePeriodSeconds"] >= needed + 10


def test_the_image_has_extras_that_exist_and_files_that_are_needed():
    text = (ROOT / "deploy/Containerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for chosen in re.findall(r'EXTRAS="([^"]*)"', text):
        assert set(chosen.split()) <= set(extras)
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    makefile = (ROOT / "Makefile").read_text()
    versions = re.findall(r"UV_VERSION(?: := |=)([\d.]+)", makefile + text)
    assert len(versions) == 2
    assert len(set(versions)) == 1
