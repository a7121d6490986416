#!/usr/bin/env python3
"""Makes a JobSet of the workers of an overlay, for clusters that lend nodes through a queue such as Kueue.

kubectl kustomize OVERLAY | gang.py --name NAME --pods N [--queue QUEUE] | kubectl apply -f -

The pods are those of the overlay's DaemonSet, N of them, each on a node of its own: they use their nodes' network, and one port of it.
A worker that crashes is started again in its pod, and a pod whose node is lost elsewhere. Needs PyYAML."""

import argparse
import sys

import yaml


def jobset(worker, name, pods, queue):
    template = worker["spec"]["template"]
    template["spec"]["restartPolicy"] = "OnFailure"
    job = {"parallelism": pods, "completions": pods, "completionMode": "Indexed", "backoffLimit": 100, "template": template}
    metadata = {"name": name, "namespace": worker["metadata"]["namespace"], "labels": dict(worker["metadata"]["labels"])}
    if queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = queue
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata,
            "spec": {"replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}]}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of the JobSet")
    parser.add_argument("--pods", required=True, type=int, help="workers, a node each")
    parser.add_argument("--queue", help="Kueue's local queue; none: it starts at once")
    arguments = parser.parse_args()
    if arguments.pods < 1:
        sys.exit("gang.py: --pods is 1 or more")
    workers = [manifest for manifest in yaml.safe_load_all(sys.stdin) if manifest["kind"] == "DaemonSet"]
    if len(workers) != 1:
        sys.exit(f"gang.py: {len(workers)} DaemonSets came in; pipe `kubectl kustomize OVERLAY` into it")
    yaml.safe_dump(jobset(workers[0], arguments.name, arguments.pods, arguments.queue), sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main()
