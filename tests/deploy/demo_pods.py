#!/usr/bin/env python3
"""Turns the CPU demo's manifests into pods that `podman kube play` runs on one machine.

demo_pods.py FOLDER < kubectl kustomize deploy/kubernetes/overlays/cpu-demo > pods.yaml

What a cluster does is done here: a pod of the StatefulSet, and a pod of the DaemonSet for each of the nodes a and b; the
nodes' names and addresses; folders of FOLDER (tls, access, state, data, state-a, state-b) in place of Secrets, claims and
folders of nodes; the coordinator's address. Containers, arguments, users, mounts and init containers are the manifests'.
Requests and limits are left out: they need control groups of podman's own."""

import copy
import sys

import yaml

NODE_IP = "127.0.0.1"
METRICS_PORTS = {"a": 7081, "b": 7082}  # both nodes are this machine
# podman 4.3 removes init containers of its default kind while they still run, at times.
ANNOTATIONS = {"io.podman.annotations.init.container.type": "always"}


def folder_of(volume, node):
    return {"tls": "tls" if node is None else "tls/nodes", "access": "access", "data": "data",
            "state": "state" if node is None else f"state-{node}"}.get(volume)


def pod(name, template, root, node=None):
    spec = copy.deepcopy(template["spec"])
    values = {"spec.nodeName": node, "status.hostIP": NODE_IP}
    names = {volume["name"] for volume in spec["volumes"]} | {"state"}
    spec["volumes"] = [
        {"name": volume, "hostPath": {"path": f"{root}/{folder_of(volume, node)}", "type": "Directory"}}
        if folder_of(volume, node) else {"name": volume, "emptyDir": {}} for volume in sorted(names)]
    for container in spec["containers"] + spec.get("initContainers", []):
        container.pop("resources", None)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            container.pop(probe, None)
        environment = {}
        for variable in container.pop("env", []):
            environment[variable["name"]] = values[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        for i, argument in enumerate(container.get("args", [])):
            for key, value in environment.items():
                argument = argument.replace(f"$({key})", value)
            argument = argument.replace("--coordinator=ringleader-coordinator:", f"--coordinator={NODE_IP}:")
            if node is not None:
                argument = argument.replace(":7081", f":{METRICS_PORTS[node]}")
            container["args"][i] = argument
        container["ports"] = []
    spec["hostNetwork"] = True
    spec["restartPolicy"] = "Always"
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "annotations": ANNOTATIONS}, "spec": spec}


def main():
    root = sys.argv[1]
    pods = []
    for manifest in yaml.safe_load_all(sys.stdin):
        if manifest["kind"] == "StatefulSet":
            pods.append(pod("coordinator", manifest["spec"]["template"], root))
        if manifest["kind"] == "DaemonSet":
            pods += [pod(f"worker-{node}", manifest["spec"]["template"], root, node) for node in METRICS_PORTS]
    yaml.safe_dump_all(pods, sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main()
