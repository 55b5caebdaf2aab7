"""audit: which samples, what limits, bad input, repair, the command, the figure."""

import json
import shutil
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lib.__main__ import main
from dflash_lib.hidden_states.audit import CapturedStates, audit_states
from dflash_lib.hidden_states.audit import faults as names
from dflash_lib.hidden_states.audit.command import audit_text
from dflash_lib.hidden_states.audit.matching import nearest_rows, stored_rounding
from dflash_lib.hidden_states.audit.reference import FinalNorm, list_candidates, recompute
from dflash_lib.hidden_states.audit.repair import Repair
from dflash_lib.hidden_states.audit.sampling import choose_samples, coverage, least_seen
from dflash_lib.hidden_states.formats import open_states
from dflash_lib.hidden_states.formats.source import POST_NORM, PRE_NORM, SourceSample
from dflash_lib.hidden_states.formats.speculators_check import capture_samples
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.report.figures_audit import audit_figure
from dflash_lib.target.capture import capture_batch
from tests.hidden_states.audit.disk import write_and_open
from tests.hidden_states.audit.memory import MemorySource, encode, extract, make_rows, make_sample, states_of
from tests.hidden_states.rows import make_prepared, make_store

IDS = [1, 3, 4]


@pytest.fixture
def source(tiny_llama) -> MemorySource:
    return extract(tiny_llama, make_rows(np.random.default_rng(0), tiny_llama, 4), IDS)


# ---- bad input -------------------------------------------------------------------------------------------------------

def test_nothing_to_audit(tiny_llama, source):
    with pytest.raises(StoreError, match="no samples here"):
        audit_states(MemorySource([], IDS), tiny_llama)
    with pytest.raises(StoreError, match="at least one sample"):
        audit_states(source, tiny_llama, 0)


def test_another_hidden_size_is_named(tiny_llama, source):
    source.samples = [replace(s, states=s.states[..., :48].contiguous()) for s in source.samples]
    audit = audit_states(source, tiny_llama)
    assert audit.faults == [names.WRONG_SIZE] and "48 wide, the target's hidden size is 64" in audit.findings[0].text
    assert audit.slots == [] and audit.repair is None and audit.no_repair
    audit_figure(audit)


def test_ids_beyond_the_vocabulary_are_named_and_the_rest_is_audited(tiny_llama, source):
    source.samples[1] = replace(source.samples[1], input_ids=source.samples[1].input_ids + 1000)
    audit = audit_states(source, tiny_llama)
    assert audit.faults == [names.BAD_IDS] and audit.findings[0].samples == (1,) and audit.audited == (0, 2, 3)
    assert "vocabulary of 384" in audit.findings[0].text


@pytest.mark.parametrize(("change", "fault"), [
    ({"input_ids": None}, names.BAD_IDS), ({"input_ids": np.zeros(0, np.int64)}, names.BAD_IDS),
    ({"states": torch.zeros(0, 4, 64, dtype=torch.bfloat16)}, names.FEWER),
    ({"states": torch.zeros(5, 64)}, names.WRONG_SIZE), ({"loss_mask": np.ones(3, np.uint8)}, names.BAD_MASK),
    ({"scales": torch.ones(2, 1, 1)}, names.UNREADABLE)])
def test_one_sample_that_cannot_be(tiny_llama, source, change, fault):
    source.samples[2] = replace(source.samples[2], **change)
    assert audit_states(source, tiny_llama).faults == [fault]


@pytest.mark.parametrize("short", [(1,), (1, 2, 3), (0,)])
@pytest.mark.parametrize("stated", [True, False])
def test_samples_with_fewer_slots_are_named(tiny_llama, source, short, stated):
    for i in short:
        source.samples[i] = replace(source.samples[i], states=source.samples[i].states[:, :3].contiguous())
    few = set(short) if stated or len(short) == 1 else {0}  # unstated: most samples are right
    if not stated:
        source.target_layer_ids, source.last = None, None
    audit = audit_states(source, tiny_llama)
    assert audit.faults == [names.NUM_SLOTS] and audit.audited == tuple(i for i in range(4) if i not in few)
    assert set(audit.findings[0].samples) == few and ("4 are stated" in audit.findings[0].text) == stated
    assert set(audit.repair.drop) == few


def test_a_sample_that_changes_between_the_scan_and_the_comparison(tiny_llama, source):
    """A reader that gives another number of slots the second time: it is not skipped in silence."""
    reads = []

    def read(i, original=source.read):
        reads.append(i)
        sample = original(i)
        return replace(sample, states=sample.states[:, :3]) if i == 2 and reads.count(2) > 1 else sample

    source.read = read
    audit = audit_states(source, tiny_llama)
    assert audit.faults == [names.NUM_SLOTS] and audit.findings[0].samples == (2,)


def test_a_sample_that_cannot_be_read(tiny_llama, source):
    def read(i, original=source.read):
        if i == 1:
            raise StoreError("hs_1: cut off")
        if i == 2:
            raise StoreError("hs_2: no such file")
        return original(i)

    source.read = read
    audit = audit_states(source, tiny_llama)
    assert set(audit.faults) == {names.UNREADABLE, names.MISSING} and audit.audited == (0, 3)


def test_one_token_samples(tiny_llama):
    clean = extract(tiny_llama, [[7], [9], [11]], IDS)
    assert audit_states(clean, tiny_llama).ok
    wrong = extract(tiny_llama, [[7], [9], [11]], [0, 2, 3])
    wrong.target_layer_ids = IDS
    assert audit_states(wrong, tiny_llama).faults == [names.LAYER_SHIFTED]


def test_stated_slots_that_do_not_fit(tiny_llama, source):
    source.target_layer_ids = [1, 3]
    assert "4 slots are stored, but 2 layer ids" in audit_states(source, tiny_llama).findings[0].text
    assert "[9] do not exist" in audit_states(source, tiny_llama, layer_ids=[1, 3, 9]).findings[0].text


def test_ids_need_not_be_known(tiny_llama, source):
    source.target_layer_ids = None
    audit = audit_states(source, tiny_llama)
    assert audit.ok and [slot.holds for slot in audit.slots] == ["layer 1", "layer 3", "layer 4", "layer 5"]
    assert audit_states(source, tiny_llama, layer_ids=[2, 3, 4]).faults == [names.WRONG_LAYER]


def test_two_faults_at_once(tiny_llama, source):
    shifted = extract(tiny_llama, [s.input_ids.tolist() for s in source.samples], [0, 2, 3], POST_NORM)
    shifted.target_layer_ids, shifted.last = IDS, PRE_NORM
    zero = shifted.samples[2].states.clone()
    zero[-3:] = 0
    shifted.samples[2] = replace(shifted.samples[2], states=zero)
    audit = audit_states(shifted, tiny_llama)
    assert set(audit.faults) == {names.LAYER_SHIFTED, names.POST_NORM, names.ZEROS}


# ---- parts -----------------------------------------------------------------------------------------------------------

def test_first_last_short_and_long_are_always_chosen():
    lengths = [30, 5, 20, -1, 80, 25, 1, 12, 40, 9, 31, 8]
    for seed in range(5):
        chosen, drawn = choose_samples(lengths, 8, seed)
        assert {0, 11, 4, 1} <= set(chosen) and len(set(chosen)) == 8 and drawn == 4 and 3 not in chosen
        few, drawn = choose_samples(lengths, 4, seed)
        assert {0, 11} < set(few) and len(few) == 4 and drawn == 2
        short, long = sorted(lengths[i] for i in set(few) - {0, 11})
        assert short <= 20 <= long
    assert len({tuple(choose_samples(lengths, 6, seed)[0]) for seed in range(9)}) > 1
    assert choose_samples(lengths, 6, 3) == choose_samples(lengths, 6, 3)
    assert choose_samples(lengths, 50, 0) == ([i for i in range(12) if i != 3], 11)


def test_coverage_against_counting():
    """Of every way to draw 3 of 12, at least 95 % meet one of `least_seen` faulty ones."""
    least = least_seen(12, 3)
    draws = list(combinations(range(12), 3))
    seen = [sum(min(draw) < n for draw in draws) / len(draws) for n in range(13)]
    assert least == 8 and seen[least] >= 0.95 and (1 - (least - 1) / 12) ** 3 > 0.05
    assert "every one of the 5 samples" in coverage(5, 5, 1) and "nothing can be said" in coverage(9, 2, 0)
    assert ("8 of 1000 samples were recomputed, 4 drawn at random and 4 picked (the first, the last, the longest "
            "and the shortest): a fault in 526 or more samples (53 %)") in coverage(1000, 8, 4)


@pytest.mark.parametrize("encoding", ["bf16", "fp16", "fp8", "fp8 a token"])
def test_no_rounding_is_larger_than_its_limit(encoding):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(50, 3, 64, generator=generator) * torch.tensor([0.01, 1, 300])[:, None]
    states[:, :, 5] *= 40
    stored, scales = encode(states, encoding)
    sample = SourceSample(name="", sample_id="", input_ids=None, loss_mask=None, states=stored, scales=scales)
    rounding, size = stored_rounding(sample), states.norm(dim=-1)
    error = (sample.decoded() - states).norm(dim=-1) / size
    limit = rounding.relative + rounding.absolute / size
    assert (error <= limit).all() and float(error.max()) > 0.2 * float(limit.min())


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3_5"])
def test_the_reference_against_capture_and_the_norm_by_hand(name, request):
    target, ids = request.getfixturevalue(name), [5, 9, 200, 31, 8, 77]
    norm = FinalNorm(target)
    reference = recompute(target, ids, norm)
    captured, = capture_batch(target, [ids], range(target.num_layers))
    candidates = list_candidates(target, norm)
    _, expanded = next(reference.chunks())
    assert expanded.shape == (6, len(candidates), 64) and reference.noise.shape == (6, len(candidates))
    for c, candidate in enumerate(candidates):
        torch.testing.assert_close(expanded[:, c], reference.of(c), rtol=1e-4, atol=1e-5)
        if candidate.kind == "layer":
            assert torch.equal(reference.of(c), captured.aux_hidden_states[:, candidate.layer])
    assert torch.equal(reference.of(0), target.embedding(torch.tensor(ids)))
    last = captured.last_hidden_state_prenorm
    plain = last * last.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    adds_one = name == "tiny_qwen3_5"
    weight = target.final_norm.weight
    torch.testing.assert_close(reference.of(len(candidates) - 1), plain * (weight if adds_one else 1 + weight))
    assert (0.0005 < reference.noise[:, 1:]).all() and (reference.noise < 0.2).all()


def test_nearest_rows_against_a_loop():
    rows, pool = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1)).unbind(0)
    index, distance = nearest_rows(rows, pool)
    for i, row in enumerate(rows):
        each = [float(torch.dist(row, other) / other.norm()) for other in pool]
        relative = [float(torch.dist(row, other)) ** 2 / float(other.norm()) ** 2 for other in pool]
        assert int(index[i]) == int(np.argmin(relative)) and float(distance[i]) == pytest.approx(each[int(index[i])])


def test_a_fault_in_one_sample_that_was_not_drawn_is_said_to_be_possible(tiny_llama):
    rows = make_rows(np.random.default_rng(3), tiny_llama, 20)
    source = extract(tiny_llama, rows, IDS)
    audit = audit_states(source, tiny_llama, 5)
    assert ("5 of 20 samples were recomputed, 3 drawn at random and 2 picked (the first and the last): a fault in 12 "
            "or more samples (60 %)") in audit.verdict
    unseen = next(i for i in range(20) if i not in audit.audited)
    source.samples[unseen] = make_sample(unseen, rows[unseen], states_of(tiny_llama, rows[unseen], IDS).roll(1, 0))
    assert audit_states(source, tiny_llama, 5).ok  # what it said of rarer faults
    assert audit_states(source, tiny_llama, 20).faults == [names.TOKENS_SHIFTED]
    zeros = replace(source.samples[unseen], states=torch.zeros_like(source.samples[unseen].states))
    source.samples[unseen] = zeros
    assert audit_states(source, tiny_llama, 5).faults == [names.ZEROS]  # the scan sees every sample
    assert audit_states(source, tiny_llama, 5).findings[0].samples == (unseen,)


def test_a_trial_capture_and_its_usual_mistake(tiny_qwen3_5):
    trial = CapturedStates(capture_samples(tiny_qwen3_5, make_prepared(tiny_qwen3_5, 3), IDS), IDS)
    assert audit_states(trial, tiny_qwen3_5, 2).ok
    audit = audit_states(trial.with_normed_last(tiny_qwen3_5), tiny_qwen3_5, 2)
    assert audit.faults == [names.POST_NORM] and audit.findings[0].slots == (3,)


# ---- the command and the repair --------------------------------------------------------------------------------------

def test_the_command_on_a_good_store(tiny_llama, tiny_llama_folder, tmp_path, capsys):
    make_store(tmp_path / "store", tiny_llama, make_prepared(tiny_llama))
    code = main(["audit", str(tmp_path / "store"), "--target", str(tiny_llama_folder), "--samples", "3",
                 "--json", str(tmp_path / "audit.json"), "--figure", str(tmp_path / "audit.png")])
    said = capsys.readouterr().out
    assert code == 0 and "RIGHT: every slot is as stated" in said and "layer 3" in said
    assert json.loads((tmp_path / "audit.json").read_text())["ok"] and (tmp_path / "audit.png").stat().st_size > 5000
    assert main(["audit", str(tmp_path / "store"), "--target", str(tiny_llama_folder), "--repair",
                 str(tmp_path / "new")]) == 2 and "nothing to repair" in capsys.readouterr().err


def test_the_command_with_a_target_of_another_size(tiny_llama, tiny_llama_folder, source):
    source.samples = [replace(s, states=s.states[..., :48].contiguous()) for s in source.samples]
    audit = audit_states(source, tiny_llama)
    said = audit_text(audit, ["audit", "states", "--target", "M"])
    assert "sample 0" not in said.replace("sample 0: hs_0:", "") and "Check --target" in said and "\n\n\n" not in said
    assert "--samples" not in said and "extracted again" not in said
    source.plan = SimpleNamespace(target={"name": "somebody/model"})
    assert "of somebody/model" in audit_text(audit_states(source, tiny_llama))


def test_fp8_says_what_it_cannot_show(tiny_llama):
    rows = make_rows(np.random.default_rng(0), tiny_llama, 4)
    said = audit_text(audit_states(extract(tiny_llama, rows, IDS, encoding="fp8"), tiny_llama))
    assert "finer than its rounding" in said and "computed in float32" not in said
    assert "computed in float32" in audit_text(audit_states(extract(tiny_llama, rows, IDS), tiny_llama))


def test_the_command_on_nothing(tiny_llama_folder, tmp_path, capsys):
    assert main(["audit", str(tmp_path / "none"), "--target", str(tiny_llama_folder)]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["audit", str(tmp_path / "empty"), "--target", str(tiny_llama_folder)]) == 2
    assert "holds no hidden states in a known layout" in capsys.readouterr().err


def spoil_layers(target, rows):
    source = extract(target, rows, [2, 4, 5])
    source.target_layer_ids = IDS
    return source, [2, 4, 5], rows


def spoil_order(target, rows):
    source = extract(target, rows, IDS)
    source.samples = [replace(s, states=s.states[:, [2, 0, 1, 3]].contiguous()) for s in source.samples]
    return source, IDS, rows


def spoil_norm(target, rows):
    source = extract(target, rows, IDS, POST_NORM)
    source.last = PRE_NORM
    return source, IDS, rows


def spoil_shift(target, rows):
    source = extract(target, rows, IDS)
    source.samples = [replace(s, states=torch.cat([s.states[:1], s.states[:-1]])) for s in source.samples]
    return source, IDS, [row[:-1] for row in rows]


def spoil_ids(target, rows):
    source = extract(target, rows, IDS)
    source.samples = [replace(s, input_ids=np.concatenate([[9], s.input_ids[:-1]])) for s in source.samples]
    return source, IDS, [row[:-1] for row in rows]


def spoil_scale(target, rows):
    source = extract(target, rows, IDS)
    source.samples = [replace(s, states=s.states * 4) for s in source.samples]
    return source, IDS, rows


def spoil_some(target, rows):
    source = extract(target, rows, IDS)
    source.samples[1] = replace(source.samples[1], states=source.samples[1].states * 0)
    return source, IDS, [rows[0], *rows[2:]]


@pytest.mark.parametrize("spoil", [spoil_layers, spoil_order, spoil_norm, spoil_shift, spoil_ids, spoil_scale,
                                   spoil_some], ids=lambda f: f.__name__)
def test_a_repair_gives_the_right_states(spoil, tiny_llama, tiny_llama_folder, tmp_path, capsys):
    rows = make_rows(np.random.default_rng(5), tiny_llama, 4)
    source, ids, right = spoil(tiny_llama, rows)
    write_and_open(source, "speculators", tmp_path / "states", tiny_llama)
    command = ["audit", str(tmp_path / "states"), "--target", str(tiny_llama_folder), "--target-layer-ids",
               *map(str, source.target_layer_ids)]
    assert main(command) == 1
    assert "--repair NEW_FOLDER" in capsys.readouterr().out
    assert main([*command, "--repair", str(tmp_path / "new")]) == 1
    new = open_states(tmp_path / "new")
    assert audit_states(new, tiny_llama).ok and new.target_layer_ids == ids
    assert [sample.input_ids.tolist() for sample in new] == right
    for sample, row in zip(new, right, strict=True):
        truth = states_of(tiny_llama, row, ids)
        stored = sample.decoded()
        if spoil is spoil_norm:  # the lengths are gone, and the norm does not see them
            with torch.no_grad():
                stored[:, -1], truth[:, -1] = (tiny_llama.final_norm(s[:, -1]) for s in (stored, truth))
        assert ((stored - truth).norm(dim=-1) <= 0.01 * truth.norm(dim=-1)).all()


def double_from_half(states, i):
    states[len(states) // 2:] *= 2


def double_one_slot_from_half(states, i):
    states[len(states) // 2:, 1] *= 2


def double_slots_in_turns(states, i):
    states[:, i % 2] *= 2


def two_near_factors(states, i):
    states[:, 1] *= 0.9 if i % 2 else 1.1


def two_factors(states, i):
    states[:, 1] *= 1.5 if i % 2 else 2.7


def shift_from_half(states, i):
    half = len(states) // 2
    states[half + 1:] = states[half:-1].clone()


def shift_slots_in_turns(states, i):
    slots = [0, 1] if i % 2 else [2, 3]
    states[1:, slots] = states[:-1, slots].clone()


@pytest.mark.parametrize("spoil", [double_from_half, double_one_slot_from_half, double_slots_in_turns, two_near_factors,
                                   two_factors, shift_from_half, shift_slots_in_turns], ids=lambda f: f.__name__)
def test_no_repair_that_damages(spoil, tiny_llama, source):
    """What hits samples, slots or rows in different ways is not put right in one way."""
    for i, sample in enumerate(source.samples):
        states = sample.decoded().clone()
        spoil(states, i)
        source.samples[i] = replace(sample, states=states.bfloat16())
    audit = audit_states(source, tiny_llama)
    assert not audit.ok and audit.repair is None and "Extract again" in audit.no_repair


def test_two_factors_of_two_slots_are_taken_out(tiny_llama, source):
    source.samples = [replace(s, states=s.states * torch.tensor([1, 4, 1, 0.125]).bfloat16()[:, None])
                      for s in source.samples]
    factors = audit_states(source, tiny_llama).repair.factors
    assert factors == {1: pytest.approx(4, rel=1e-2), 3: pytest.approx(0.125, rel=1e-2)}


def test_a_repair_is_tried_before_it_is_offered(tiny_llama, source, monkeypatch):
    """A factor that is not the right one: the check alone stops it."""
    source.samples = [replace(s, states=s.states * 4) for s in source.samples]
    assert audit_states(source, tiny_llama).repair.factors[1] == pytest.approx(4, rel=1e-2)
    monkeypatch.setattr("dflash_lib.hidden_states.audit.result.plan_repair", lambda *_: (
        Repair(slots=[0, 1, 2, 3], layer_ids=IDS, last=True, factors=dict.fromkeys(range(4), 3.0)), ""))
    audit = audit_states(source, tiny_llama)
    assert audit.repair is None and "rows of slot 0 wrong in sample 0, and 3 samples more" in audit.no_repair


def test_what_nothing_repairs(tiny_llama, source):
    source.samples = [replace(s, states=s.states * 0) for s in source.samples]
    audit = audit_states(source, tiny_llama)
    assert audit.faults == [names.ZEROS] and audit.repair is None and "Extract again" in audit.no_repair
    assert audit.extract_again == ["hs_0", "hs_1", "hs_2", "hs_3"]


def test_the_command_knows_whose_states_a_store_says_it_holds(tiny_llama, tiny_llama_folder, tmp_path, capsys):
    """The weights differ by a thousandth, which bfloat16 limits let pass: the plan has their hash, and says float32."""
    make_store(tmp_path / "store", tiny_llama, make_prepared(tiny_llama))
    folder = shutil.copytree(tiny_llama_folder, tmp_path / "near")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor * (1.001 if "down_proj" in name else 1) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert main(["audit", str(tmp_path / "store"), "--target", str(tiny_llama_folder), "--samples", "3"]) == 0
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "store"), "--target", str(folder), "--samples", "3"]) == 1
    printed = capsys.readouterr().out
    assert "the store says that it was made by" in printed and "RIGHT: every slot" not in printed.splitlines()[1]


def test_a_repair_that_leaves_samples_out_needs_all_of_them_recomputed(tiny_llama, tiny_llama_folder, tmp_path, capsys):
    """Two of eight are scaled, and three are recomputed: dropping the one that was seen would bless the other."""
    source = extract(tiny_llama, make_rows(np.random.default_rng(5), tiny_llama, 8), IDS)
    for i in (0, 5):
        source.samples[i] = replace(source.samples[i], states=source.samples[i].states * 1.3)
    write_and_open(source, "speculators", tmp_path / "states", tiny_llama)
    command = ["audit", str(tmp_path / "states"), "--target", str(tiny_llama_folder), "--target-layer-ids",
               *map(str, IDS), "--repair", str(tmp_path / "new")]
    assert main([*command, "--samples", "3"]) == 2
    assert "only 3 of 8 were recomputed" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert main([*command, "--samples", "8"]) == 1
    assert len(open_states(tmp_path / "new")) == 6 and audit_states(open_states(tmp_path / "new"), tiny_llama).ok
