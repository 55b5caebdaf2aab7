"""`evaluate` from the shell on the tiny target: what it writes, what it says, and what it refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lib import __main__ as command
from dflash_lib.conversations.rendering import TemplateOptions
from dflash_lib.decoding import side_by_side
from dflash_lib.decoding.acceptance import acceptance_difference, acceptance_length
from dflash_lib.decoding.comparison import NamedDrafter
from dflash_lib.decoding.eval_prompts import EvalPrompt
from dflash_lib.decoding.speculative import Step, speculative_generate
from dflash_lib.drafter import DrafterProposer, TrainedDrafter, TrainOptions, export_zlab
from dflash_lib.drafter.folder import save_drafter
from dflash_lib.drafter.network import DFlashDrafter
from dflash_lib.drafter.recipe import drafter_config
from dflash_lib.files import read_json
from dflash_lib.report.evaluation_page import OutputError, claim_folder, rendering_notes
from dflash_lib.target.loading import Target, load_target
from tests.decoding.test_training_walk import changed


def write_prompts(path, *questions):
    path.write_text("".join(json.dumps({"question": question}) + "\n" for question in questions))
    return path


def make_drafter(target, layer_ids, block_size, seed=0) -> TrainedDrafter:
    torch.manual_seed(seed)
    options = TrainOptions(block_size=block_size, mask_token_id=3, num_layers=1)
    network = DFlashDrafter(drafter_config(target, layer_ids, options, None)).eval().requires_grad_(False)
    for parameter in network.parameters():  # larger than training begins with, so that drafts depend on the states
        if parameter.dim() > 1:
            parameter.mul_(8)
    return TrainedDrafter(network, None, target.identity, {})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target of two words, a run folder with a drafter, an export of another one with its own block size and layers,
    and two prompt files."""
    from tests.tiny import make_tiny_target

    folder = tmp_path_factory.mktemp("place")
    model = make_tiny_target(folder / "target")
    config = read_json(model / "config.json")
    tensors = load_file(model / "model.safetensors")
    head = torch.zeros_like(tensors["model.embed_tokens.weight"])
    head[100:102] = torch.randn(2, head.shape[1], generator=torch.Generator().manual_seed(0))
    save_file(tensors | {"lm_head.weight": head}, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    target = load_target(model)
    save_drafter(folder / "first" / "drafter" / "best", make_drafter(target, [1, 2, 4], 4))
    (folder / "first" / "params.yaml").write_text("")
    save_drafter(folder / "second", make_drafter(target, [0, 5], 6, seed=1))
    export_zlab(folder / "second", target, folder / "exported", "float32")
    write_prompts(folder / "rain.jsonl", "What is rain?", "Why does it rain?")
    write_prompts(folder / "dogs.jsonl", "What is a dog?", "Is a dog lazy?", "Write a story.")
    return folder


def evaluate(place, out, *drafters, prompts=("rain", "dogs"), more=()):
    arguments = ["evaluate", "--model", place / "target", "--out", out, "--max-new-tokens", "10", *more]
    for drafter in drafters:
        arguments += ["--drafter", place / drafter]
    if prompts:
        arguments += ["--prompts", *(f"{name}={place / name}.jsonl" for name in prompts)]
    return command.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def done(place):
    """Two drafters in one call."""
    out = place / "out"
    assert evaluate(place, out, "first", "exported") == 0
    return out


def steps_of(drafter):
    """Steps by prompt, as results.json has them."""
    return [[Step(0, drafter["block_size"] - 1, a, n) for a, n in zip(r["accepted"], r["num_new"], strict=True)]
            for r in drafter["decoded"]]


def test_the_results_are_those_of_the_steps_in_them(done):
    results = read_json(done / "results.json")
    assert results["passed"] and results["unlike_plain"] == [] and results["about"]["num_prompts"] == 5
    first, second = results["drafters"]
    assert (first["name"], first["block_size"], first["target_layer_ids"]) == ("first", 4, [1, 2, 4])
    assert (second["name"], second["block_size"], second["target_layer_ids"]) == ("exported (export)", 6, [0, 5])
    for drafter in (first, second):
        steps = steps_of(drafter)
        flat = [step for of_prompt in steps for step in of_prompt]
        assert drafter["acceptance_length"]["value"] == pytest.approx(acceptance_length(flat))
        size = drafter["block_size"]
        assert drafter["accepted_histogram"] == [sum(s.accepted == k for s in flat) for k in range(size)]
        sets = [r["set"] for r in drafter["decoded"]]
        assert sets == ["rain"] * 2 + ["dogs"] * 3
        for name, interval in drafter["by_set"].items():
            own = [s for of_prompt, its in zip(steps, sets, strict=True) if its == name for s in of_prompt]
            assert interval["value"] == pytest.approx(acceptance_length(own))
        assert sum(b["num_steps"] for b in drafter["by_position"]) == len(flat)
        assert [b["block_size"] for b in drafter["block_sizes"]] == list(range(2, size + 1))
        sizes = {s["block_size"] for s in drafter["speeds"]}  # the trained and the most promising one
        assert {size, drafter["best_block_size"]} <= sizes and len(sizes) <= 2
        assert all(s["num_identical"] == 5 for s in drafter["speeds"])
        assert drafter["walk_against_decoding"]["difference"] <= 0.01
        assert list(drafter["leads"]) == ["prompt look-up", "zeroed states", "another sample's states"]
        for record, prompt in zip(drafter["decoded"], results["prompts"], strict=True):
            assert record["token_ids"] == prompt["token_ids"] and record["prompt_ids"] == prompt["prompt_ids"]
    difference = acceptance_difference(steps_of(second), steps_of(first))
    assert second["difference_to_first"] == pytest.approx(vars(difference)) and first["difference_to_first"] is None


def test_the_page_shows_every_figure_and_needs_no_network(done):
    html = (done / "index.html").read_text()
    pictures = sorted(path.stem for path in (done / "figures").glob("*.png"))
    own = ["block_sizes", "proposers", "slots", "speed", "text", "walk"]
    assert pictures == sorted([f"{i}-{name}" for i in (1, 2) for name in own] + [
        "drafters", "histogram", "sets", "slots"])
    assert html.count("<img ") == len(pictures)
    assert "<script" not in html and "<link" not in html and "http" not in re.sub(r"base64,[^\"]*", "", html)
    for text in ("first", "exported (export)", "Refused drafts", "checks passed", "paired difference"):
        assert text in html
    assert all(path.stat().st_size < 150_000 for path in (done / "figures").glob("*.png"))


def test_a_run_with_one_drafter_and_the_shipped_prompts(place, tmp_path, capsys):
    assert evaluate(place, tmp_path / "out", "first", prompts=(), more=["--num-prompts", "1"]) == 0
    printed = capsys.readouterr().out
    for text in ("first\n", "acceptance length", "identical            5 of 5", "set languages", "page: "):
        assert text in printed
    assert not (tmp_path / "out" / "figures" / "drafters.png").exists()
    results = read_json(tmp_path / "out" / "results.json")
    assert [p["set"] for p in results["prompts"]] == ["arithmetic", "chat", "code", "languages", "questions"]


def test_a_wrong_answer_fails_and_a_near_tie_does_not(place, tmp_path, capsys, monkeypatch):
    from dflash_lib.decoding import agreement

    def astray(target: Target, proposer, prompt_ids, max_new_tokens, *rest):
        found = speculative_generate(target, proposer, prompt_ids, max_new_tokens, *rest)
        found.token_ids[-1] = 201 - found.token_ids[-1]  # the other one of the two words
        return found

    monkeypatch.setattr(side_by_side, "speculative_generate", astray)
    # the walk has no prompt to compare with then: the last prompt stays as it is
    first = speculative_generate

    def all_but_one(target, proposer, prompt_ids, *rest):
        way = first if len(prompt_ids) == shortest else astray
        return way(target, proposer, prompt_ids, *rest)

    from dflash_lib.decoding import comparison

    compare = comparison.compare_drafters

    def remember(target, drafters, prompts: list[EvalPrompt], num):
        nonlocal shortest
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        return compare(target, drafters, prompts, num)

    shortest = 0
    monkeypatch.setattr(comparison, "compare_drafters", remember)
    monkeypatch.setattr(side_by_side, "speculative_generate", all_but_one)
    assert evaluate(place, tmp_path / "wrong", "first") == 1
    assert "answers unlike plain decoding's, near-ties apart: measured" in capsys.readouterr().err
    results = read_json(tmp_path / "wrong" / "results.json")
    assert not results["passed"] and {leaf["outcome"] for leaf in results["unlike_plain"]} == {"different"}
    assert "FAIL" in (tmp_path / "wrong" / "index.html").read_text()
    monkeypatch.setattr(agreement, "NEAR_TIE", 1000.0)
    assert evaluate(place, tmp_path / "tie", "first") == 0
    speeds = read_json(tmp_path / "tie" / "results.json")["drafters"][0]["speeds"]
    assert all(s["num_near_ties"] > 0 and s["num_identical"] + s["num_near_ties"] == 5 for s in speeds)


def refused(capsys, code, message):
    caught = capsys.readouterr()
    assert code == 2 and re.search(message, caught.err) and "Traceback" not in caught.err, caught.err


def test_what_is_refused_before_a_target_is_loaded(place, done, tmp_path, capsys, monkeypatch):
    from dflash_lib.target import loading

    def fail(*_):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(loading, "load_target", fail)
    refused(capsys, evaluate(place, tmp_path / "o", "nowhere"), "nowhere: no such drafter folder")
    refused(capsys, evaluate(place, tmp_path / "o", "target/.."), "no config.json; expected a drafter folder")
    refused(capsys, evaluate(place, tmp_path / "o", "first", "first"), "first: this drafter is given twice")
    refused(capsys, evaluate(place, tmp_path / "o", "first", prompts=("rain", "rain")), "the set 'rain' is .* already")
    refused(capsys, evaluate(place, done, "first"), "out: holds an evaluation already")
    refused(capsys, evaluate(place, place, "first"), "is not empty; give a new folder")
    refused(capsys, evaluate(place, place / "rain.jsonl" / "o", "first"), "rain.jsonl")
    refused(capsys, evaluate(place, tmp_path / "o", "first", more=["--max-new-tokens", "1"]), "at least 2")
    assert not (tmp_path / "o").exists() or not any((tmp_path / "o").iterdir())


def test_what_is_refused_with_the_target_at_hand(place, tmp_path, capsys):
    (place / "empty.jsonl").write_text("")
    write_prompts(place / "one.jsonl", "What is rain?")
    (place / "odd.jsonl").write_text('{"question": "What?"}\n{"answer": "4"}\n')
    refused(capsys, evaluate(place, tmp_path / "o", "first", prompts=("empty",)), "empty.jsonl: holds no conversation")
    refused(capsys, evaluate(place, tmp_path / "o", "first", prompts=("one",)), "at least two are needed")
    refused(capsys, evaluate(place, tmp_path / "o", "first", prompts=("odd",)), "odd.jsonl, line 2: expected an object")
    config = read_json(place / "exported" / "config.json")
    for key, value in (("num_target_layers", 9), ("vocab_size", 500)):
        folder = shutil.copytree(place / "exported", place / f"other {key}")
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
        refused(capsys, evaluate(place, tmp_path / "o", folder.name), f"another target: {key} {value}, the target's is")


def test_a_convention_that_engines_do_not_serve_is_said(tiny_llama):
    drafter = make_drafter(tiny_llama, [1, 2, 4], 4)
    anchored = changed(drafter, sample_from_anchor=True)
    note = ("one: sample_from_anchor: the anchor's slot drafts, too, so a verify step has 5 tokens. vLLM 0.32 refuses "
            "such a drafter by name, and an engine that ignored the key would draft every token one place late.")
    for one, size, said in ((drafter, 4, []), (anchored, 5, [note])):
        named = NamedDrafter("one", Path("one"), one, DrafterProposer(one, tiny_llama))
        assert named.block_size == size and rendering_notes([named], TemplateOptions()) == said


def test_claiming_a_folder(tmp_path):
    assert claim_folder(tmp_path / "a" / "b").is_dir()
    assert claim_folder(tmp_path / "a" / "b"), "an empty one is nobody's"
    (tmp_path / "a" / "b" / "results.json").write_text("{}")
    with pytest.raises(OutputError, match="holds an evaluation already"):
        claim_folder(tmp_path / "a" / "b")
