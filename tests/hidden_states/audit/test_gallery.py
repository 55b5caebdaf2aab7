"""Every planted fault is named, over dense and hybrid targets, layouts and encodings; clean states raise no alarm."""

from dataclasses import replace

import numpy as np
import pytest

from dflash_lib.hidden_states.audit import audit_states
from dflash_lib.hidden_states.audit import faults as names
from dflash_lib.hidden_states.formats.source import POST_NORM, PRE_NORM
from dflash_lib.hidden_states.parity import read_reference
from dflash_lib.target.loading import load_target
from tests.conftest import DATA, REPOSITORY
from tests.families import make_family
from tests.hidden_states.audit.disk import LAYOUTS, write_and_open
from tests.hidden_states.audit.faults import PLANTS
from tests.hidden_states.audit.gallery import judge, make_case, run_plant
from tests.hidden_states.audit.memory import MemorySource, extract, make_rows, make_sample

TARGETS = ("tiny_llama", "tiny_qwen3_5")
ENCODINGS = ("bf16", "fp8", "fp8 a token", "fp16", "fp32")
ALWAYS_BF16 = {"misread_bits", "fp16_overflow"}  # they bring a type of their own
NUMBERED = list(enumerate(PLANTS))
# What a layout cannot hold: a store quarantines bad rows, SpecForge has no last state, Model-Optimizer's is normed.
ON_DISK = ("ids_off_by_one", "slots_swapped", "states_shifted", "ids_one_behind", "other_template",
           "two_samples_swapped", "rows_of_the_request_before", "left_padded", "packed", "fine_tuned")


def encoding_of(plant: str, number: int) -> str:
    return "bf16" if plant in ALWAYS_BF16 else ENCODINGS[number % len(ENCODINGS)]


def test_there_are_enough_faults():
    assert len(PLANTS) >= 40


@pytest.mark.parametrize(("number", "plant"), NUMBERED, ids=[name for _, name in NUMBERED])
def test_it_is_named(number, plant, request):
    """Once each in the suite of every change, targets and encodings in turns."""
    target = request.getfixturevalue(TARGETS[number % 2])
    outcome = run_plant(target, plant, seed=0, encoding=encoding_of(plant, number // 2))
    assert outcome.wrong == "", outcome.audit.findings


@pytest.mark.slow
@pytest.mark.parametrize(("number", "plant"), NUMBERED, ids=[name for _, name in NUMBERED])
def test_it_is_named_on_the_other_target(number, plant, request):
    target = request.getfixturevalue(TARGETS[(number + 1) % 2])
    outcome = run_plant(target, plant, seed=1, encoding=encoding_of(plant, number + 1))
    assert outcome.wrong == "", outcome.audit.findings


@pytest.mark.slow
@pytest.mark.parametrize(("number", "plant"), NUMBERED, ids=[name for _, name in NUMBERED])
def test_it_is_named_on_a_trained_hybrid_or_on_gemma(number, plant, tmp_path_factory):
    """Real structure: a hybrid that has learned language, whose layers are unlike each other; norms that scale by
    1 + weight, an embedding that is scaled, sliding windows. Every third fault on each."""
    if number % 3 == 0:
        target = load_target(REPOSITORY / "data" / "tiny_hybrid", audit="quick")
    elif number % 3 == 1 and plant != "fp16_overflow":  # norms behind Gemma's layers set the stream's scale
        target = load_target(make_family(tmp_path_factory.mktemp("gemma"), "gemma3_text"), audit="quick")
    else:
        pytest.skip("another target's turn")
    outcome = run_plant(target, plant, seed=2, encoding=encoding_of(plant, number + 2))
    assert outcome.wrong == "", outcome.audit.findings


@pytest.mark.parametrize(("number", "layout"), list(enumerate(LAYOUTS)), ids=LAYOUTS)
def test_faults_in_files(number, layout, tiny_llama, tmp_path):
    check_on_disk(ON_DISK[2 * number], layout, tiny_llama, 0, tmp_path)
    check_on_disk(ON_DISK[2 * number + 1], layout, tiny_llama, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("plant", ON_DISK[::2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_faults_in_every_layout(plant, layout, tiny_qwen3_5, tmp_path):
    check_on_disk(plant, layout, tiny_qwen3_5, 2, tmp_path)


def check_on_disk(plant, layout, target, seed, folder):
    planted = PLANTS[plant](make_case(target, plant, seed, "bf16"))
    if planted.slots is not None and layout.startswith("specforge"):
        planted = replace(planted, slots=planted.slots - {len(planted.source.target_layer_ids)})
        if not planted.slots:
            return  # the last state alone was hit, which this layout lacks
    source = write_and_open(planted.source, layout, folder / f"{layout}-{plant}", target)
    audit = audit_states(source, target, 8, seed)
    assert judge(planted, audit) == "", audit.findings


@pytest.mark.parametrize("name", TARGETS)
def test_clean_states_of_every_encoding(name, request):
    target = request.getfixturevalue(name)
    for seed, encoding in enumerate(ENCODINGS):
        case = make_case(target, "clean", seed, encoding)
        audit = audit_states(case.clean((PRE_NORM, POST_NORM, None)[seed % 3]), target, 4, seed)
        assert audit.ok and audit.level == "float32", audit.findings
        assert [slot.holds for slot in audit.slots] == [slot.stated for slot in audit.slots]
        assert audit.repair is None and audit.verdict.startswith("RIGHT")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clean_files_of_every_layout(layout, tiny_llama, tmp_path):
    source = write_and_open(make_case(tiny_llama, "clean", 0, "bf16").clean(), layout, tmp_path / "states", tiny_llama)
    audit = audit_states(source, tiny_llama, 4)
    assert audit.ok, audit.findings
    assert audit.slots[-1].holds == {"specforge": "layer 4", "model-optimizer": "norm(layer 5)"}.get(
        layout.removesuffix(".gz"), "layer 5") or layout.startswith("specforge")


@pytest.mark.parametrize("stated", [True, False])
def test_vllms_bf16_states_raise_no_alarm(stated):
    """Another engine, in bfloat16: what it computes differs by 0.03 in the median row of the last layer."""
    target = load_target(DATA / "vllm_reference" / "tiny_qwen3_5", audit="quick")
    samples = [make_sample(i, prompt.token_ids, prompt.layer_outputs.float())
               for i, prompt in enumerate(read_reference(DATA / "vllm_reference" / "tiny_qwen3_5.states.safetensors"))]
    source = MemorySource(samples, list(range(8)) if stated else None, None)
    audit = audit_states(source, target)
    assert audit.ok, audit.findings
    assert audit.level == "bfloat16" and [slot.holds for slot in audit.slots] == [f"layer {k}" for k in range(8)]
    assert all(slot.median < slot.limit < slot.next_distance for slot in audit.slots)


@pytest.mark.parametrize("shift", [-1, 1])
def test_vllms_states_with_ids_off_by_one(shift):
    target = load_target(DATA / "vllm_reference" / "tiny_qwen3_5", audit="quick")
    samples = [make_sample(i, prompt.token_ids, prompt.layer_outputs[:, [1 + shift, 4 + shift, 6 + shift, 7]].float())
               for i, prompt in enumerate(read_reference(DATA / "vllm_reference" / "tiny_qwen3_5.states.safetensors"))]
    audit = audit_states(MemorySource(samples, [1, 4, 6]), target)
    assert audit.faults == [names.LAYER_SHIFTED] and audit.findings[0].slots == (0, 1, 2)
    assert audit.repair.layer_ids == [1 + shift, 4 + shift, 6 + shift] and audit.repair.last


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5_moe", "qwen3_next", "gemma3_text", "gpt_oss"])
def test_clean_states_of_every_family(family, tmp_path):
    target = load_target(make_family(tmp_path / family, family))
    rng = np.random.default_rng(0)
    for last in (PRE_NORM, POST_NORM):
        source = extract(target, make_rows(rng, target, 4), [0, 1, 2], last, "fp8 a token")
        audit = audit_states(source, target, 4)
        assert audit.ok, audit.findings
