#!/usr/bin/env python3
"""What can be said of manifests, units and the commands in the documentation without a cluster. Needs PyYAML, and kubectl where it is."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
BUILTINS = {"echo", "read", "exit", "set", "shift", "cd", "umask", "exec", "trap", "waits", "case", "esac", "return", "ringleader-coordinator", "ringctl"}


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def pod_specs(manifest):
    spec = manifest["spec"]
    spec = spec.get("jobTemplate", {}).get("spec", spec)
    return [spec["template"]["spec"]] if "template" in spec else []


def all_manifests():
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        for manifest in documents(path):
            if isinstance(manifest, dict) and "spec" in manifest:
                yield path, manifest


class Manifests(unittest.TestCase):

    def test_pods_of_volumes_have_a_group_that_may_write(self):
        for path in (KUBERNETES / "base/worker.yaml", KUBERNETES / "base/coordinator.yaml", KUBERNETES / "components/backup/backup.yaml",
                     KUBERNETES / "components/backup/restore.yaml"):
            specs = [spec for manifest in documents(path) for spec in pod_specs(manifest)]
            self.assertEqual(len(specs), 1, path)
            self.assertEqual(specs[0]["securityContext"].get("fsGroup"), 65532, path)
            self.assertEqual(specs[0]["securityContext"].get("fsGroupChangePolicy"), "OnRootMismatch", path)

    def test_nobody_but_root_is_given_capabilities(self):
        """A user that is not root does not get them, whatever a manifest adds."""
        for path, manifest in all_manifests():
            for spec in pod_specs(manifest):
                for container in spec.get("containers", []) + spec.get("initContainers", []):
                    context = container.get("securityContext", {})
                    if context.get("runAsUser") != 0:
                        self.assertNotIn("add", context.get("capabilities", {}), f"{path}: {container['name']}")

    def test_the_image_has_what_commands_call(self):
        build = (ROOT / "deploy/container/build.sh").read_text()
        applets = set(re.search(r"for applet in ([^;]+);", build)[1].split())
        self.assertIn("tar", applets, "kubectl cp")
        for path, manifest in all_manifests():
            for spec in pod_specs(manifest):
                for container in spec["containers"]:
                    commands = [container.get("command")]
                    commands += [probe.get("exec", {}).get("command") for name, probe in container.items() if name.endswith("Probe")]
                    for command in filter(None, commands):
                        if command[0] != "/bin/sh":
                            continue
                        script = re.sub(r"#.*|\"[^\"]*\"", "", command[-1].replace("$((", ""))
                        called = re.findall(r"(?:^|[;&|(]|\bdo|\bthen|\buntil|\bwhile|\$\()\s*([a-z][\w-]*)(?=\s)", script, re.MULTILINE)
                        called += re.findall(r"\$\(([a-z]+)", command[-1])
                        known = {"if", "then", "else", "fi", "for", "while", "until", "do", "done"} | BUILTINS | applets
                        known |= set(re.findall(r"^\s*(\w+)\(\) \{", script, re.MULTILINE))
                        self.assertLessEqual(set(called), known, f"{path}: {container['name']}")
        for command in re.findall(r"exec [\w-]+ -- (\w+)", (ROOT / "docs/kubernetes.md").read_text()):
            self.assertIn(command, applets | {"ringleader"}, "docs/kubernetes.md")

    def test_overlays_render(self):
        if not shutil.which("kubectl"):
            self.skipTest("no kubectl")
        for overlay in sorted((KUBERNETES / "overlays").iterdir()):
            subprocess.run(["kubectl", "kustomize", overlay], check=True, stdout=subprocess.DEVNULL)

    def test_workers_call_the_coordinator_by_a_name_of_its_certificate_in_any_namespace(self):
        spec = documents(KUBERNETES / "base/worker.yaml")[0]["spec"]["template"]["spec"]
        address, = (argument.removeprefix("--coordinator=") for argument in spec["containers"][0]["args"]
                    if argument.startswith("--coordinator="))
        name, port = address.split(":")
        services = {manifest["metadata"]["name"]: {opened["port"] for opened in manifest["spec"]["ports"]}
                    for _, manifest in all_manifests() if manifest["kind"] == "Service"}
        self.assertIn(int(port), services.get(name, ()), address)
        self.assertEqual((spec["hostNetwork"], spec["dnsPolicy"]), (True, "ClusterFirstWithHostNet"), "or Services have no names")
        names = re.search(r"^always=(\S+)", (KUBERNETES / "certificates.sh").read_text(), re.MULTILINE)[1].split(",")
        self.assertIn(f"DNS:{name}", names)

    def test_overlays_may_choose_the_namespace(self):
        if not shutil.which("kubectl"):
            self.skipTest("no kubectl")
        for overlay in sorted((KUBERNETES / "overlays").iterdir()):
            with tempfile.TemporaryDirectory() as folder:
                resource = os.path.relpath(overlay, os.path.realpath(folder))
                (pathlib.Path(folder) / "kustomization.yaml").write_text(f"namespace: elsewhere\nresources: [{resource}]\n")
                rendered = subprocess.run(["kubectl", "kustomize", folder], check=True, stdout=subprocess.PIPE, text=True).stdout
            self.assertEqual(re.findall(r"\S+\.ringleader\b.*|namespace: ringleader\b", rendered), [], overlay.name)
            for manifest in yaml.safe_load_all(rendered):
                place = manifest["metadata"]["name" if manifest["kind"] == "Namespace" else "namespace"]
                self.assertEqual(place, "elsewhere", f"{overlay.name}: {manifest['kind']}")


class Documentation(unittest.TestCase):

    def test_commands_name_the_namespace(self):
        """But for those that take it from manifests or are of no namespace."""
        for name in ("kubernetes.md", "runbook.md", "operations.md", "install.md"):
            text = (ROOT / "docs" / name).read_text()
            for command in re.findall(r"kubectl(?:\s+[^\s`|]+)+", text):
                if re.match(r"kubectl (kustomize|get nodes|get csidriver|drain|uncordon|taint nodes|create namespace)\b", command):
                    continue
                if re.match(r"kubectl (apply|diff) (-k|-f -)", command) or re.match(r"kubectl set env --local", command):
                    continue
                self.assertRegex(command, r"^kubectl -n ringleader\b", name)

    def test_secrets_may_be_larger_than_an_annotation(self):
        """`kubectl apply` without --server-side keeps a copy of what it applies in an annotation, which holds 262,144 bytes."""
        text = (ROOT / "docs/kubernetes.md").read_text()
        applied = re.findall(r"create secret(?:\\\n|[^\n|])*\|\s*(kubectl[^\n]*)", text)
        self.assertGreaterEqual(len(applied), 2)
        for command in applied:
            self.assertIn("apply --server-side --force-conflicts -f -", command)


class Units(unittest.TestCase):

    def test_a_trainer_that_takes_too_much_memory_ends_alone(self):
        unit = (ROOT / "deploy/systemd/ringleader-worker.service").read_text()
        self.assertIn("\nOOMPolicy=continue\n", unit)


if __name__ == "__main__":
    unittest.main()
