#!/usr/bin/env python3
"""Writes the Grafana dashboards beside this file: fleet.json, job.json, coordinator.json.

A dashboard is a list of rows, a row a list of panels, a panel a line of this file; what Grafana wants besides is added
here."""

import argparse
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
TARGET = 'job=~"$job",instance=~"$instance"'  # Prometheus' labels of what was scraped
JOB = TARGET + ',job_name=~"$job_name"'

# [how it is read] -> (Grafana's unit, decimals)
UNITS = {"count": ("short", 0), "number": ("short", None), "ratio": ("percentunit", 1), "seconds": ("s", None),
         "bytes": ("bytes", None), "rate": ("reqps", None), "tokens": ("locale", 0), "watts": ("watt", 0),
         "hertz": ("hertz", None), "celsius": ("celsius", 0), "factor": ("none", 3), "loss": ("none", 4)}


def panel(title, description, unit, *targets, kind="timeseries", width=8, stack=False):
    """One panel; `targets` are (expression, legend)."""
    name, decimals = UNITS[unit]
    defaults = {"unit": name}
    if decimals is not None:
        defaults["decimals"] = decimals
    options = {}
    if kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 25 if stack else 0, "lineWidth": 1, "showPoints": "never",
                              "stacking": {"mode": "normal" if stack else "none"}}
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    elif kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "area"}
    elif kind == "bargauge":
        defaults["min"] = 0
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "orientation": "vertical", "displayMode": "basic"}
    # Both at once would be two queries, each of which shows the value. A stat draws the line of its time range, too.
    query = "instant" if kind == "bargauge" else "range"
    return {"title": title, "description": description, "type": kind, "width": width,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options,
            "targets": [{"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend,
                         query: True, "datasource": {"type": "prometheus", "uid": "${datasource}"}}
                        for i, (expr, legend) in enumerate(targets)]}


def variable(name, label, query, multi=True):
    return {"name": name, "label": label, "type": "query", "query": {"query": query, "refId": name},
            "datasource": {"type": "prometheus", "uid": "${datasource}"}, "refresh": 2, "sort": 1,
            "multi": multi, "includeAll": multi, "allValue": ".+" if multi else None,
            "current": {"text": "All", "value": "$__all"} if multi else {}}


def dashboard(uid, title, description, rows, variables=()):
    """`rows`: (title, panels); panels flow from left to right in lines of 24 columns."""
    panels, number, top = [], 0, 0
    for row_title, members in rows:
        number += 1
        panels.append({"id": number, "type": "row", "title": row_title, "collapsed": False, "panels": [],
                       "gridPos": {"h": 1, "w": 24, "x": 0, "y": top}})
        top += 1
        left = height = 0
        for member in members:
            number += 1
            width, tall = member.pop("width"), 4 if member["type"] == "stat" else 8
            if left + width > 24:
                top, left, height = top + height, 0, 0
            panels.append({"id": number, **member, "gridPos": {"h": tall, "w": width, "x": left, "y": top}})
            left, height = left + width, max(height, tall)
        top += height
    return {"id": None, "uid": uid, "title": title, "description": description, "tags": ["ringleader"],
            "schemaVersion": 39, "editable": False, "graphTooltip": 1, "refresh": "30s", "timezone": "browser",
            "time": {"from": "now-1h", "to": "now"}, "panels": panels, "annotations": {"list": []},
            "links": [{"title": "Ringleader", "type": "dashboards", "tags": ["ringleader"], "asDropdown": True,
                       "includeVars": False, "keepTime": True}],
            "templating": {"list": [{"name": "datasource", "label": "Data Source", "type": "datasource",
                                     "query": "prometheus", "refresh": 1, "current": {}},
                                    variable("job", "Scrape job", "label_values(ringleader_build_info, job)"),
                                    variable("instance", "Instance",
                                             'label_values(ringleader_build_info{job=~"$job"}, instance)'),
                                    *variables]}}


def metric(name, labels=TARGET):
    return f"ringleader_{name}{{{labels}}}"


def quantile(share, name):
    return f"histogram_quantile({share}, sum by (le) (rate({metric(name + '_bucket')}[$__rate_interval])))"


def gpus(name, of_job=False):
    """A DCGM exporter's metric by host; of the hosts of the chosen job where asked for."""
    by_host = f"avg by (Hostname) ({name})"
    if not of_job:
        return by_host
    hosts = f'max by (Hostname) (label_replace({metric("job_trainers", JOB)}, "Hostname", "$1", "hostname", "(.+)"))'
    return f"{by_host} and on (Hostname) {hosts}"


FLEET = dashboard(
    "ringleader-fleet", "Ringleader / Fleet", "Jobs, nodes and GPUs of a cluster at a glance.", [
        ("Now", [
            panel("Jobs that run", "Jobs in state RUNNING.", "count",
                  (f'sum(ringleader_coordinator_jobs{{{TARGET},state="RUNNING"}})', ""), kind="stat", width=4),
            panel("Jobs that wait", "Jobs in state PENDING or RETRYING; `ringctl get JOB` says what for.", "count",
                  (f'sum(ringleader_coordinator_jobs{{{TARGET},state=~"PENDING|RETRYING"}})', ""), kind="stat", width=4),
            panel("Jobs out of sight", "Jobs in state UNKNOWN: a worker of theirs is silent.", "count",
                  (f'sum(ringleader_coordinator_jobs{{{TARGET},state="UNKNOWN"}})', ""), kind="stat", width=4),
            panel("Nodes ready", "Nodes that take trainers.", "count",
                  (f'sum(ringleader_coordinator_nodes{{{TARGET},state="READY"}})', ""), kind="stat", width=4),
            panel("Slots in use", "Trainers that are placed, over the slots of ready nodes: trainers of nodes that are being drained count, "
                  "the slots of these do not, so that it is too high meanwhile, and 100 % at most. Nothing where no node is ready.", "ratio",
                  (f'clamp_max(sum(ringleader_coordinator_trainer_slots{{{TARGET},kind="in_use"}}) / '
                   f'(sum(ringleader_coordinator_trainer_slots{{{TARGET},kind="ready"}}) > 0), 1)', ""), kind="stat", width=4),
            panel("Tokens per second", "All running jobs together.", "tokens",
                  (f"sum({metric('job_tokens_per_second')})", ""), kind="stat", width=4)]),
        ("Jobs", [
            panel("Jobs by state", "Every job that is stored.", "count",
                  (f"sum by (state) ({metric('coordinator_jobs')})", "{{state}}"), stack=True),
            panel("Throughput", "Tokens a second of each running job.", "tokens",
                  (metric("job_tokens_per_second"), "{{job_name}}")),
            panel("Progress", "Completed steps over all steps.", "ratio",
                  (f"{metric('job_completed_steps')} / {metric('job_total_steps')}", "{{job_name}}")),
            panel("Attempts that ended", "By outcome, in the last hour.", "count",
                  (f"sum by (outcome) (increase({metric('coordinator_attempts_ended_total')}[1h]))", "{{outcome}}")),
            panel("State changes", "Jobs that entered a state, in a minute.", "number",
                  (f"60 * sum by (to) (rate({metric('coordinator_job_transitions_total')}[$__rate_interval]))", "{{to}}")),
            panel("Imbalance", "Attention work of the busiest rank over the mean; 1 is even.", "factor",
                  (metric("job_worker_imbalance_ratio"), "{{job_name}}"))]),
        ("Nodes", [
            panel("Nodes by state", "READY takes trainers, UNREACHABLE has lost its lease.", "count",
                  (f"sum by (state) ({metric('coordinator_nodes')})", "{{state}}"), stack=True),
            panel("Trainers", "Trainers that run on each node.", "count", (metric("worker_trainers"), "{{instance}}")),
            panel("Out of contact", "Age of each worker's newest heartbeat that is known to have arrived.", "seconds",
                  (metric("worker_out_of_contact_seconds"), "{{instance}}")),
            panel("Messages that wait", "Messages of each worker that the coordinator has not acknowledged.", "count",
                  (metric("worker_buffered_messages"), "{{instance}}")),
            panel("Trainers that ended", "By outcome, in the last hour.", "count",
                  (f"sum by (outcome) (increase({metric('worker_trainer_exits_total')}[1h]))", "{{outcome}}")),
            panel("Log lines dropped", "Lines a second that did not fit into a worker's buffer.", "number",
                  (f"rate({metric('worker_dropped_log_lines_total')}[$__rate_interval])", "{{instance}}")),
            panel("Step reports dropped", "In the last hour: the coordinator took none for days.", "count",
                  (f"increase({metric('worker_dropped_step_reports_total')}[1h])", "{{instance}}")),
            panel("Workers in session", "1 while a worker is in session with the coordinator.", "count",
                  (metric("worker_connected"), "{{instance}}")),
            panel("Sessions", "That began in the last hour, by worker; many mean a bad network.", "count",
                  (f"increase({metric('worker_sessions_total')}[1h])", "{{instance}}")),
            panel("Slots", "Trainers that each worker can run.", "count",
                  (metric("worker_trainer_slots"), "{{instance}}"))]),
        ("GPUs (workers)", [
            panel("GPUs out of order", "GPUs that reported uncorrectable errors and take no trainers.", "count",
                  (f"count({metric('worker_gpu_healthy')} == 0) or vector(0)", ""), kind="stat", width=4),
            panel("GPUs", "GPUs of all workers.", "count", (f"count({metric('worker_gpu_healthy')})", ""), kind="stat",
                  width=4),
            panel("Driver's last answer", "The longest that a worker's driver has not answered.", "seconds",
                  (f"max({metric('worker_gpu_sample_age_seconds')})", ""), kind="stat", width=4),
            panel("Power of all GPUs", "Sum over all workers.", "watts", (f"sum({metric('worker_gpu_power_watts')})", ""),
                  kind="stat", width=4),
            panel("Busy", "Share of the time in which a kernel ran; mean over a worker's GPUs.", "ratio",
                  (f"avg by (instance) ({metric('worker_gpu_utilization_ratio')})", "{{instance}}")),
            panel("Memory", "Of the fullest GPU of each worker.", "ratio",
                  (f"max by (instance) ({metric('worker_gpu_memory_used_bytes')} / "
                   f"{metric('worker_gpu_memory_total_bytes')})", "{{instance}}")),
            panel("Temperature", "Of the hottest GPU of each worker.", "celsius",
                  (f"max by (instance) ({metric('worker_gpu_temperature_celsius')})", "{{instance}}")),
            panel("Clocks", "Of the multiprocessors of each worker's slowest GPU.", "hertz",
                  (f'min by (instance) (ringleader_worker_gpu_clock_hertz{{{TARGET},clock="sm"}})', "{{instance}}")),
            panel("What holds clocks down", "GPUs of which it does, all workers.", "count",
                  (f"sum by (reason) ({metric('worker_gpu_throttled')})", "{{reason}}"), stack=True),
            panel("Memory errors", "Since the driver was loaded, by worker.", "count",
                  (f"sum by (instance, kind) ({metric('worker_gpu_ecc_errors_total')})", "{{instance}} {{kind}}")),
            panel("XIDs", "XID errors since the worker started.", "count",
                  (f"sum by (instance, gpu, xid) ({metric('worker_gpu_xid_errors_total')})",
                   "{{instance}} {{gpu}}: {{xid}}"))]),
        ("GPUs (DCGM exporter)", [
            panel("Utilisation", "Mean over a host's GPUs.", "ratio",
                  (gpus("DCGM_FI_DEV_GPU_UTIL") + " / 100", "{{Hostname}}")),
            panel("Power", "Mean over a host's GPUs.", "watts", (gpus("DCGM_FI_DEV_POWER_USAGE"), "{{Hostname}}")),
            panel("XID errors", "The last XID error of each GPU; 0 is none.", "count",
                  ("max by (Hostname, gpu) (DCGM_FI_DEV_XID_ERRORS)", "{{Hostname}} {{gpu}}"))])])

JOB_DASHBOARD = dashboard(
    "ringleader-job", "Ringleader / Job", "One training job: loss, speed, where a step's time goes, sparsity by layer.", [
        ("Training", [
            panel("Step", "Completed steps.", "count", (metric("job_completed_steps", JOB), ""), kind="stat", width=4),
            panel("Progress", "Completed steps over all steps.", "ratio",
                  (f"{metric('job_completed_steps', JOB)} / {metric('job_total_steps', JOB)}", ""), kind="stat", width=4),
            panel("Time left", "At the speed of the last step.", "seconds",
                  (f"({metric('job_total_steps', JOB)} - {metric('job_completed_steps', JOB)}) * "
                   f"{metric('job_step_seconds', JOB)}", ""), kind="stat", width=4),
            panel("Checkpoint", "Step of the newest durable checkpoint.", "count",
                  (metric("job_checkpoint_step", JOB), ""), kind="stat", width=4),
            panel("Attempts", "Attempts of this job, this one included.", "count",
                  (metric("job_attempts", JOB), ""), kind="stat", width=4),
            panel("Trained tokens", "Tokens trained on since the first step.", "tokens",
                  (metric("job_trained_tokens", JOB), ""), kind="stat", width=4),
            panel("Loss", "Training loss of each step, and that of the last evaluation on held-out tokens.", "loss",
                  (metric("job_loss", JOB), "training"), (metric("job_heldout_loss", JOB), "held out")),
            panel("Gradient norm", "Before clipping.", "number", (metric("job_gradient_norm", JOB), "norm")),
            panel("Learning rate", "Of the last step.", "number", (metric("job_learning_rate", JOB), "rate"))]),
        ("Speed", [
            panel("Throughput", "Tokens a second, all ranks.", "tokens",
                  (metric("job_tokens_per_second", JOB), "tokens/s")),
            panel("Where a step's time goes", "By phase, the slowest rank of each.", "seconds",
                  (metric("job_phase_seconds", JOB), "{{phase}}"), stack=True),
            panel("Imbalance", "Attention work of the busiest over the mean; 1 is even.", "factor",
                  (metric("job_worker_imbalance_ratio", JOB), "ranks"),
                  (metric("job_ring_step_imbalance_ratio", JOB), "ring steps")),
            panel("Waits", "Time of the longest over the mean, of those that wait for each other; 1 is even.", "factor",
                  (metric("job_layer_imbalance_ratio", JOB), "ranks, by layer and ring step"),
                  (metric("job_group_imbalance_ratio", JOB), "data-parallel groups")),
            panel("Sent to share heads", "By the rank that sent most in a step (parallelism.heads).", "bytes",
                  (metric("job_head_exchange_bytes", JOB), "sent")),
            panel("Changes of the plan", "Of layout or ring in this attempt; `ringctl get JOB` gives reasons.", "count",
                  (metric("job_plan_changes", JOB), "{{state}}")),
            panel("Slow ranks", "That take longer than others for the same work; `ringctl get JOB` names them.", "count",
                  (metric("job_slow_ranks", JOB), "ranks")),
            panel("Peak memory", "Of the fullest rank's device.", "bytes",
                  (metric("job_peak_memory_bytes", JOB), "peak")),
            panel("Trainers by node", "Where the job runs.", "count", (metric("job_trainers", JOB), "{{node}}"),
                  stack=True)]),
        ("Sparsity by layer", [
            panel("Density", "Share of causal tiles visited, mean over heads.", "ratio",
                  (f"sort_desc({metric('job_layer_density_ratio', JOB)})", "{{layer}}"), kind="bargauge"),
            panel("Recall", "Attention mass kept, on the rows that the choice was made from.", "ratio",
                  (metric("job_layer_recall_ratio", JOB), "{{layer}}"), kind="bargauge"),
            panel("Probed recall", "Attention mass kept, on rows that were sampled from all.", "ratio",
                  (metric("job_layer_probed_recall_ratio", JOB), "{{layer}}"), kind="bargauge"),
            panel("Anchor missed", "Micro-batches whose moved choice did not come to attention.balance's anchor.", "ratio",
                  (metric("job_layer_anchor_missed_ratio", JOB), "{{layer}}"), kind="bargauge"),
            panel("Tiles", "Attention tiles visited, all ranks and heads.", "count",
                  (metric("job_layer_tiles", JOB), "{{layer}}"), kind="bargauge"),
            panel("Density over time", "Mean over layers, lowest and highest layer.", "ratio",
                  (f"avg({metric('job_layer_density_ratio', JOB)})", "mean"),
                  (f"min({metric('job_layer_density_ratio', JOB)})", "lowest"),
                  (f"max({metric('job_layer_density_ratio', JOB)})", "highest"), width=12),
            panel("Recall over time", "Mean over layers, and the layer that keeps least.", "ratio",
                  (f"avg({metric('job_layer_recall_ratio', JOB)})", "mean"),
                  (f"min({metric('job_layer_recall_ratio', JOB)})", "lowest"), width=12)]),
        ("Its GPUs (DCGM exporter)", [
            panel("Tensor cores active", "Mean over a host's GPUs.", "ratio",
                  (gpus("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", of_job=True), "{{Hostname}}")),
            panel("Power", "Mean over a host's GPUs.", "watts",
                  (gpus("DCGM_FI_DEV_POWER_USAGE", of_job=True), "{{Hostname}}")),
            panel("SM clock", "Mean over a host's GPUs; a host that clocks lower slows its ring.", "hertz",
                  (f"1e6 * ({gpus('DCGM_FI_DEV_SM_CLOCK', of_job=True)})", "{{Hostname}}"))])],
    variables=[variable("job_name", "Job", 'label_values(ringleader_job_completed_steps{job=~"$job"}, job_name)',
                        multi=False)])

COORDINATOR = dashboard(
    "ringleader-coordinator", "Ringleader / Coordinator", "The control plane: calls, store, sessions, process.", [
        ("Calls", [
            panel("Calls", "Calls that ended, by method.", "rate",
                  (f"sum by (method) (rate({metric('coordinator_rpc_requests_total')}[$__rate_interval]))", "{{method}}")),
            panel("Refused and failed", "Calls that ended with another status than OK, but those that their callers gave up.", "rate",
                  (f'sum by (code) (rate(ringleader_coordinator_rpc_requests_total{{{TARGET},code!~"OK|CANCELLED"}}'
                   "[$__rate_interval])) or vector(0)", "{{code}}")),
            panel("Duration", "Unary calls, from arrival to reply.", "seconds",
                  (quantile(0.5, "coordinator_rpc_duration_seconds"), "median"),
                  (quantile(0.99, "coordinator_rpc_duration_seconds"), "99 %")),
            panel("Open streams", "Watches and log tails.", "count",
                  (f"sum by (method) ({metric('coordinator_rpc_streams')})", "{{method}}")),
            panel("Worker sessions", "Sessions that began in a minute; many mean a network or version problem.", "number",
                  (f"60 * sum(rate({metric('coordinator_worker_sessions_total')}[$__rate_interval]))", "sessions")),
            panel("Leases that ran out", "Workers that fell silent, in the last hour.", "count",
                  (f"sum(increase({metric('coordinator_leases_expired_total')}[1h]))", "leases")),
            panel("Limits reached", "Requests refused because a client, or all together, asked for too much.", "number",
                  (f"60 * sum by (limit, scope) (rate({metric('coordinator_limit_reached_total')}[$__rate_interval]))"
                   " or vector(0)", "{{limit}} {{scope}}"))]),
        ("Traces", [
            panel("Spans sent", "Spans that the collector of traces took; no series where --trace-endpoint is off.", "rate",
                  (f"sum(rate({metric('coordinator_trace_spans_exported_total')}[$__rate_interval]))", "spans")),
            panel("Spans lost", "In a minute, by reason.", "number",
                  (f"60 * sum by (reason) (rate({metric('coordinator_trace_spans_dropped_total')}[$__rate_interval]))",
                   "{{reason}}")),
            panel("Spans that wait", "To be sent; beyond 16,384 they are lost.", "count",
                  (metric("coordinator_trace_queued_spans"), "spans"))]),
        ("Store", [
            panel("Commit", "From the begin of a transaction until it is on disk.", "seconds",
                  (quantile(0.5, "coordinator_store_commit_duration_seconds"), "median"),
                  (quantile(0.99, "coordinator_store_commit_duration_seconds"), "99 %")),
            panel("Writes", "Committed writes; several share a commit when they wait together.", "rate",
                  (f"sum(rate({metric('coordinator_store_writes_total')}[$__rate_interval]))", "writes"),
                  (f"sum(rate({metric('coordinator_store_commit_duration_seconds_count')}[$__rate_interval]))", "commits")),
            panel("Size on disk", "Database and write-ahead log.", "bytes",
                  (metric("coordinator_store_bytes"), "{{file}}"), stack=True)]),
        ("Controller", [
            panel("Batch", "One batch of requests and events, until it is on disk.", "seconds",
                  (quantile(0.5, "coordinator_batch_duration_seconds"), "median"),
                  (quantile(0.99, "coordinator_batch_duration_seconds"), "99 %")),
            panel("Events", "Requests and events that were taken up.", "rate",
                  (f"sum(rate({metric('coordinator_batch_items_total')}[$__rate_interval]))", "items"),
                  (f"sum(rate({metric('coordinator_steps_recorded_total')}[$__rate_interval]))", "steps recorded")),
            panel("Batches that the store refused", "In a minute; a full disk shows here.", "number",
                  (f"60 * sum(rate({metric('coordinator_failed_batches_total')}[$__rate_interval]))", "batches"))]),
        ("Processes", [
            panel("Memory", "Resident memory of coordinator and workers.", "bytes",
                  (f"process_resident_memory_bytes{{{TARGET}}}", "{{instance}}")),
            panel("CPU", "Cores in use.", "number",
                  (f"rate(process_cpu_seconds_total{{{TARGET}}}[$__rate_interval])", "{{instance}}")),
            panel("Versions", "Processes of each version.", "count",
                  (f"count by (component, version) ({metric('build_info')})", "{{component}} {{version}}"))])])

DASHBOARDS = {"fleet.json": FLEET, "job.json": JOB_DASHBOARD, "coordinator.json": COORDINATOR}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a file is another")
    check = parser.parse_args().check
    stale = []
    for name, content in DASHBOARDS.items():
        text, path = json.dumps(content, indent=1) + "\n", HERE / name
        if check:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.write_text(text)
    if stale:
        sys.exit(f"deploy/grafana: run dashboards.py: {', '.join(stale)} differ from what it writes")


if __name__ == "__main__":
    main()
