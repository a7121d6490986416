#!/usr/bin/env python3
"""What each attention pattern keeps of what dense attention learns: trains a model dense on documents of growing length
until it answers what they ask, then goes on from it with every pattern at several densities, and asks both ways.

bench/quality/run.sh starts the services that this submits its jobs to, and says how to call it. What is done stands in
the folder --dir and is not done again: a call that ran out of --seconds is simply repeated.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import math
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter

import generate
import tasks
from attentions import attentions

ENOUGH = 0.95  # share of the answers of every task at which the curriculum goes on, and a task counts as learned
EPOCH_TOKENS = 48 << 20  # at most so many are made for a stage; more are trained by coming again


@dataclasses.dataclass
class Stage:
    length: int  # tokens of a document; several are packed into a sequence and kept apart
    steps: int
    batch: int  # sequences; many small steps find how to look things up sooner than few large ones
    rate: float
    rounds: int = 1  # so often, while it does not answer enough
    symbols: int = 0  # in its documents; 0: the plan's
    kinds: tuple = ()  # of its documents; none: all
    weights: dict = None  # of its kinds; none: the plan's
    tokens: int = 0  # of a sequence; 0: the plan's
    apart: bool = True  # whether documents of a sequence see nothing of each other
    lengths: tuple = ()  # of its training documents, each of which is a sample then, and `batch` counts samples
    groups: int = 1  # data-parallel
    ring: int = 1  # GPUs that share a sequence, if there are as many
    eval_documents: int = 0  # of each kind; 0: the plan's


@dataclasses.dataclass
class Plan:
    hidden: int
    layers: int
    heads: int
    symbols: int
    tokens: int  # of a sequence
    curriculum: list
    more: Stage  # with each pattern
    texts: list  # stages of text alone: dense attention and the default
    densities: list
    weights: dict
    eval_documents: int  # of each kind
    eval_weights: dict  # of kinds with few answers a document: so many times as many
    repeats: list  # (pattern, density) of those that are trained again with other seeds
    repeat_seeds: list
    patterns: tuple = ()  # those that go on at densities, beside the default and vertical-slash by its own; none: all
    tuned: Stage = None  # instead of all that: patterns with and without attention.balance
    tuned_density: float = 0.1


RECALL = ("recall", "recall-power")
DEFAULT = "the default"
DENSE_BELOW = 8192  # tokens of a sequence in which the default on GPUs is dense attention (docs/job_file.md)
# As many answers of frequent words as it takes to learn them: with a third a model stays at three quarters of them.
LONG = {**generate.WEIGHTS, "frequent-words": 9, "text": 4}
PLANS = {
    # One H100, some ten minutes. Looking a key up is learned from a few keys that are soon shown again, in hundreds of steps,
    # and then holds in longer documents and for more symbols; from 256 tokens and 2,048 symbols on it is not learned
    # in thousands. An answer to four needles has their keys for the same reason: by their places in the question alone
    # a model learned them in some runs, and in others not at all.
    "gpu": Plan(hidden=512, layers=6, heads=4, symbols=2048, tokens=16384,
                curriculum=[Stage(64, 500, 1, 1e-3, rounds=3, symbols=32, kinds=RECALL),
                            Stage(64, 300, 1, 1e-3, rounds=3, symbols=256, kinds=RECALL),
                            Stage(128, 500, 1, 1e-3, rounds=2, symbols=512), Stage(256, 700, 1, 1e-3, rounds=4),
                            Stage(1024, 400, 1, 1e-3, rounds=4, weights=LONG),
                            Stage(4096, 300, 2, 1e-3, rounds=2, weights=LONG),
                            Stage(16384, 200, 4, 6e-4, rounds=6, weights=LONG)],
                more=Stage(16384, 60, 4, 3e-4, weights=LONG),
                texts=[Stage(length // 8, 60, batch, 3e-4, kinds=("text",), tokens=length, apart=apart)
                       for length, batch in ((32768, 2), (131072, 1)) for apart in (True, False)],
                densities=[0.05, 0.1, 0.02, 0.2], weights=generate.WEIGHTS,
                eval_documents=4, eval_weights={"frequent-words": 4, "text": 8},
                repeats=[("dense", 1.0), (DEFAULT, None), ("key-groups", 0.1), ("key-groups", 0.05)],
                repeat_seeds=[101, 102]),
    # Seconds on a CPU: every step of the way, and nothing learned.
    "smoke": Plan(hidden=64, layers=1, heads=2, symbols=64, tokens=512,
                  curriculum=[Stage(64, 2, 1, 1e-3, symbols=32, kinds=("recall",)), Stage(512, 2, 1, 1e-3, ring=2)], more=Stage(512, 4, 1, 1e-3),
                  texts=[Stage(128, 2, 1, 1e-3, kinds=("text",), tokens=1024, apart=False)],
                  densities=[0.5], weights={"recall": 1, "needles": 1, "text": 1}, eval_documents=1,
                  eval_weights={"needles": 2}, repeats=[("dense", 1.0), ("key-groups", 0.5)], repeat_seeds=[101]),
}
# What holds at 16,384 tokens, in sequences of 131,072 (XAttention with its shortest stride alone, densities of 5 and 10 %), with as many more symbols as such documents need. What was learned in
# shorter documents holds in longer ones after few steps.
PLANS["long"] = dataclasses.replace(
    PLANS["gpu"], symbols=4096, tokens=131072,
    curriculum=[*(dataclasses.replace(stage, symbols=stage.symbols or 2048, tokens=16384)
                  for stage in PLANS["gpu"].curriculum),
                Stage(16384, 100, 4, 6e-4, rounds=4, weights=LONG, tokens=16384),
                Stage(32768, 100, 2, 6e-4, rounds=4, weights=LONG, tokens=32768),
                Stage(131072, 100, 1, 6e-4, rounds=10, weights=LONG, ring=2)],
    more=Stage(131072, 60, 1, 3e-4, weights=LONG), texts=[], densities=[0.05, 0.1], eval_documents=1,
    eval_weights={"text": 4}, repeats=[],
    patterns=tuple(name for name in attentions(0.1, 131072) if "stride" not in name))
# All patterns (of XAttention's strides, in short ones, the shortest) at all densities in sequences of 4,096, 8,192 and 65,536 tokens, each with a model whose curriculum ends at its
# length: how often words come is learned anew for longer documents, and forgotten for shorter ones.
SHORT = [dataclasses.replace(stage, tokens=16384) for stage in PLANS["gpu"].curriculum if stage.length < 4096]
OF_4096 = Stage(4096, 300, 8, 1e-3, rounds=6, weights=LONG)
PLANS["4096"] = dataclasses.replace(
    PLANS["gpu"], tokens=4096, curriculum=[*SHORT, OF_4096], more=Stage(4096, 60, 16, 3e-4, weights=LONG), texts=[],
    eval_documents=32, eval_weights={"text": 4}, repeats=[],
    patterns=tuple(name for name in attentions(0.1, 4096) if "stride" not in name))  # longer strides save time in longer sequences
PLANS["8192"] = dataclasses.replace(
    PLANS["4096"], tokens=8192, curriculum=[*SHORT, dataclasses.replace(OF_4096, tokens=4096),
                                            Stage(8192, 200, 8, 6e-4, rounds=8, weights=LONG)],
    more=Stage(8192, 60, 8, 3e-4, weights=LONG), eval_documents=16)
PLANS["65536"] = dataclasses.replace(
    PLANS["long"], tokens=65536, eval_documents=2, patterns=(), densities=PLANS["gpu"].densities,
    curriculum=[stage for stage in PLANS["long"].curriculum if stage.length < 32768] +
               [Stage(65536, 100, 1, 6e-4, rounds=8, weights=LONG)],
    more=Stage(65536, 60, 1, 3e-4, weights=LONG))
# Samples as ChatQA2 has them, at a quarter of the length: many short ones, some long. Four a step leave groups apart.
PLANS["tuning"] = dataclasses.replace(PLANS["gpu"], tuned=Stage(
    16384, 120, 4, 3e-4, weights=LONG, lengths=(512, 1024, 512, 16384, 1024, 4096, 512, 16384), groups=2),
    eval_documents=16, eval_weights={"frequent-words": 4})
PLANS["tuning-smoke"] = dataclasses.replace(PLANS["smoke"], tuned=Stage(
    512, 6, 4, 1e-3, lengths=(64, 512, 64, 64), groups=2), tuned_density=0.5)
HELD_OUT = "held out"  # the seed of documents that nothing is trained on
SEED = 100  # of what goes on from the dense model; repeats have others


def shares(evaluation):
    """{task: share of answers that were right} of those that were asked, text apart."""
    return {task: found["right"] / found["asked"] for task, found in evaluation["answers"].items()
            if found["asked"] and task != "text"}


def answered(evaluation):
    by_task = shares(evaluation)
    return sum(by_task.values()) / len(by_task)


def learned(evaluation):
    """{task: the share of its answers that dense attention has right, and whether that is enough}. Of a task that was
    not learned patterns are judged by what dense attention answers, and that alone."""
    return {task: {"share": share, "learned": share >= ENOUGH} for task, share in shares(evaluation).items()}


def join_text(evaluation):
    """Text becomes one task, as others are; its parts by place in a tile (tasks.TEXT) stand in `text_by_place`."""
    for found in (evaluation, evaluation.get("dense")):
        if found is not None:
            parts = {task: found["answers"].pop(task) for task in tasks.TEXT}
            asked = sum(part["asked"] for part in parts.values())
            loss = sum(part["asked"] * part["loss"] for part in parts.values())
            found["answers"]["text"] = {"asked": asked, "right": sum(part["right"] for part in parts.values()),
                                        "loss": loss / asked if asked else 0.0}
            found["text_by_place"] = parts


class OutOfTime(Exception):
    pass


class Suite:
    def __init__(self, flags):
        self.flags = flags
        self.plan = PLANS[flags.plan]
        self.dir = pathlib.Path(flags.dir).resolve()
        self.began = time.monotonic() - flags.began_before
        self.deadline = time.monotonic() + flags.seconds
        self.longest = 0.0  # of a job, in this call
        self.making = threading.Lock()  # one makes data, and the others find it
        self.corpus = generate.read_corpus(flags.text) if flags.text else b""
        self.weights = {kind: weight for kind, weight in self.plan.weights.items() if kind != "text" or self.corpus}
        (self.dir / "jobs").mkdir(parents=True, exist_ok=True)
        self.check_dir()
        self.took = self.dir / "seconds"  # all calls so far, those included that ran out of time
        self.of_earlier_calls = float(self.took.read_text()) if self.took.exists() else 0.0
        self.has_worked = False  # this call: one that finds all done takes no time

    def check_dir(self):
        """What has ended is not done again, so it must be of the same code, plan and machine."""
        made_by = {name: getattr(self.flags, name) for name in ("commit", "plan", "engine", "hardware", "text")}
        stamp = self.dir / "made_by.json"
        if not stamp.exists():
            stamp.write_text(json.dumps(made_by))
        elif (found := json.loads(stamp.read_text())) != made_by:
            differ = ", ".join(f"{name} {found.get(name)}, not {value}" for name, value in made_by.items()
                               if found.get(name) != value)
            sys.exit(f"quality: {self.dir} holds jobs of another run ({differ}); give another --dir, or remove it")

    def say(self, line):
        print(f"quality: {line}", flush=True)

    def check_time(self, seconds):
        left = self.deadline - time.monotonic()
        if left < seconds:
            raise OutOfTime(f"{left:.0f} s of --seconds are left; call it again to go on")

    def wall_seconds(self):
        if not self.has_worked:
            return self.of_earlier_calls
        seconds = self.of_earlier_calls + time.monotonic() - self.began
        self.took.write_text(f"{seconds:.1f}")
        return seconds

    def ringctl(self, *arguments, **keywords):
        return subprocess.run([self.flags.ringctl, *arguments], check=True, **keywords)

    def tokens_of(self, stage):
        return stage.tokens or self.plan.tokens

    def weights_of(self, stage):
        weights = stage.weights or self.weights
        return {kind: weights.get(kind, 1) for kind in stage.kinds or self.weights}

    def eval_weights_of(self, stage):
        return {kind: self.plan.eval_weights.get(kind, 1) for kind in self.weights_of(stage)}

    def data(self, stage, documents, seed):
        """A folder of token shards: text comes from the corpus's last tenth if `seed` is HELD_OUT, else from the rest."""
        held_out = seed == HELD_OUT
        symbols, weights = stage.symbols or self.plan.symbols, (self.eval_weights_of if held_out else self.weights_of)(stage)
        lengths = () if held_out else stage.lengths
        parts = [seed, stage.length, symbols, *stage.kinds, *(weights.values() if stage.weights else []), *lengths]
        folder = self.dir / "data" / "-".join(str(part).replace(" ", "-") for part in parts)
        if (folder / "train").exists():
            return folder / "train"
        self.check_time(60)
        self.has_worked = True
        cut = len(self.corpus) * 9 // 10
        made = self.dir / "made"
        shutil.rmtree(made, ignore_errors=True)
        started = time.monotonic()
        made.mkdir()
        for length, count in sorted(Counter(lengths or [stage.length]).items()):
            options = generate.generate(made / str(length), -(-documents * count // (len(lengths) or 1)), length, symbols, seed,
                                        weights, self.corpus[cut:] if held_out else self.corpus[:cut])
        self.ringctl("data", "pack", "--input", str(made), "--output", str(folder), "--format", "uint16", "--eval-share",
                     "0", *options, stdout=subprocess.DEVNULL)
        shutil.rmtree(made)
        self.say(f"{documents} documents of {', '.join(map(str, sorted(set(lengths)))) or stage.length} tokens made in "
                 f"{time.monotonic() - started:.0f} s")
        return folder / "train"

    def held_out(self, stage):
        """Its folder, and in how many sequences it lies."""
        documents = (stage.eval_documents or self.plan.eval_documents) * sum(self.eval_weights_of(stage).values())
        documents *= self.tokens_of(stage) // stage.length
        # One document more: the last token of a sequence is predicted from the one behind it.
        return self.data(stage, documents + 1, HELD_OUT), documents * stage.length // self.tokens_of(stage)

    def training(self, stage, attempt):
        """Each attempt at a stage has documents of its own: a few long ones that come again are learned by heart."""
        seed = f"train {attempt}" if attempt else "train"
        if stage.lengths:
            return self.data(stage, stage.steps * stage.batch, seed)
        wanted = min(stage.steps * stage.batch * self.tokens_of(stage), EPOCH_TOKENS)
        return self.data(stage, wanted // stage.length + 1, seed)

    def config(self):
        path = self.dir / "config.json"
        plan = self.plan
        path.write_text(json.dumps({
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": plan.hidden,
            "initializer_range": plan.hidden ** -0.5, "intermediate_size": plan.hidden * 11 // 4 // 32 * 32,
            "max_position_embeddings": max([plan.tokens, *(stage.tokens for stage in plan.texts)]),
            "num_attention_heads": plan.heads, "num_hidden_layers": plan.layers,
            "num_key_value_heads": plan.heads // 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
            "torch_dtype": "float32", "vocab_size": tasks.vocabulary(plan.symbols)}))
        return str(path)

    @property
    def fp8(self):
        """A model of one or two layers has none between its first and its last."""
        return "fp8" if self.plan.layers > 2 else "fp8_all_layers"

    def job(self, name, stage, init, attention, seed, precision=None, attempt=0):
        """Trains, and returns the job's report; its model is then in jobs/NAME/model. `precision`: None is the default;
        `attention`: {} is, too; `attempt`: at a stage of the curriculum, from 1 on."""
        report = self.dir / "jobs" / f"{name}.json"
        if report.exists():
            return json.loads(report.read_text())
        with self.making:
            train = self.training(stage, attempt)
            eval_folder, eval_sequences = self.held_out(stage)
        self.check_time(max(30.0, 1.3 * self.longest))
        self.has_worked = True
        folder = self.dir / "jobs" / name
        shutil.rmtree(folder, ignore_errors=True)
        extra = {} if attention.get("pattern") == "dense" else {"eval_attention": "both"}
        if precision:
            extra["precision"] = precision
        spec = {
            "name": name,
            "model": {"config": self.config(), "init": "random"} if init == "random" else {"init": init},
            "data": {"train": str(train), "eval": str(eval_folder), "sequence_length": self.tokens_of(stage),
                     **({"batching": "samples"} if stage.lengths else {"document_mask": stage.apart})},
            "attention": {**attention, "tile": tasks.TILE} if attention else {},
            "training": {"steps": stage.steps, "global_batch": stage.batch, "learning_rate": stage.rate,
                         "min_learning_rate": stage.rate / 10, "warmup_steps": stage.steps // 10, "weight_decay": 0.01,
                         "seed": seed, "eval_sequences": eval_sequences, **extra},
            "checkpoint": {"directory": str(folder), "every_steps": 0, "keep_last": 1},
            "parallelism": {"data": stage.groups},
            "resources": {"trainers": stage.groups * min(stage.ring, self.flags.ring), "engine": self.flags.engine},
            "scheduling": {"max_retries": 0}}
        job_file = self.dir / "jobs" / f"{name}.yaml"  # JSON is YAML
        job_file.write_text(json.dumps(spec, indent=1))
        started = time.monotonic()
        log = self.dir / "jobs" / f"{name}.log"
        with open(log, "w") as out:
            try:
                self.ringctl("submit", str(job_file), "--follow", stdout=out, stderr=out,
                             timeout=max(1, self.deadline - started))
            except subprocess.TimeoutExpired:
                raise OutOfTime(f"{name} did not end in time; call it again with more --seconds") from None
            except subprocess.CalledProcessError:
                sys.exit(f"quality: {name} failed:\n" + "\n".join(log.read_text().splitlines()[-20:]))
        found = json.loads(self.ringctl("report", name, "-o", "json", capture_output=True, text=True).stdout)
        for evaluation in (found["first_evaluation"], found["last_evaluation"]):
            join_text(evaluation)
        result = {**found, "model": f"jobs/{name}/model", "tokens": self.tokens_of(stage),
                  "document_tokens": stage.length, "attention": attention, "wall_seconds": time.monotonic() - started}
        self.longest = max(self.longest, result["wall_seconds"])
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()
            elif path.name != "model":
                shutil.rmtree(path)
        report.write_text(json.dumps(result, indent=1))
        return result

    def train_dense(self):
        """The reports of the curriculum's jobs; the last one's model answers what it can."""
        reports, init = [], "random"
        for stage in self.plan.curriculum:
            for attempt in range(1, stage.rounds + 1):
                name = f"dense-{stage.length}-{stage.symbols or self.plan.symbols}-{attempt}"
                found = self.job(name, stage, init, {"pattern": "dense"}, seed=attempt, attempt=attempt)
                init = str(self.dir / "jobs" / name / "model")
                reports.append(found)
                by_task = ", ".join(f"{task} {share:.0%}" for task, share in shares(found["last_evaluation"]).items())
                self.say(f"{name}: {found['wall_seconds']:.0f} s, loss {found['last_evaluation']['loss']:.3f}; {by_task}")
                if all(of["learned"] for of in learned(found["last_evaluation"]).values()):
                    break
        missed = ", ".join(f"{task} ({of['share']:.1%})" for task, of in learned(reports[-1]["last_evaluation"]).items()
                           if not of["learned"])
        if missed:
            self.say(f"dense attention has not learned {missed}; of these patterns are judged by what it answers alone")
        return reports, init

    def about(self, curriculum):
        """What results say of the run as a whole."""
        return {"plan": self.flags.plan, "engine": self.flags.engine, "hardware": self.flags.hardware,
                "commit": self.flags.commit, "date": datetime.date.today().isoformat(), "command": self.flags.command,
                "wall_seconds": round(self.wall_seconds(), 1), "dense": learned(curriculum[-1]["last_evaluation"])}

    def go_on(self, curriculum, init):
        """Dense attention, also with products in FP8; the default, which is what a job gets that says nothing of
        attention; vertical-slash and XAttention by theirs, which follow from masses; and each pattern at each density. Some
        once more with other seeds: how far an answer moves from run to run. Then text alone
        in longer sequences, by dense attention and the default. What is found so far is written after every job."""
        plan = self.plan
        by_mass = [("vertical-slash, top-p", None, {"pattern": "vertical_slash"}),
                   ("xattention, threshold", None, {"pattern": "xattention"})]
        jobs = [("dense", 1.0, {"pattern": "dense"}), ("dense in FP8", 1.0, {"pattern": "dense"}), *by_mass]
        if plan.tokens >= DENSE_BELOW or self.flags.engine == "cpu":
            jobs.insert(1, (DEFAULT, None, {}))
        for density in plan.densities:
            jobs += [(name, density, attention) for name, attention in attentions(density, plan.tokens).items()
                     if name in plan.patterns or not plan.patterns]
        jobs = [(*job, SEED) for job in jobs]
        jobs += [(*job[:3], seed) for seed in plan.repeat_seeds for repeat in plan.repeats for job in jobs if job[:2] == repeat]
        texts = [(pattern, attention, stage) for stage in (plan.texts if self.corpus else [])
                 for pattern, attention in (("dense", {"pattern": "dense"}), (DEFAULT, {}))]
        found = {"curriculum": curriculum, "patterns": [], "repeats": [], "texts": []}

        def add(part, name, report, **more):
            shutil.rmtree(self.dir / "jobs" / name, ignore_errors=True)  # its model has served
            found[part].append({**more, **report})
            left = len(jobs) + len(texts) - sum(len(found[each]) for each in ("patterns", "repeats", "texts"))
            (self.dir / "quality.json").write_text(json.dumps({
                **self.about(curriculum), "more_steps": plan.more.steps, "jobs_left": left, **found}, indent=1))

        # Several at a time fill a GPU that a model of this size leaves idle; they are told of in order.
        with concurrent.futures.ThreadPoolExecutor(self.flags.at_once) as pool:
            started = []
            for pattern, density, attention, seed in jobs:
                name = pattern.lower().replace(",", "").replace(" ", "-") + ("" if density is None else f"-{density * 100:g}")
                name += "" if seed == SEED else f"-seed-{seed}"
                started.append((name, pool.submit(self.job, name, plan.more, init, attention, seed=seed,
                                                  precision=self.fp8 if pattern == "dense in FP8" else None)))
            for pattern, attention, stage in texts:
                name = f"text-{stage.tokens}-{'apart' if stage.apart else 'together'}-{pattern.replace(' ', '-')}"
                started.append((name, pool.submit(self.job, name, stage, init, attention, seed=SEED)))
            try:
                for (pattern, density, attention, seed), (name, job) in zip(jobs, started):
                    report = job.result()
                    add("patterns" if seed == SEED else "repeats", name, report, pattern=pattern, asked_density=density, seed=seed)
                    self.say(f"{name}: {report['wall_seconds']:.0f} s, {report['density']:.1%} visited, "
                             f"answers {answered(report['first_evaluation']):.1%} at once, "
                             f"{answered(report['last_evaluation']):.1%} after {plan.more.steps} steps")
                for (pattern, attention, stage), (name, job) in zip(texts, started[len(jobs):]):
                    report = job.result()
                    add("texts", name, report, pattern=pattern, apart=stage.apart, steps=stage.steps)
                    self.say(f"{name}: {report['wall_seconds']:.0f} s, {report['density']:.1%} visited, "
                             f"loss {report['last_evaluation']['loss']:.4f}")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def tune(self, curriculum, init):
        """The same samples with fixed budgets and with tuned ones, by patterns of both kinds: whose scores are masses, and
        whose are not; with several seeds, as answers move by themselves from run to run. What is found is in tuning.json when
        all is done."""
        plan, found = self.plan, []
        for seed in [SEED, *plan.repeat_seeds]:
            for pattern in ("key-groups", "vertical-slash, spread"):
                for anchor in ("none", "mean"):
                    attention = {**attentions(plan.tuned_density, plan.tokens)[pattern], "balance": {"anchor": anchor}}
                    name = f"{pattern.replace(',', '').replace(' ', '-')}-{anchor}-seed-{seed}"
                    report = self.job(name, plan.tuned, init, attention, seed=seed)
                    shutil.rmtree(self.dir / "jobs" / name, ignore_errors=True)  # its model has served
                    by_task = ", ".join(f"{task} {share:.1%}" for task, share in shares(report["last_evaluation"]).items())
                    self.say(f"{name}: {report['wall_seconds']:.0f} s, {report['density']:.1%} visited; {by_task}")
                    found.append({**report, "pattern": pattern, "anchor": anchor, "seed": seed})
        (self.dir / "tuning.json").write_text(json.dumps({
            **self.about(curriculum), "steps": plan.tuned.steps, "jobs": found}, indent=1))

    def run(self):
        (self.tune if self.plan.tuned else self.go_on)(*self.train_dense())
        self.say("all done")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--plan", choices=PLANS, default="gpu")
    parser.add_argument("--engine", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--text", help="folder of text")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--began-before", type=float, default=0.0, help="seconds that the services took to start")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--ring", type=int, default=1, help="trainers that a job may have on a worker")
    parser.add_argument("--ringctl", required=True)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--command", required=True)
    suite = Suite(parser.parse_args())
    try:
        suite.run()
    except OutOfTime as reason:
        suite.say(reason)
        sys.exit(75)  # EX_TEMPFAIL
    finally:
        suite.wall_seconds()


if __name__ == "__main__":
    main()
