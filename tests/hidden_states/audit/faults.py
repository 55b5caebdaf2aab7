"""Faults planted by code: each takes clean states and a seed, and breaks them at random slots, samples and strengths.

A fault is a function (Case) -> Planted. It draws all it needs from the case's generator. `must` are the names that the
audit has to say, `may` those that it may say besides (one fault can look like two: a layer that is the embedding).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dflash_lib.hidden_states.audit import faults as names
from dflash_lib.hidden_states.audit.reference import FinalNorm, run_row
from dflash_lib.hidden_states.formats.source import POST_NORM, PRE_NORM, SourceSample
from dflash_lib.target.loading import Target
from tests.hidden_states.audit.memory import MemorySource, extract, make_rows, make_sample, with_states


@dataclass
class Case:
    """A target, rows, and the layers to store; make_loud, make_tuned, make_other: targets made from it, with states
    beyond fp16, with changed weights, with weights of its own."""

    target: Target
    rng: np.random.Generator
    encoding: str = "bf16"
    num: int = 6
    make_loud: Callable[[], Target] | None = None
    make_tuned: Callable[[float], Target] | None = None
    make_other: Callable[[], Target] | None = None
    rows: list[list[int]] = field(default_factory=list)
    layer_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = make_rows(self.rng, self.target, self.num)
        layers = np.arange(1, self.target.num_layers - 1)
        self.layer_ids = sorted(self.rng.choice(layers, min(3, len(layers)), replace=False).tolist())

    def clean(self, last: str | None = PRE_NORM, **changes) -> MemorySource:
        return extract(changes.get("target", self.target), changes.get("rows", self.rows),
                       changes.get("layer_ids", self.layer_ids), last, self.encoding)

    def encode(self, sample: SourceSample, states: Tensor, **changes) -> SourceSample:
        return with_states(sample, states, self.encoding, **changes)

    def some(self, among: int, least: int = 1) -> list[int]:
        """A random, not empty subset of range(among)."""
        return sorted(self.rng.choice(among, self.rng.integers(least, among + 1), replace=False).tolist())

    def one(self, among: int) -> int:
        return int(self.rng.integers(among))


@dataclass
class Planted:
    source: MemorySource
    must: set[str]
    slots: set[int] | None = None
    samples: set[int] | None = None
    target: Target | None = None
    may: set[str] = field(default_factory=set)


PLANTS: dict[str, Callable[[Case], Planted]] = {}


def plant(function: Callable[[Case], Planted]) -> Callable[[Case], Planted]:
    PLANTS[function.__name__] = function
    return function


def change(case: Case, source: MemorySource, samples: list[int], alter: Callable[[Tensor, int], Tensor],
           **changes) -> MemorySource:
    """The source with `alter(states, i)` in place of the states of some samples."""
    for i in samples:
        source.samples[i] = case.encode(source.samples[i], alter(source.samples[i].decoded().clone(), i), **changes)
    return source


def residual(target: Target, ids: list[int]) -> Tensor:
    return run_row(target, ids)


# ---- what a slot holds -----------------------------------------------------------------------------------------------

@plant
def ids_off_by_one(case: Case) -> Planted:
    step = int(case.rng.choice([-1, 1]))
    source = case.clean(layer_ids=[k + step for k in case.layer_ids])
    source.target_layer_ids = case.layer_ids
    return Planted(source, {names.LAYER_SHIFTED}, set(range(len(case.layer_ids))),
                   may={names.EMBEDDING})


@plant
def one_wrong_layer(case: Case) -> Planted:
    slot = case.one(len(case.layer_ids))
    free = [k for k in range(case.target.num_layers) if k not in case.layer_ids]
    wrong = int(case.rng.choice(free))
    source = case.clean()
    change(case, source, range(len(source)), lambda states, i: torch.cat([
        states[:, :slot], residual(case.target, case.rows[i])[:, wrong + 1, None], states[:, slot + 1:]], 1))
    return Planted(source, {names.WRONG_LAYER if len(case.layer_ids) > 1 else names.LAYER_SHIFTED}, {slot})


@plant
def one_wrong_layer_in_some_samples(case: Case) -> Planted:
    slot, hit = case.one(len(case.layer_ids)), case.some(2)
    wrong = int(case.rng.choice([k for k in range(case.target.num_layers) if k != case.layer_ids[slot]]))

    def alter(states: Tensor, i: int) -> Tensor:
        states[:, slot] = residual(case.target, case.rows[i])[:, wrong + 1]
        return states

    return Planted(change(case, case.clean(), hit, alter), {names.WRONG_LAYER}, {slot}, set(hit))


@plant
def slots_swapped(case: Case) -> Planted:
    order = case.rng.permutation(len(case.layer_ids))
    while (order == np.arange(len(order))).all():
        order = case.rng.permutation(len(case.layer_ids))
    source = case.clean()
    change(case, source, range(len(source)), lambda states, i: torch.cat([states[:, order], states[:, -1:]], 1))
    return Planted(source, {names.SLOT_ORDER}, set(np.flatnonzero(order != np.arange(len(order))).tolist()))


@plant
def embedding(case: Case) -> Planted:
    slot = case.one(len(case.layer_ids))
    source = case.clean()

    def alter(states: Tensor, i: int) -> Tensor:
        states[:, slot] = residual(case.target, case.rows[i])[:, 0]
        return states

    return Planted(change(case, source, range(len(source)), alter), {names.EMBEDDING}, {slot})


@plant
def normed_slot(case: Case) -> Planted:
    slot, norm = case.one(len(case.layer_ids)), FinalNorm(case.target)
    source = case.clean()

    def alter(states: Tensor, i: int) -> Tensor:
        states[:, slot] = norm(residual(case.target, case.rows[i])[:, case.layer_ids[slot] + 1]).detach()
        return states

    return Planted(change(case, source, range(len(source)), alter), {names.POST_NORM}, {slot})


@plant
def last_normed(case: Case) -> Planted:
    source = case.clean(POST_NORM)
    source.last = PRE_NORM
    return Planted(source, {names.POST_NORM}, {len(case.layer_ids)})


@plant
def last_not_normed(case: Case) -> Planted:
    source = case.clean(PRE_NORM)
    source.last = POST_NORM
    return Planted(source, {names.PRE_NORM}, {len(case.layer_ids)})


@plant
def last_with_other_norm(case: Case) -> Planted:
    norm = FinalNorm(case.target)
    source = case.clean()
    source.last = str(case.rng.choice([PRE_NORM, POST_NORM]))

    def alter(states: Tensor, i: int) -> Tensor:
        states[:, -1] = norm.other(states[:, -1]).detach()
        return states

    return Planted(change(case, source, range(len(source)), alter), {names.OTHER_NORM}, {len(case.layer_ids)})


# ---- which token a row belongs to ------------------------------------------------------------------------------------

def roll(states: Tensor, shift: int, slots: list[int], start: int = 0) -> Tensor:
    """The state of token t at t + shift, from row `start` on; what is free repeats the edge."""
    moved = states.clone()
    for t in range(start, len(states)):
        moved[t, slots] = states[min(max(t - shift, 0), len(states) - 1), slots]
    return moved


@plant
def states_shifted(case: Case) -> Planted:
    shift, slots = int(case.rng.choice([-2, -1, 1, 2])), case.some(len(case.layer_ids) + 1)
    source = case.clean()
    change(case, source, range(len(source)), lambda states, i: roll(states, shift, slots))
    return Planted(source, {names.TOKENS_SHIFTED}, set(slots))


@plant
def states_shifted_from_a_token_on_in_one_sample(case: Case) -> Planted:
    shift, slots, i = int(case.rng.choice([-1, 1])), case.some(len(case.layer_ids) + 1), case.one(case.num)
    start = int(case.rng.integers(1, max(2, len(case.rows[i]) - 4)))
    source = change(case, case.clean(), [i], lambda states, i: roll(states, shift, slots, start))
    return Planted(source, {names.TOKENS_SHIFTED}, set(slots), {i}, may={names.ROWS_MOVED})


@plant
def rows_reversed(case: Case) -> Planted:
    i = case.one(case.num)
    source = change(case, case.clean(), [i], lambda states, i: states.flip(0))
    return Planted(source, {names.ROWS_MOVED}, None, {i})


@plant
def ids_one_ahead(case: Case) -> Planted:
    """The stored ids begin with the second token."""
    hit = case.some(case.num)
    source = case.clean()
    for i in hit:
        ids = case.rows[i][1:] + [int(case.rng.integers(4, case.target.config.vocab_size))]
        source.samples[i] = replace(source.samples[i], input_ids=np.array(ids, np.int64))
    return Planted(source, {names.IDS_SHIFTED, names.IDS_DIFFER}, None, set(hit))


@plant
def ids_one_behind(case: Case) -> Planted:
    """A token too many before the stored ids."""
    hit = case.some(case.num)
    source = case.clean()
    for i in hit:
        ids = [int(case.rng.integers(4, case.target.config.vocab_size))] + case.rows[i][:-1]
        source.samples[i] = replace(source.samples[i], input_ids=np.array(ids, np.int64))
    return Planted(source, {names.IDS_SHIFTED}, None, set(hit))


@plant
def bos_added(case: Case) -> Planted:
    """The engine put a beginning-of-text token before the ids; its state is stored, or left out."""
    kept = bool(case.rng.integers(2))
    source = case.clean(rows=[[0, *ids] for ids in case.rows])
    for i, ids in enumerate(case.rows):
        states = source.samples[i].decoded()
        states = states[:-1] if kept else states[1:]
        source.samples[i] = make_sample(i, ids, states, case.encoding)
    return Planted(source, {names.BOS})


@plant
def ids_cut(case: Case) -> Planted:
    """Ids without their end: more rows than tokens."""
    i, count = case.one(case.num), int(case.rng.integers(1, 5))
    source = case.clean()
    sample = source.samples[i]
    source.samples[i] = replace(sample, input_ids=sample.input_ids[:-count], loss_mask=sample.loss_mask[:-count])
    return Planted(source, {names.MORE}, None, {i})


@plant
def fewer_states(case: Case) -> Planted:
    hit = case.some(case.num)
    count = int(case.rng.integers(1, 5))
    source = case.clean()
    for i in hit:
        sample = source.samples[i]
        source.samples[i] = replace(sample, states=sample.states[:-count],
                                    scales=None if sample.scales is None else sample.scales[:-count])
    return Planted(source, {names.FEWER}, None, set(hit))


@plant
def other_template(case: Case) -> Planted:
    """Computed from a text that parts from the ids somewhere, as another template does."""
    hit = case.some(case.num)
    source = case.clean()
    for i in hit:
        ids = case.rows[i]
        part = int(case.rng.integers(1, len(ids) - 2))
        other = ids[:part] + case.rng.integers(4, case.target.config.vocab_size, len(ids) - part).tolist()
        source.samples[i] = replace(source.samples[i], input_ids=np.array(other, np.int64))
    return Planted(source, {names.IDS_DIFFER}, None, set(hit))


@plant
def one_other_token(case: Case) -> Planted:
    i = case.one(case.num)
    source = case.clean()
    ids = list(case.rows[i])
    part = int(case.rng.integers(1, len(ids) - 1))
    ids[part] = (ids[part] - 4 + int(case.rng.integers(1, 300))) % 370 + 4
    source.samples[i] = replace(source.samples[i], input_ids=np.array(ids, np.int64))
    return Planted(source, {names.IDS_DIFFER}, None, {i})


@plant
def other_tokenizer(case: Case) -> Planted:
    """The ids of another vocabulary: every one means another token."""
    size = case.target.config.vocab_size
    table = case.rng.permutation(size)
    source = case.clean()
    for i, ids in enumerate(case.rows):
        source.samples[i] = replace(source.samples[i], input_ids=table[np.array(ids)].astype(np.int64))
    return Planted(source, {names.IDS_DIFFER})
