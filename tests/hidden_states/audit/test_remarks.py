"""Rows that 16 bit arithmetic moves beyond their limits are a remark; what is systematic stays a fault."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_lib.hidden_states.audit import audit_states
from dflash_lib.hidden_states.audit import faults as names
from dflash_lib.hidden_states.audit.command import audit_text
from dflash_lib.hidden_states.audit.remarks import is_mixture
from dflash_lib.target.loading import load_target
from tests.families import make_family
from tests.hidden_states.audit.gallery import tuned
from tests.hidden_states.audit.memory import MemorySource, make_rows, make_sample, states_of

IDS = [0, 1, 2]


def in_bf16(target):
    return replace(target, model=copy.deepcopy(target.model).bfloat16())


def make_source(rows, states) -> MemorySource:
    return MemorySource([make_sample(i, row, s) for i, (row, s) in enumerate(zip(rows, states, strict=True))], IDS)


@pytest.fixture(scope="module", params=[
    "qwen3_5_text", "qwen3_5_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def target(request, tmp_path_factory):
    return load_target(make_family(tmp_path_factory.mktemp(request.param), request.param), audit="quick")


def rows_and_states(target, seed, num=5):
    rows = make_rows(np.random.default_rng(seed), target, num, 9, 40)
    return rows, [states_of(in_bf16(target), row, IDS) for row in rows]


def test_clean_bf16_states_of_hybrids_and_mixtures(target):
    remarks = 0
    for seed in range(3):
        audit = audit_states(make_source(*rows_and_states(target, seed)), target)
        assert audit.ok and audit.level == "bfloat16", audit.findings
        beyond = sum(slot.num_rows - slot.num_fit for slot in audit.slots)
        assert beyond == sum(slot.num_remarks for slot in audit.slots) and bool(audit.remark) == bool(beyond)
        assert not beyond or audit.remark in audit_text(audit)
        assert ("mixture of experts" in audit.remark) == (is_mixture(target.config) and beyond > 0)
        remarks += beyond
    assert remarks > 0  # else this shows nothing


@pytest.mark.parametrize("spoil", ["tuned", "one sample tuned", "noise in a quarter", "scaled", "swapped", "zeros"])
def test_faults_of_bf16_states_are_no_remarks(spoil, target):
    rows, states = rows_and_states(target, 0, 6)
    generator = torch.Generator().manual_seed(0)
    must = {names.UNRECOGNISED, names.OTHER_MODEL}
    if is_mixture(target.config):  # routers widen the limits: what is wrong is seen, its name is less sure
        must |= {names.ROW_SCALES}
    if spoil == "tuned":
        states = [states_of(in_bf16(tuned(target, 0.01)), row, IDS) for row in rows]
    elif spoil == "one sample tuned":
        states[2] = states_of(in_bf16(tuned(target, 0.1)), rows[2], IDS)
    elif spoil == "noise in a quarter":
        few = torch.randperm(len(rows[2]), generator=generator)[:len(rows[2]) // 4]
        own = states[2][few, 1]
        states[2][few, 1] += 0.5 * own.norm(dim=-1, keepdim=True) / 8 * torch.randn(own.shape, generator=generator)
    elif spoil == "scaled":
        states[1][5:, 2] *= 1.2
        must = {names.SCALED, names.ROW_SCALES}
    elif spoil == "swapped":
        states[1][[4, 6]] = states[1][[6, 4]]
        must = {names.ROWS_MOVED}
    else:
        states[1][-3:] = 0
        must = {names.ZEROS}
    assert must & set(audit_states(make_source(rows, states), target).faults)


def test_float32_has_no_remarks(tiny_llama):
    """One row with noise among 150: an alarm where the others agree to the last bit."""
    rows = make_rows(np.random.default_rng(1), tiny_llama, 6, 20, 32)
    states = [states_of(tiny_llama, row, IDS) for row in rows]
    states[3][7, 1] *= 1 + 0.05 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    audit = audit_states(make_source(rows, states), tiny_llama)
    assert audit.faults == [names.UNRECOGNISED] and audit.remark == ""
