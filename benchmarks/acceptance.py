"""Acceptance after the same number of tokens: a drafter of this project's trainer against one of speculators' 0.9.0.

    python benchmarks/acceptance.py --work-dir runs/acceptance               the tiny hybrid, three seeds (40 minutes)
    python benchmarks/acceptance.py --work-dir runs/acceptance --store STORE a store of it with every last state

Both train on the same hidden-state store (theirs reads every last state, which `make demo-hybrid`'s store leaves out,
so one is extracted into the work folder), on a network of the same shape, and both last drafters are walked along the
target's own greedy answers to the same held-out prompts. Theirs trains by its own command line, fed straight from the
store, and by its own Trainer, in which only the device is replaced: it knows accelerators alone. It is given rows
packed to about the tokens of our step, as many anchors a row as ours has in a step, and goes on until it has seen at
least as many tokens AND taken at least as many optimizer steps as ours. Trainings that are finished are found again.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

from benchmarks.common import note_machine, table  # noqa: E402
from dflash_lib.conversations.prepare import PrepareOptions, prepare  # noqa: E402
from dflash_lib.conversations.rendering import ChatTemplate  # noqa: E402
from dflash_lib.decoding.acceptance import Interval  # noqa: E402
from dflash_lib.decoding.eval_prompts import read_prompts  # noqa: E402
from dflash_lib.decoding.evaluation import Answer, answer_prompts  # noqa: E402
from dflash_lib.decoding.training_walk import training_walk  # noqa: E402
from dflash_lib.drafter.dataset import split_samples  # noqa: E402
from dflash_lib.drafter.exported import open_drafter  # noqa: E402
from dflash_lib.drafter.recipe import TrainOptions  # noqa: E402
from dflash_lib.drafter.training_log import read_log  # noqa: E402
from dflash_lib.files import hash_value, read_json, write_json  # noqa: E402
from dflash_lib.hidden_states.extraction import start_extraction  # noqa: E402
from dflash_lib.hidden_states.formats import open_states  # noqa: E402
from dflash_lib.hidden_states.formats.convert import ConvertOptions, convert  # noqa: E402
from dflash_lib.hidden_states.plan import ExtractionOptions  # noqa: E402
from dflash_lib.hidden_states.store import HiddenStateStore  # noqa: E402
from dflash_lib.target.capture import default_layer_ids  # noqa: E402
from dflash_lib.target.loading import Target, load_target  # noqa: E402
from dflash_lib.workbench.parameters import declared_parameters, read_parameters_file  # noqa: E402
from dflash_lib.workbench.variants import Outcome, Variant, run_variants, train_options  # noqa: E402
from tests import speculators_package  # noqa: E402

JOB = REPOSITORY / "notebooks" / "params" / "demo_hybrid.yaml"
OURS = "ours"


def their_recipes(options: TrainOptions) -> dict[str, list[str]]:
    """How theirs may train: names and the arguments that differ. The first are the package's own defaults."""
    own_rate = ["--optimizer", "adamw", "--lr", options.learning_rate, "--scheduler-type", "cosine",
                "--scheduler-warmup-steps", options.warmup_steps, "--weight-decay", options.weight_decay]
    return {"speculators, its defaults": [],  # Muon at 1e-3, linear schedule, D-PACE, cross-entropy
            "speculators, our rate and schedule": own_rate,
            "speculators, our rate, KL": [*own_rate, "--loss-fn", "kl_div", "--per-position-loss-weight",
                                          "fixed-exp-decay", "--dflash-decay-gamma", options.gamma]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True, help="for trainings, and the store if none is given")
    parser.add_argument("--store", type=Path, help="of the tiny hybrid, with last_state: all")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "data" / "tiny_hybrid")
    parser.add_argument("--conversations", type=int, help="how many of the job's (default: all)")
    parser.add_argument("--steps", type=int, default=1500, help="of ours")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--theirs", nargs="+", type=int, choices=[0, 1, 2], default=[0, 1],
                        help="recipes: 0 its defaults, 1 with our rate and schedule, 2 with KL, too")
    parser.add_argument("--ours", nargs="+", default=[], metavar="CHANGES", help="more recipes of ours, each one "
                        "argument: 'slots_per_anchor=7 gamma=4'; their steps and tokens are those of the job's")
    parser.add_argument("--prompts", type=int, help="of each prompt file (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def job_parameters() -> dict:
    """What `make demo-hybrid` runs with: the notebooks' own values, and over them those of its parameter file."""
    found = {}
    for name in ("04_extract", "06_train"):
        declared = declared_parameters(REPOSITORY / "notebooks" / f"{name}.ipynb")
        found |= {key: parameter.default for key, parameter in declared.items()}
    return {**found, **read_parameters_file(JOB)}


def open_store(options: argparse.Namespace, params: dict, target: Target) -> HiddenStateStore:
    """The given store, or one of the job's settings that holds every last state, extracted where it is missing."""
    if options.store is not None:
        return HiddenStateStore.open(options.store)
    prepared = prepare(REPOSITORY / params["conversations"], target.tokenizer, prepare_options(options, params))
    prepared.save(options.work_dir / "prepared")
    start_extraction(options.work_dir / "states", options.model, options.work_dir / "prepared", ExtractionOptions(
        target_layer_ids=params["target_layer_ids"] or default_layer_ids(target.num_layers, params["num_aux_layers"]),
        encoding=params["encoding"], last_state="all", token_budget=params["token_budget"],
        samples_per_shard=params["samples_per_shard"], threads=options.threads), options.work_dir / "logs", show=False)
    return HiddenStateStore.open(options.work_dir / "states")


def prepare_options(options: argparse.Namespace, params: dict) -> PrepareOptions:
    return PrepareOptions(max_samples=options.conversations, max_length=params["max_length"])


def held_out_answers(options: argparse.Namespace, params: dict, target: Target, layer_ids: list[int]) -> list[Answer]:
    """The target's greedy answers to the job's held-out prompts and the shipped prompt sets."""
    template = ChatTemplate(target.tokenizer, prepare_options(options, params).template)
    files = [REPOSITORY / params["heldout_prompts"], *sorted((REPOSITORY / "data" / "eval_prompts").glob("*.jsonl"))]
    prompts = [prompt for path in files for prompt in read_prompts(path, template, options.prompts)]
    return answer_prompts(target, prompts, options.max_new_tokens, layer_ids)


def changed(changes: str) -> dict:
    """'name=value name=value' as fields of TrainOptions; values as YAML reads them."""
    return {name: yaml.safe_load(value) for name, value in (part.split("=", 1) for part in changes.split())}


@dataclass(frozen=True)
class Seen:
    """What a training saw: optimizer steps, tokens of the documents in its batches, supervised slots."""

    steps: int
    tokens: int
    slots: int


def seen_by_ours(folder: Path, store: HiddenStateStore, options: TrainOptions) -> Seen:
    """Of a finished training of ours: documents in the order of the epochs, so that the tokens follow from it."""
    train = split_samples(store, options.validation_samples, options.seed).train
    rows, _ = read_log(folder)
    documents = options.steps * options.batch_samples
    whole = sum(store.length(i) for i in train)
    tokens = documents / len(train) * whole  # whole epochs exactly, the last one on average
    return Seen(len(rows), round(tokens), int(sum(sum(row["slot_counts"]) for row in rows)))


def train_theirs(folder: Path, extra: list[str], store: HiddenStateStore, options: TrainOptions, least: Seen,
                 target: Target, rows: Path, threads: int) -> dict:
    """Trains theirs in `folder` as far as it is not finished; what it saw, its seconds, its checkpoint's folder."""
    lengths = [store.length(i) for i in store.sample_indices]
    row_length = max(*lengths, math.ceil(options.batch_samples * np.mean(lengths)))
    config = target.config
    said = {
        "--speculator-type": "dflash", "--verifier-name-or-path": target.path, "--data-path": rows,
        "--save-path": folder / "checkpoints", "--log-dir": folder / "logs",
        "--hidden-states-backend": "dflash-store", "--dflash-store": store.folder, "--on-missing": "raise",
        "--target-layer-ids": [k + 1 for k in store.target_layer_ids], "--num-layers": options.num_layers,
        "--full-attention-indices": list(range(options.num_layers)), "--block-size": options.block_size,
        "--max-anchors": options.batch_samples * options.anchors_per_sample, "--mask-token-id": options.mask_token_id,
        "--draft-vocab-size": config.vocab_size, "--draft-attn-impl": "sdpa", "--loss-implementation": "eager",
        "--hidden-states-dtype": "float32", "--total-seq-len": row_length, "--num-workers": 0, "--log-freq": 1000000,
        "--train-data-ratio": 1 - options.validation_samples / len(lengths), "--seed": options.seed}
    flat = [str(part) for name, value in said.items() for part in
            (name, *(value if isinstance(value, list) else [value]))] + [str(part) for part in extra]
    job = {"arguments": hash_value(flat), "tokens": least.tokens, "steps": least.steps, "store": store.plan.hash}
    if (folder / "finished.json").exists():
        found = read_json(folder / "finished.json")
        if found["job"] == job:
            return found
        raise SystemExit(f"{folder}: holds a training with other settings; choose another --work-dir")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("train_speculators_cpu.py"),
               folder / "seen.json", str(least.tokens), str(least.steps), *flat]
    began = time.monotonic()
    environment = {**speculators_package.environment(), "OMP_NUM_THREADS": str(threads)}
    with open(folder / "output.txt", "w", encoding="utf-8") as output:
        done = subprocess.run(list(map(str, command)), env=environment, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"speculators' training failed:\n{(folder / 'output.txt').read_text()[-4000:]}")
    found = {**read_json(folder / "seen.json"), "job": job, "whole_seconds": time.monotonic() - began,
             "command": flat}
    write_json(folder / "finished.json", found)
    return found


def measure_theirs(work_dir: Path, name: str, extra: list[str], seeds: list[int], store: HiddenStateStore,
                   options: TrainOptions, ours: dict[int, Seen], target: Target, answers: list[Answer],
                   threads: int) -> tuple[Outcome, list[Seen]]:
    """Trains theirs with every seed, on at least what ours saw, and walks each last drafter."""
    rows = work_dir / "rows"
    convert(open_states(store.folder), rows, ConvertOptions(to="speculators", with_states=False), show=False)
    counts, seconds, seen = [], [], []
    for seed in seeds:
        folder = work_dir / name.replace(", ", "-").replace(" ", "-") / f"seed-{seed}"
        found = train_theirs(folder, extra, store, replace(options, seed=seed), ours[seed], target, rows, threads)
        steps = training_walk(open_drafter(Path(found["checkpoint"]), target), target, answers)
        counts.append(np.array([[sum(s.num_new for s in prompt), len(prompt)] for prompt in steps], np.float64))
        seconds.append(found["seconds"])
        seen.append(Seen(found["steps"], found["tokens"], found["slots"]))
        sums = counts[-1].sum(axis=0)
        print(f"{name}, seed {seed}: acceptance {sums[0] / sums[1]:.3f} ({found['seconds']:.0f} s of training)",
              flush=True)
    return Outcome(name, np.stack(counts), seconds), seen


def shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def report(outcomes: list[Outcome], seen: dict[str, list[Seen]], seeds: list[int], answers: list[Answer]) -> None:
    ours, rows = outcomes[0], []
    for outcome in outcomes:
        each = seen[outcome.name]
        rows.append([outcome.name, *(f"{value:.3f}" for value in outcome.by_seed), shown(outcome.acceptance),
                     *(["", ""] if outcome is ours else [shown(ours.ahead_of(outcome)),
                                                         shown(ours.ahead_by_seed(outcome))]),
                     f"{np.mean([s.tokens for s in each]):,.0f}", f"{np.mean([s.steps for s in each]):,.0f}",
                     f"{np.mean([s.slots for s in each]):,.0f}", f"{np.mean(outcome.seconds):.0f}"])
    print(f"\nAcceptance length on {len(answers)} held-out prompts, the walked greedy answers; 95 % intervals: over "
          "prompts, and of our lead over prompts and over seeds (paired)")
    table(["trainer", *(f"seed {seed}" for seed in seeds), "all seeds", "ours ahead, prompts", "ours ahead, seeds",
           "tokens seen", "optimizer steps", "supervised slots", "seconds of training"], rows)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    params, work_dir = job_parameters(), options.work_dir.resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    target = load_target(options.model)
    store = open_store(options, params, target)
    answers = held_out_answers(options, params, target, store.target_layer_ids)
    note_machine("Before")
    recipe = train_options(params, steps=options.steps, validation_interval=options.steps,
                           checkpoint_interval=options.steps,
                           validation_samples=min(params["validation_samples"], store.num_samples // 10))
    print("ours:", json.dumps(asdict(recipe)), flush=True)
    variants = [Variant(OURS, store.folder, recipe)] + [
        Variant(f"{OURS}, {changes}", store.folder, replace(recipe, **changed(changes))) for changes in options.ours]
    outcomes = run_variants(work_dir, variants, options.seeds, target, answers, threads=options.threads)
    seen = {variant.name: [seen_by_ours(work_dir / variant.name / f"seed-{seed}", store, replace(
        variant.options, seed=seed)) for seed in options.seeds] for variant in variants}
    by_seed = dict(zip(options.seeds, seen[OURS], strict=True))
    recipes = list(their_recipes(recipe).items())
    for number in options.theirs:
        name, extra = recipes[number]
        outcome, seen[name] = measure_theirs(work_dir, name, extra, options.seeds, store, recipe, by_seed, target,
                                             answers, options.threads)
        outcomes.append(outcome)
    report(outcomes, seen, options.seeds, answers)
    note_machine("After")


if __name__ == "__main__":
    main()
