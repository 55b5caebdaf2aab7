"""More planted faults (see faults.py): values, wrong requests, batches, encodings, models."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dflash_lib.hidden_states.audit import faults as names
from dflash_lib.hidden_states.audit.reference import run_row, unit_length
from dflash_lib.hidden_states.formats.source import POST_NORM
from tests.hidden_states.audit.faults import Case, Planted, change, plant
from tests.hidden_states.audit.memory import make_sample, states_of


@plant
def all_zeros(case: Case) -> Planted:
    source = case.clean()
    return Planted(change(case, source, range(case.num), lambda states, i: states * 0), {names.ZEROS})


@plant
def zeros_from_a_token_on(case: Case) -> Planted:
    hit, slots = case.some(case.num), case.some(len(case.layer_ids) + 1)
    share = float(case.rng.uniform(0.05, 0.9))

    def alter(states: Tensor, i: int) -> Tensor:
        states[min(int(len(states) * (1 - share)), len(states) - 1):, slots] = 0
        return states

    return Planted(change(case, case.clean(), hit, alter), {names.ZEROS}, set(slots), set(hit))


@plant
def not_finite(case: Case) -> Planted:
    i, slot = case.one(case.num), case.one(len(case.layer_ids) + 1)
    source = case.clean()
    states = source.samples[i].states.float().clone()
    value = float("nan") if case.encoding.startswith("fp8") else float(case.rng.choice([np.nan, np.inf, -np.inf]))
    states[case.one(len(states)), slot, case.one(states.shape[-1])] = value
    source.samples[i] = replace(source.samples[i], states=states.to(source.samples[i].states.dtype))
    return Planted(source, {names.NOT_FINITE}, {slot}, {i},
                   may={names.FP16} if case.encoding == "fp16" else set())


@plant
def two_samples_swapped(case: Case) -> Planted:
    a, b = case.rng.choice(case.num, 2, replace=False).tolist()
    source = case.clean()
    for i, j in ((a, b), (b, a)):
        n = min(len(case.rows[i]), len(case.rows[j]))  # as a batch gives them back: cut, or with its own rows behind
        states = source.samples[i].decoded().clone()
        states[:n] = states_of(case.target, case.rows[j], case.layer_ids)[:n]
        source.samples[i] = make_sample(i, case.rows[i], states, case.encoding)
    return Planted(source, {names.OTHER_SAMPLE}, None, {a, b})


@plant
def the_request_before(case: Case) -> Planted:
    """Every sample got the states of the one before it."""
    source = case.clean()
    states = [sample.decoded() for sample in source.samples]
    for i, ids in enumerate(case.rows):
        other = states[i - 1][:len(ids)]
        source.samples[i] = make_sample(i, ids, other, case.encoding)
    return Planted(source, {names.OTHER_SAMPLE}, may={names.FEWER})


@plant
def rows_of_the_request_before(case: Case) -> Planted:
    """Some rows of one sample are left over from the sample before it in the buffer."""
    i, slots = case.one(case.num), case.some(len(case.layer_ids) + 1)
    other = case.rows[i - 1]
    count = int(case.rng.integers(1, min(len(other), len(case.rows[i])) - 2))
    start = int(case.rng.integers(0, min(len(other), len(case.rows[i])) - count))
    stale = states_of(case.target, other, case.layer_ids)

    def alter(states: Tensor, i: int) -> Tensor:
        states[start:start + count, slots] = stale[start:start + count, slots]
        return states

    return Planted(change(case, case.clean(), [i], alter), {names.OTHER_SAMPLE}, set(slots), {i})


@plant
def left_padded(case: Case) -> Planted:
    """One batch, padded on the left, without a mask: the longest row is right."""
    longest, pad = max(map(len, case.rows)), int(case.rng.choice([2, 0]))
    source = case.clean()
    slots = [k + 1 for k in case.layer_ids] + [case.target.num_layers]
    for i, ids in enumerate(case.rows):
        amount = longest - len(ids)
        states = run_row(case.target, [pad] * amount + ids)[amount:, slots]
        source.samples[i] = make_sample(i, ids, states, case.encoding)
    return Planted(source, {names.LEFT_PADDING}, None, {i for i, ids in enumerate(case.rows) if len(ids) < longest})


@plant
def packed(case: Case) -> Planted:
    """All samples in rows of two or three, one behind the other."""
    source = case.clean()
    slots = [k + 1 for k in case.layer_ids] + [case.target.num_layers]
    size, hit = int(case.rng.integers(2, 4)), set()
    for first in range(0, case.num, size):
        row: list[int] = []
        for i in range(first, min(first + size, case.num)):
            begin = len(row)
            row += case.rows[i]
            states = run_row(case.target, row)[begin:, slots]
            source.samples[i] = make_sample(i, case.rows[i], states, case.encoding)
            if begin:
                hit.add(i)
    return Planted(source, {names.PACKING}, None, hit)


@plant
def fp16_overflow(case: Case) -> Planted:
    """Computed in bf16 or float32, saved as fp16: what is larger becomes infinite, or is cut off."""
    target, cut = case.make_loud(), bool(case.rng.integers(2))
    source = case.clean(target=target)
    source.encoding = "fp16"
    for i, sample in enumerate(source.samples):
        states = states_of(target, case.rows[i], case.layer_ids)
        states = states.clamp(-65504, 65504) if cut else states
        source.samples[i] = replace(sample, states=states.half(), scales=None)
    return Planted(source, {names.FP16}, target=target)


@plant
def fp8_without_scales(case: Case) -> Planted:
    slots = 1 if bool(case.rng.integers(2)) else None
    source = case.clean()
    source.encoding = "fp8"
    for i, sample in enumerate(source.samples):
        states = states_of(case.target, case.rows[i], case.layer_ids)
        scales = states.abs().amax(dim=(1, 2) if slots else (2,), keepdim=True) / 448
        source.samples[i] = replace(sample, states=(states / scales).to(torch.float8_e4m3fn), scales=None)
    return Planted(source, {names.ROW_SCALES}, may={names.SCALED})


@plant
def scales_of_other_rows(case: Case) -> Planted:
    source, shift = case.clean(), int(case.rng.choice([-1, 1]))
    for i, sample in enumerate(source.samples):
        states = states_of(case.target, case.rows[i], case.layer_ids)
        states = states * torch.linspace(1, 3, len(states))[torch.randperm(
            len(states), generator=torch.Generator().manual_seed(case.one(1000)))][:, None, None]
        source.samples[i] = case.encode(sample, states)
    return Planted(source, {names.ROW_SCALES}, may={names.SCALED} if shift == 9 else set())


@plant
def scaled(case: Case) -> Planted:
    factor, slots = float(case.rng.choice([0.0361, 0.5, 0.9, 1.1, 2.0, 8.0, 16.0])), case.some(len(case.layer_ids) + 1)

    def alter(states: Tensor, i: int) -> Tensor:
        states[:, slots] *= factor
        return states

    source = case.clean()
    return Planted(change(case, source, range(case.num), alter), {names.SCALED}, set(slots))


@plant
def misread_bits(case: Case) -> Planted:
    """fp16 values in a buffer that is called bf16, or the reverse."""
    stored, called = (torch.float16, torch.bfloat16) if case.rng.integers(2) else (torch.bfloat16, torch.float16)
    source = case.clean()
    for i, sample in enumerate(source.samples):
        states = states_of(case.target, case.rows[i], case.layer_ids)
        source.samples[i] = replace(sample, states=states.to(stored).view(called), scales=None)
    return Planted(source, {names.MISREAD}, may={names.NOT_FINITE, names.ZEROS, names.FP16})


@plant
def duplicated(case: Case) -> Planted:
    i = case.one(case.num)
    source = case.clean()
    source.samples.insert(case.one(case.num), replace(source.samples[i], name=f"hs_{case.num}"))
    return Planted(source, {names.DUPLICATED})


@plant
def missing(case: Case) -> Planted:
    source = case.clean()
    del source.samples[int(case.rng.integers(1, case.num - 1))]
    return Planted(source, {names.MISSING})


@plant
def fine_tuned(case: Case) -> Planted:
    """States of a fine-tune of the target, from slightly to clearly changed."""
    weak, middle, strong = (0.2, 0.3, 0.4) if case.encoding.startswith("fp8") else (0.05, 0.1, 0.3)
    strength = float(case.rng.choice([weak, middle, strong]))  # weaker ones are within what bf16 or fp8 hides
    return Planted(case.clean(target=case.make_tuned(strength)), {names.OTHER_MODEL})


@plant
def another_model(case: Case) -> Planted:
    """A model of the same shape with other weights."""
    return Planted(case.clean(target=case.make_other()), {names.OTHER_MODEL})


@plant
def last_without_the_norms_weight(case: Case) -> Planted:
    source = case.clean()
    source.last = POST_NORM

    def alter(states: Tensor, i: int) -> Tensor:
        states[:, -1] = unit_length(states[:, -1])
        return states

    return Planted(change(case, source, range(case.num), alter), {names.OTHER_NORM}, {len(case.layer_ids)})


@plant
def noise_in_some_rows(case: Case) -> Planted:
    i, slot = case.one(case.num), case.one(len(case.layer_ids) + 1)
    strength = float(case.rng.choice([0.2, 0.5, 2.0]))
    generator = torch.Generator().manual_seed(case.one(1 << 30))

    def alter(states: Tensor, i: int) -> Tensor:
        rows = torch.randperm(len(states), generator=generator)[:max(1, len(states) // 4)]
        noise = torch.randn(states[rows, slot].shape, generator=generator)
        states[rows, slot] += strength * noise * states[rows, slot].norm(dim=-1, keepdim=True) / states.shape[-1] ** 0.5
        return states

    return Planted(change(case, case.clean(), [i], alter), {names.UNRECOGNISED}, {slot}, {i})


@plant
def ids_beyond_the_vocabulary(case: Case) -> Planted:
    i, source = case.one(case.num), case.clean()
    ids = source.samples[i].input_ids.copy()
    ids[case.one(len(ids))] = case.target.config.vocab_size + case.one(1000)
    source.samples[i] = replace(source.samples[i], input_ids=ids)
    return Planted(source, {names.BAD_IDS}, None, {i})


@plant
def empty_mask(case: Case) -> Planted:
    i, source = case.one(case.num), case.clean()
    source.samples[i] = replace(source.samples[i], loss_mask=np.zeros_like(source.samples[i].loss_mask))
    return Planted(source, {names.BAD_MASK}, None, {i})


@plant
def another_size(case: Case) -> Planted:
    source = case.clean()
    for i, sample in enumerate(source.samples):
        source.samples[i] = replace(sample, states=sample.states[:, :, :-8].contiguous())
    return Planted(source, {names.WRONG_SIZE})

