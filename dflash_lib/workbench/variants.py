"""The same training with one thing changed at a time, over several seeds, measured on the same held-out answers.

Each training is a job in a folder of its own, so a study that was stopped goes on with those that are missing. Its
drafter is walked along the target's own greedy answers, which counts what decoding would accept.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lib.decoding.acceptance import Interval, ratio_difference, ratio_interval
from dflash_lib.decoding.evaluation import Answer
from dflash_lib.decoding.training_walk import training_walk
from dflash_lib.drafter import read_log
from dflash_lib.drafter.folder import load_drafter
from dflash_lib.drafter.recipe import Compute, TrainOptions
from dflash_lib.drafter.training_job import start_training
from dflash_lib.target.loading import Target

PARAMETERS = {  # of the notebooks, for fields of TrainOptions that have another name there
    "num_layers": "num_drafter_layers", "intermediate_size": "drafter_intermediate_size",
    "num_heads": "num_drafter_heads", "num_kv_heads": "num_drafter_kv_heads", "head_dim": "drafter_head_dim",
    "checkpoint_interval": "validation_interval"}


def student_quantile(probability: float, free: float) -> float:
    """The quantile of Student's t with `free` degrees of freedom (at least 1, whole or not), probability 0.5 to less
    than 1: with t = sqrt(free) * tan(angle) its density is cos(angle) ** (free - 1), which is summed up."""
    angles = np.linspace(0.0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (free - 1)
    up_to = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(free) * math.tan(float(np.interp((2 * probability - 1) * up_to[-1], up_to, angles)))


def train_options(params: dict[str, Any], **changes: Any) -> TrainOptions:
    """The recipe that a job's parameters state, as 06_train has them; `changes` are fields of TrainOptions."""
    stated = {field.name: params[PARAMETERS.get(field.name, field.name)] for field in fields(TrainOptions)
              if PARAMETERS.get(field.name, field.name) in params}
    return TrainOptions(**{**stated, **changes})


def compute_options(params: dict[str, Any]) -> Compute:
    """How a step is computed, as a job's parameters state it."""
    return Compute(**{field.name: params[field.name] for field in fields(Compute) if field.name in params})


@dataclass(frozen=True)
class Variant:
    """name; store: folder of the hidden states to train from; options: the recipe, whose seed each training sets."""

    name: str
    store: Path
    options: TrainOptions


@dataclass(frozen=True)
class Outcome:
    """counts: float64 [seeds, prompts, 2], tokens added and verify steps on each prompt's answer; seconds: each seed's
    `training_seconds`."""

    name: str
    counts: np.ndarray
    seconds: list[float]

    @property
    def by_seed(self) -> list[float]:
        """Acceptance length of each seed's drafter."""
        sums = self.counts.sum(axis=1)
        return (sums[:, 0] / sums[:, 1]).tolist()

    @property
    def acceptance(self) -> Interval:
        """Acceptance length over all seeds, with a 95 % interval over prompts."""
        return ratio_interval(self.counts.sum(axis=0))

    def ahead_of(self, other: "Outcome") -> Interval:
        """Acceptance length minus another variant's: 95 % interval over prompts, the same ones drawn of both."""
        return ratio_difference(self.counts.sum(axis=0), other.counts.sum(axis=0))

    def ahead_by_seed(self, other: "Outcome") -> Interval:
        """The same, with the 95 % interval over seeds (Student's t of the differences seed by seed): what chance in
        weights, split and order does. One seed has no interval: low = high = value."""
        differences = np.array(self.by_seed) - np.array(other.by_seed)
        mean, num = float(differences.mean()), len(differences)
        if num < 2:
            return Interval(mean, mean, mean)
        half = student_quantile(0.975, num - 1) * float(differences.std(ddof=1)) / math.sqrt(num)
        return Interval(mean, mean - half, mean + half)


def training_seconds(folder: Path) -> float:
    """What the steps of a training would take on a quiet machine: their number times the lower quartile of their
    seconds. The sum of them says more of what else was running (measured: three times as much for the same work)."""
    steps, _ = read_log(folder)
    return len(steps) * float(np.quantile([row["seconds"] for row in steps], 0.25))


def run_variants(folder: Path, variants: Sequence[Variant], seeds: Sequence[int], target: Target,
               answers: Sequence[Answer], *, dtype: str = "float32", device: str = "cpu", threads: int = 1,
               show: Callable[[str], None] = print) -> list[Outcome]:
    """Trains every variant with every seed, as far as `folder` lacks it, and measures the last drafter of each.

    answers: of the target to held-out prompts. show: gets a line a training. Raises ValueError for names that occur
    twice and without seeds or answers, and what `start_training` raises.
    """
    names = [variant.name for variant in variants]
    if len(set(names)) != len(names) or not names or not seeds or not answers:
        raise ValueError(f"variants {names}, seeds {list(seeds)}, {len(answers)} answers: names of their own, at least "
                         "one seed and one answer are needed")
    counts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for seed in seeds:  # seed by seed, so that a study that is stopped has whole rows to compare
        for variant in variants:
            place = folder / variant.name.replace("/", "-") / f"seed-{seed}"
            start_training(place, store=variant.store, model=target.path, dtype=dtype, device=device,
                           threads=threads, options=replace(variant.options, seed=seed), show=False)
            shutil.rmtree(place / "checkpoints", ignore_errors=True)  # ten times a drafter's size
            steps = training_walk(load_drafter(place / "last"), target, answers)
            counts[variant.name].append(np.array([[sum(s.num_new for s in prompt), len(prompt)] for prompt in steps],
                                                 np.float64))
            seconds[variant.name].append(training_seconds(place))
            sums = counts[variant.name][-1].sum(axis=0)
            show(f"{variant.name}, seed {seed}: acceptance {sums[0] / sums[1]:.3f} "
                 f"({seconds[variant.name][-1]:.0f} s of training)")
    return [Outcome(name, np.stack(counts[name]), seconds[name]) for name in names]
