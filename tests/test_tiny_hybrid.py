"""The shipped tiny hybrid: it is what its record says, and so are the conversations that it wrote."""

import importlib.util
import json
import math
import sys
from dataclasses import replace

import pytest
import torch

from dflash_lib.conversations.formats import Conversation, read_conversations
from dflash_lib.conversations.templates import ChatTemplate, encode_conversation, encode_prompt
from dflash_lib.decoding import (
    PromptLookupProposer,
    first_divergence,
    greedy_generate,
    read_prompts,
    speculative_generate,
)
from dflash_lib.files import read_json
from dflash_lib.target.generate import generate_batch
from dflash_lib.target.loading import load_target
from dflash_lib.workbench.runs import REPOSITORY

DATA = REPOSITORY / "data"
FOLDER = DATA / "tiny_hybrid"
OWN_TEXT = DATA / "tiny_hybrid_conversations.jsonl"


def load_script():
    spec = importlib.util.spec_from_file_location("train_tiny_hybrid", DATA / "train_tiny_hybrid.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture(scope="module")
def hybrid():
    return load_target(FOLDER)


@pytest.fixture(scope="module")
def record():
    return read_json(FOLDER / "training.json")


# --- what is shipped ------------------------------------------------------------------------------------------------


def test_it_loads_with_a_green_audit_and_is_small(hybrid, record):
    assert not any(hybrid.report.problems.values()) and hybrid.report.perplexity < 1000
    assert hybrid.config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) < 12e6
    assert hybrid.report.num_parameters == record["parameters"]
    assert set(hybrid.report.stored_dtypes) == {"BF16"}
    assert script.SPECIAL[3] == hybrid.tokenizer.convert_ids_to_tokens(3) == "<|mask|>"


def test_it_is_the_model_of_its_script(hybrid, record):
    wanted = script.model_config(record["recipe"]["vocab_size"]).to_dict()
    ours = hybrid.config.to_dict()
    apart = {"architectures", "dtype", "transformers_version", "_name_or_path", "_attn_implementation"}
    assert {k: v for k, v in ours.items() if k not in apart} == {k: v for k, v in wanted.items() if k not in apart}
    assert record["recipe"] == vars(script.Recipe(epochs=record["recipe"]["epochs"]))


def test_its_heldout_loss_is_that_of_its_record(hybrid, record):
    """Conversation by conversation, on those that the record names; and the sums are consistent."""
    _, heldout, _ = script.read_text(
        DATA / record["data"]["file"], record["recipe"]["num_conversations"])
    by_id = {c.id: c for c in heldout}
    samples = [s for s in record["samples"] if s["id"] in by_id]
    assert len(samples) == script.NUM_SAMPLES
    conversations = [script.with_plans(by_id[s["id"]]) if s["thinks"] else by_id[s["id"]] for s in samples]
    recipe = script.Recipe()
    rows = script.encode(ChatTemplate(hybrid.tokenizer), conversations, recipe.max_length)
    for sample, (tokens, nats) in zip(samples, script.answer_losses(hybrid.model, rows, recipe), strict=True):
        assert tokens == sample["tokens"] and nats == pytest.approx(sample["nats"], rel=1e-3)
    total = record["heldout"]
    assert total["perplexity"] == pytest.approx(math.exp(total["loss"]))
    assert total["perplexity_a_byte"] == pytest.approx(math.exp(total["loss"] * total["tokens"] / total["bytes"]))


def test_it_has_learned_and_not_by_heart(record):
    """Held-out text is far from chance (ln 2,048 = 7.6 for the uniform guess), and not much harder than training
    text."""
    assert record["curve"][-1]["step"] == record["steps"] and record["curve"][0]["heldout_loss"] < 7.6
    assert record["heldout"]["loss"] < 2.5
    assert record["heldout"]["loss"] - record["heldout"]["training_loss"] < 0.6


# --- its template, with its own tokenizer (tests/conversations/test_mask.py has the template's every habit) ---------


@pytest.mark.parametrize("thinks", [True, False])
def test_supervised_is_what_it_generates(hybrid, thinks):
    thought = {"reasoning_content": "The answer is one paragraph."} if thinks else {}
    conversation = Conversation("x", [{"role": "user", "content": "What is rain?"},
                                      {"role": "assistant", "content": "Water that falls.", **thought}])
    ids, mask = encode_conversation(hybrid.tokenizer, conversation)
    said = hybrid.tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])
    assert said == ("The answer is one paragraph.\n</think>\n\n" if thinks else "") + "Water that falls.<|im_end|>"
    before = "<|im_start|>user\nWhat is rain?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert hybrid.tokenizer.decode(ids[:mask.index(1)]) == before + ("" if thinks else "\n</think>\n\n")


def test_the_switch_of_its_template(hybrid):
    prompt = [{"role": "user", "content": "What is rain?"}]
    text = {mode: hybrid.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **variables)
            for mode, variables in (("default", {}), ("on", {"enable_thinking": True}),
                                    ("off", {"enable_thinking": False}))}
    assert text["default"] == text["on"] and text["on"].endswith("assistant\n<think>\n")
    assert text["off"] == text["on"] + "\n</think>\n\n"


# --- its own text ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_text():
    return list(read_conversations(OWN_TEXT))


def test_its_conversations_are_those_of_their_sidecar(own_text, hybrid):
    meta = read_json(f"{OWN_TEXT}.meta.json")
    answers = [m for c in own_text for m in c.messages if m["role"] == "assistant"]
    assert len(own_text) == meta["conversations"] and len(answers) == meta["assistant_turns"]
    assert sum(len(m["token_ids"]) for m in answers) == meta["generated_tokens"]
    assert sum(m["finish_reason"] == "length" for m in answers) == meta["finished_by_length"]
    assert max(len(m["token_ids"]) for m in answers) <= meta["max_new_tokens"]
    identity = dict(hybrid.identity)
    assert {key: value for key, value in meta["model"].items() if key != "transformers"} == {
        key: value for key, value in identity.items() if key != "transformers"}
    heldout = {c.messages[0]["content"] for c in read_conversations(
        DATA / "demo_heldout_prompts.jsonl", need_assistant=False)}
    assert not heldout & {script.question(c) for c in own_text}


@torch.no_grad()
def test_it_says_the_same_again(own_text, hybrid):
    """Two conversations are generated again, alone: the same ids, wherever the choice was not a near-tie."""
    done = 0
    for conversation in own_text:
        if len(conversation.messages) > 2:
            continue
        prompt = encode_prompt(hybrid.tokenizer, replace(conversation, messages=conversation.messages[:1]))
        said = conversation.messages[1]["token_ids"]
        logits = hybrid.model(input_ids=torch.tensor([prompt + said])).logits[0, len(prompt) - 1:-1]
        best, second = logits.topk(2).values.unbind(1)
        assert (best - logits.gather(1, torch.tensor(said)[:, None])[:, 0]).max() < 1e-3, conversation.id
        if (best - second).min() < 1e-3:
            continue  # another processor's rounding may choose otherwise
        again, = generate_batch(hybrid, [prompt], len(said))
        assert again.token_ids == said
        done += 1
        if done == 2:
            return
    raise AssertionError("fewer than two conversations without a near-tie")


def test_drafts_leave_its_answers_as_they_are(hybrid):
    """Real text, where drafts are now refused and now accepted, over several chunks of 64 tokens."""
    refused = accepted = 0
    for prompt in read_prompts(DATA / "demo_heldout_prompts.jsonl", hybrid.tokenizer, 4):
        plain = greedy_generate(hybrid, prompt.token_ids, 150)
        drafted = speculative_generate(hybrid, PromptLookupProposer(), prompt.token_ids, 150, 8, [1, 4])
        assert first_divergence(hybrid, prompt.token_ids, plain.token_ids, drafted.token_ids) is None
        refused += sum(step.accepted < step.drafted for step in drafted.steps[:-1])
        accepted += sum(step.accepted for step in drafted.steps)
    assert refused > 50 and accepted > 50


# --- the script -----------------------------------------------------------------------------------------------------

ANSWERS = ["Rain is water that falls from the clouds. It fills the rivers.", "1. Look.\n2. Listen.\n3. Think about it.",
           "```python\nprint(1)\n```\n\nIt prints one.", "First of all, the fox sleeps.\n\nThen it goes out into the"]


def small_conversations(num: int) -> list[Conversation]:
    return [Conversation(f"c{i}", [
        {"role": "user", "content": f"Question {i}?"},
        {"role": "assistant", "content": ANSWERS[i % 4], "finish_reason": "length" if i % 4 == 3 else "stop"}])
        for i in range(num)]


def test_a_plan_tells_the_answers_form():
    assert [script.plan(answer).split(".")[0] for answer in ANSWERS] == [
        "The answer is one paragraph", "The answer is a list", "The answer is code", "The answer is some paragraphs"]
    assert script.plan(ANSWERS[0]).endswith("begins with: Rain is water that")
    assert script.plan("") == "The answer is some paragraphs. It begins with: "


def test_what_is_held_out_stays_out(tmp_path):
    """A training conversation with a held-out question is left out, and one with a prompt of the evaluation, too."""
    heldout_id = next(f"h{i}" for i in range(1000) if script.is_held_out(f"h{i}"))
    prompt = next(read_conversations(DATA / "demo_heldout_prompts.jsonl", need_assistant=False)).messages[0]["content"]
    train_ids = [f"t{i}" for i in range(100) if not script.is_held_out(f"t{i}")][:3]
    rows = [(heldout_id, "held out?"), (train_ids[0], "held out?"), (train_ids[1], prompt), (train_ids[2], "free?")]
    path = tmp_path / "c.jsonl"
    answer = {"role": "assistant", "content": "a", "token_ids": [5], "finish_reason": "stop"}
    path.write_text("".join(json.dumps({"id": i, "messages": [{"role": "user", "content": text}, answer]}) + "\n"
                            for i, text in rows))
    train, heldout, left_out = script.read_text(path, 1000)
    assert ([c.id for c in train], [c.id for c in heldout], left_out) == ([train_ids[2]], [heldout_id], 2)
    assert "token_ids" not in train[0].messages[1], "SmolLM2's ids mean nothing here"


def test_batches_hold_every_row_once_and_keep_to_their_size():
    lengths = [7 + i * i % 90 for i in range(200)]
    recipe = script.Recipe(batch_tokens=256, sort_rows=64)
    batches = script.epoch_batches(lengths, recipe, 0)
    assert sorted(row for batch in batches for row in batch) == list(range(200))
    assert all(max(lengths[row] for row in batch) * len(batch) <= 256 for batch in batches)
    assert batches == script.epoch_batches(lengths, recipe, 0) != script.epoch_batches(lengths, recipe, 1)


def test_losses_are_those_of_each_row_alone_and_leave_out_what_nobody_chose(hybrid):
    conversation = Conversation("x", [
        {"role": "user", "content": "Say it"}, {"role": "assistant", "content": "It is", "finish_reason": "length"},
        {"role": "user", "content": "Go on"}, {"role": "assistant", "content": "raining."}])
    template = ChatTemplate(hybrid.tokenizer)
    rows = script.encode(template, [conversation, *small_conversations(3)], 512)
    input_ids, labels, answer = script.collate(rows)
    ends = (labels[0] == script.END).nonzero().flatten()
    assert len(ends) == 3, "two prompts and the last answer; the answer that was cut off did not end by itself"
    losses = script.label_losses(hybrid.model, input_ids, labels)
    for i, row in enumerate(rows):
        n = len(row.input_ids)
        logits = hybrid.model(input_ids=row.input_ids[None]).logits[0, :-1].log_softmax(-1)
        wanted = -logits.gather(1, row.input_ids[1:, None])[:, 0]
        keep = labels[i, :n - 1] >= 0
        torch.testing.assert_close(losses[i, :n - 1][keep], wanted[keep], rtol=1e-3, atol=1e-4)
        assert (labels[i, n - 1:] == -100).all() and (answer[i, :n - 1] == row.answer[1:]).all()


@pytest.fixture
def small_training(monkeypatch, hybrid):
    """Makes a training of a model that is narrower still."""
    config = script.model_config(2048)
    for name, value in {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 16,
                        "layer_types": config.layer_types[:4], "linear_key_head_dim": 8,
                        "linear_value_head_dim": 8}.items():
        setattr(config, name, value)
    config.rope_parameters["mrope_section"] = [1, 1, 0]
    monkeypatch.setattr(script, "model_config", lambda vocab_size: config)
    template = ChatTemplate(hybrid.tokenizer)
    conversations = small_conversations(24)
    renderings = [script.encode(template, some, 512)
                  for some in (conversations, [script.with_plans(c) for c in conversations])]
    recipe = script.Recipe(epochs=4, batch_tokens=400, warmup_steps=2, evaluations=4)
    return lambda work, fingerprint="f": script.Training(
        (renderings[0][:20], renderings[1][:20]), renderings[1][20:], recipe, work, fingerprint)


def test_a_training_that_was_cut_off_ends_as_one_that_was_not(small_training, tmp_path, monkeypatch):
    whole = small_training(tmp_path / "whole")
    whole.run()
    assert whole.curve[-1]["heldout_loss"] < whole.curve[0]["heldout_loss"] < 7.6
    assert len(whole.curve) == 4 and whole.step == len(whole.steps)

    cut = small_training(tmp_path / "cut")
    step = cut._train_step
    monkeypatch.setattr(cut, "_train_step", lambda: step() if cut.step < len(cut.steps) // 2 + 1 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cut.run()
    again = small_training(tmp_path / "cut")
    assert 0 < again.step < cut.step
    again.run()
    assert (again.curve, again.tokens) == (whole.curve, whole.tokens)
    for (name, ours), (_, theirs) in zip(again.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    with pytest.raises(SystemExit, match="begun with other data"):
        small_training(tmp_path / "cut", fingerprint="another")


def test_the_record_of_a_run_names_the_shipped_data(record):
    assert record["data"]["first_lines_sha256"] == script.hash_lines(
        DATA / record["data"]["file"], record["recipe"]["num_conversations"])
