"""One or several drafters on the same prompts: every figure of an evaluation, measured in one process.

The target's greedy answers are written once and every drafter is walked along them; then plain decoding and all
drafters take turns, prompt by prompt. Drafters may differ in block size and in the layers that they read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.decoding.acceptance import Interval, SlotAcceptance, acceptance_difference, acceptance_interval, by_kind
from dflash_lib.decoding.acceptance import by_slot as slots_of
from dflash_lib.decoding.analysis import Bin, accepted_histogram, by_position, by_repetition, repetitiveness
from dflash_lib.decoding.baselines import BigramProposer
from dflash_lib.decoding.eval_prompts import EvalPrompt
from dflash_lib.decoding.evaluation import (
    Answer,
    answer_prompts,
    draft_answers,
    walk_baselines,
    walk_block_sizes,
    with_layers,
)
from dflash_lib.decoding.rejections import find_rejections, rejection_examples, rejection_table
from dflash_lib.decoding.side_by_side import (
    BlockLength,
    SideBySide,
    Speed,
    Way,
    best_block_size,
    block_lengths,
    decode_in_turns,
    measure_step_seconds,
    speed_of,
)
from dflash_lib.decoding.speculative import Step
from dflash_lib.decoding.training_walk import WalkComparison, compare_walk, training_walk
from dflash_lib.drafter.exported import find_drafter, is_exported, open_drafter
from dflash_lib.drafter.folder import DrafterError, TrainedDrafter
from dflash_lib.drafter.inference import DrafterProposer
from dflash_lib.progress import Progress
from dflash_lib.target.loading import Target

TRAINED = "trained drafter"


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter with the name that it goes by in tables and figures. rows: the token rows of its run, for the bigram
    table; None where there is no run around it."""

    name: str
    path: Path
    drafter: TrainedDrafter
    proposer: DrafterProposer
    rows: PreparedRows | None = None

    @property
    def block_size(self) -> int:
        """Tokens of a verify step, the anchor counted, when all drafts of the trained block are asked for."""
        return self.drafter.config.num_drafts + 1

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.drafter.config.target_layer_ids


def drafter_names(folders: Sequence[Path | str]) -> list[str]:
    """A short name for each drafter folder: its run's, or its own, with "(export)" behind an exported one; where two
    would be called the same, the paths as given. Raises DrafterError for a folder that is given twice."""
    found = [find_drafter(folder) for folder in folders]
    names = []
    for i, folder in enumerate(found):
        if folder.resolve() in [other.resolve() for other in found[:i]]:
            raise DrafterError(f"{folders[i]}: this drafter is given twice")
        parts = [part for part in folder.resolve().parts if part not in ("drafter", "best", "last", "export", "zlab",
                                                                       "speculators")]
        names.append(parts[-1] + (" (export)" if is_exported(folder) else ""))
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def open_drafters(folders: Sequence[Path | str], target: Target) -> list[NamedDrafter]:
    """Drafters of any kind of folder (see `find_drafter`), in the target's dtype.

    Raises DrafterError, also for a drafter of another target.
    """
    opened = []
    for name, path in zip(drafter_names(folders), folders, strict=True):
        drafter = open_drafter(path, target)
        drafter.network.to(target.device, target.head.weight.dtype)
        folder = find_drafter(path)
        run = next((up for up in folder.resolve().parents if (up / "prepared" / "prepared.json").is_file()
                    and (up / "drafter").is_dir()), None)
        opened.append(NamedDrafter(name, Path(path), drafter, DrafterProposer(drafter, target, name),
                                   None if run is None else PreparedRows.load(run / "prepared")))
    return opened


@dataclass(frozen=True)
class Evaluation:
    """What is known of one drafter on the prompts, block_size (tokens a verify step) being the trained one unless said
    otherwise. sample_from_anchor: its block drafts block_size - 1 tokens out of as many slots.

    acceptance, slots, histogram, by_set, by_kind, positions, repetition: of the steps decoded for real. walked: the
    steps along the target's answers by name, the trained drafter first and toys behind it; promised: each block size
    from walk and step costs; speeds: real decoding at `block_size` and at the one that these promise; walk: training's
    against decoding, None where rounding led every prompt to another text than the one that was walked; rejected:
    tables of refused drafts. way: the key of block_size in the `SideBySide` results.
    """

    name: str
    path: Path
    block_size: int
    sample_from_anchor: bool
    layer_ids: tuple[int, ...]
    way: tuple[str, int]
    knows_target: bool
    acceptance: Interval
    slots: SlotAcceptance
    histogram: list[int]
    by_set: dict[str, Interval]
    by_kind: dict[str, Interval]
    positions: list[Bin]
    repetition: list[Bin]
    walked: dict[str, list[list[Step]]]
    promised: list[BlockLength]
    speeds: dict[int, Speed]
    walk: WalkComparison | None
    rejected: list[dict[str, Any]]
    rejected_examples: list[dict[str, Any]]

    def steps(self, results: Sequence[SideBySide]) -> list[list[Step]]:
        """Each prompt's verify steps of real decoding."""
        return [result.speculative[self.way].steps for result in results]

    def proposers(self) -> tuple[dict[str, Interval], dict[str, Interval]]:
        """Acceptance length of the drafter and of its toys, and its paired lead over each toy."""
        return ({name: acceptance_interval(steps) for name, steps in self.walked.items()},
                {name: acceptance_difference(self.walked[TRAINED], steps)
                 for name, steps in self.walked.items() if name != TRAINED})


@dataclass(frozen=True)
class Comparison:
    """The evaluation of one or several drafters. repetitiveness: of each prompt's answer; differences: the paired
    difference of every drafter's acceptance length to the first one's; leaves: prompts x drafters whose output is not
    plain decoding's, as (prompt's set and id, drafter and block size, outcome, position, gap)."""

    prompts: list[EvalPrompt]
    results: list[SideBySide]
    repetitiveness: list[float]
    evaluations: list[Evaluation]
    differences: dict[str, Interval]
    leaves: list[dict[str, Any]] = field(default_factory=list)


def compare_drafters(target: Target, drafters: Sequence[NamedDrafter], prompts: Sequence[EvalPrompt],
                     max_new_tokens: int) -> Comparison:
    """Evaluates all drafters on all prompts. Raises ValueError for fewer than two prompts."""
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} prompt: at least two are needed, for intervals over prompts")
    layers = sorted({k for drafter in drafters for k in drafter.layer_ids})
    with Progress(len(prompts), "the target's answers", "prompts") as progress:
        answers = answer_prompts(target, prompts, max_new_tokens, layers)
        progress.set(len(prompts))
    walks, ways = {}, {}
    with Progress(len(drafters), "drafts along these answers", "drafters") as progress:
        for drafter in drafters:
            walks[drafter.name] = walk = _Walk.of(target, drafter, with_layers(answers, layers, drafter.layer_ids))
            for size in sorted({drafter.block_size, walk.best}):
                ways[drafter.name, size] = Way(drafter.proposer, size, drafter.layer_ids)
            progress.update(1)
    with Progress(len(prompts), "decoding", "prompts") as progress:
        results = decode_in_turns(target, ways, prompts, max_new_tokens, progress.set)
    shares = [repetitiveness(r.prompt.token_ids, r.plain.token_ids) for r in results]
    evaluations = [_evaluation(target, drafter, walks[drafter.name], results, shares) for drafter in drafters]
    first = evaluations[0].steps(results)
    differences = {e.name: acceptance_difference(e.steps(results), first) for e in evaluations[1:]}
    return Comparison(list(prompts), results, shares, evaluations, differences, _leaves(results))


@dataclass(frozen=True)
class _Walk:
    """A drafter along the answers: its drafts, its steps by block size, its toys' steps, what block sizes promise."""

    answers: list[Answer]
    drafts: list[list[list[int]]]
    by_size: dict[int, list[list[Step]]]
    toys: dict[str, list[list[Step]]]
    promised: list[BlockLength]
    best: int
    training: list[list[Step]]

    @classmethod
    def of(cls, target: Target, drafter: NamedDrafter, answers: list[Answer]) -> "_Walk":
        size = drafter.block_size
        drafts = draft_answers(drafter.proposer, answers, size)
        by_size = walk_block_sizes(drafts, answers, size)
        rows = drafter.rows
        bigram = None if rows is None else BigramProposer.from_rows((rows.row(i) for i in range(len(rows))),
                                                                    drafter.drafter.config.vocab_size)
        longest = max(answers, key=lambda answer: len(answer.token_ids))
        promised = block_lengths(by_size, *measure_step_seconds(target, drafter.proposer, longest, size))
        return cls(answers, drafts, by_size, walk_baselines(drafter.proposer, bigram, answers, size), promised,
                   best_block_size(promised), training_walk(drafter.drafter, target, answers))


def _evaluation(target: Target, drafter: NamedDrafter, walk: _Walk, results: Sequence[SideBySide],
                shares: Sequence[float]) -> Evaluation:
    size, way = drafter.block_size, (drafter.name, drafter.block_size)
    decoded = [result.speculative[way] for result in results]
    steps = [answer.steps for answer in decoded]
    flat = [step for of_prompt in steps for step in of_prompt]
    prompts = [result.prompt for result in results]
    comparable = any(a.token_ids == d.token_ids and d.steps for a, d in zip(walk.answers, decoded, strict=True))
    rejections = find_rejections(walk.drafts, walk.answers, walk.by_size[size])
    return Evaluation(
        name=drafter.name, path=drafter.path, block_size=size,
        sample_from_anchor=drafter.drafter.config.sample_from_anchor, layer_ids=drafter.layer_ids, way=way,
        knows_target=bool(drafter.drafter.target), acceptance=acceptance_interval(steps), slots=slots_of(flat),
        histogram=accepted_histogram(flat, size).tolist(),
        by_set=by_kind(steps, [prompt.prompt_set for prompt in prompts]),
        by_kind=by_kind(steps, [prompt.kind for prompt in prompts]),
        positions=by_position(steps, [len(prompt.token_ids) for prompt in prompts]),
        repetition=by_repetition(steps, shares), walked={TRAINED: walk.by_size[size], **walk.toys},
        promised=walk.promised,
        speeds={s: speed_of(results, (drafter.name, s), s) for s in sorted({size, walk.best})},
        walk=compare_walk(walk.training, walk.answers, decoded) if comparable else None,
        rejected=rejection_table(target.tokenizer, rejections),
        rejected_examples=rejection_examples(target.tokenizer, rejections))


def _leaves(results: Sequence[SideBySide]) -> list[dict[str, Any]]:
    """Every answer that is not plain decoding's, JSON-able; gap: None where an answer ended early."""
    found = []
    for result in results:
        for way in result.speculative:
            if (outcome := result.outcome(way)) != "identical":
                parted = result.divergences.get(way)
                found.append({
                    "prompt": result.prompt.id, "set": result.prompt.prompt_set, "drafter": way[0],
                    "block_size": way[1], "outcome": outcome, "position": None if parted is None else parted.position,
                    "gap": None if parted is None or parted.gap == float("inf") else parted.gap})
    return found
