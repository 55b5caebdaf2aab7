"""variants: recipes out of parameters, trials that resume, and intervals that say what chance does."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from dflash_lib.decoding.eval_prompts import EvalPrompt
from dflash_lib.decoding.evaluation import answer_prompts
from dflash_lib.drafter.recipe import TrainOptions
from dflash_lib.workbench.parameters import all_declarations
from dflash_lib.workbench.runs import notebook_paths
from dflash_lib.workbench.variants import (
    PARAMETERS,
    Outcome,
    Variant,
    run_variants,
    train_options,
    training_seconds,
)
from tests.hidden_states.rows import make_prepared, make_store

OPTIONS = TrainOptions(block_size=4, mask_token_id=3, draft_vocab_size=None, steps=4, anchors_per_sample=4,
                       validation_samples=2, validation_interval=4, checkpoint_interval=4)


def test_a_recipe_is_what_the_parameters_say():
    declared = {name: p.default for ps in all_declarations(notebook_paths()).values() for name, p in ps.items()}
    options = train_options({**declared, "num_drafter_layers": 3, "gamma": 2.5, "validation_interval": 77})
    assert (options.num_layers, options.gamma, options.validation_interval, options.checkpoint_interval) == (
        3, 2.5, 77, 77)
    assert options.steps == declared["steps"] and options.draft_vocab_size == declared["draft_vocab_size"]
    assert train_options(declared, steps=5, kl_weight=0.0) == replace(train_options(declared), steps=5, kl_weight=0.0)
    others = {"final_learning_rate", "weight_decay", "clip", "max_skipped"}  # 06 has no such parameters
    assert {PARAMETERS.get(f.name, f.name) for f in fields(TrainOptions)} - others <= set(declared)


def outcome(name, *seeds):
    """One list of (tokens, steps) a seed."""
    return Outcome(name, np.array(seeds, np.float64), [1.0] * len(seeds))


def test_acceptance_over_seeds_and_prompts():
    one = outcome("one", [(6, 3), (4, 4)], [(8, 4), (3, 3)])
    assert one.by_seed == pytest.approx([10 / 7, 11 / 7]) and one.acceptance.value == pytest.approx(21 / 14)
    other = outcome("other", [(9, 3), (4, 4)], [(12, 4), (3, 3)])
    assert other.ahead_of(one).value == pytest.approx(7 / 14)
    by_seed = other.ahead_by_seed(one)  # 3/7 and 4/7: the mean 0.5, Student's t of two values is 12.7 half ranges wide
    assert by_seed.value == pytest.approx(0.5) and by_seed.high - by_seed.value == pytest.approx(12.706 / 14, rel=1e-3)
    same = one.ahead_of(one)
    assert (same.low, same.value, same.high) == (0, 0, 0)
    single = outcome("single", [(6, 3)])
    assert single.ahead_by_seed(single).low == single.ahead_by_seed(single).high == 0


def test_seconds_are_those_of_a_quiet_machine(tmp_path):
    seconds = [0.1, 0.1, 0.1, 5.0, 0.1, 0.1, 7.0, 0.1]
    rows = [{"step": 0, "validation": {}}, *({"step": i + 1, "loss": 1.0, "seconds": s} for i, s in enumerate(seconds))]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert training_seconds(tmp_path) == pytest.approx(0.8)


@pytest.fixture(scope="module")
def answers(tiny_llama):
    prompts = [EvalPrompt(id=str(i), kind="facts", text=str(i), token_ids=[5 + i, 20, 30, 40]) for i in range(3)]
    return answer_prompts(tiny_llama, prompts, 12, [1, 3, 4])


def test_trainings_run_once_and_equal_variants_are_equal(tiny_llama, answers, tmp_path):
    make_store(tmp_path / "store", tiny_llama, make_prepared(tiny_llama, longest=30))
    variants = [Variant(name, tmp_path / "store", OPTIONS) for name in "ab"]
    lines: list[str] = []
    first = run_variants(tmp_path / "trained", variants, [1], tiny_llama, answers, show=lines.append)
    assert [o.name for o in first] == ["a", "b"] and len(lines) == 2
    assert first[0].counts.shape == (1, 3, 2) and np.array_equal(first[0].counts, first[1].counts)
    assert all(1 <= length <= 4 for o in first for length in o.by_seed)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "trained").rglob("summary.json")}
    assert len(files) == 2 and not list((tmp_path / "trained").rglob("checkpoints")), "finished, they need none"
    again = run_variants(tmp_path / "trained", variants, [1], tiny_llama, answers, show=lines.append)
    assert all(np.array_equal(a.counts, b.counts) for a, b in zip(first, again, strict=True))
    assert {path: path.stat().st_mtime_ns for path in files} == files, "nothing was trained again"


@pytest.mark.parametrize("names, seeds", [(["a", "a"], [0]), ([], [0]), (["a"], [])])
def test_a_comparison_of_nothing_is_refused(tiny_llama, answers, tmp_path, names, seeds):
    with pytest.raises(ValueError, match="names of their own, at least one seed"):
        run_variants(tmp_path, [Variant(name, tmp_path, OPTIONS) for name in names], seeds, tiny_llama, answers)
