"""Loss mask against text built by hand: supervised text equals content + end-of-turn, character for character."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash_lib.conversations.formats import Conversation, ConversationError
from dflash_lib.conversations.templates import encode_conversation, encode_prompt, segment_conversation
from tests.tiny import CHAT_TEMPLATE, TEXT, make_tokenizer

SMOLLM2_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '" +
    SMOLLM2_SYSTEM.replace("\n", "\\n") + "' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMING_TEMPLATE = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
DROPS_THINKING = (  # as Qwen3.x: thoughts are kept in the last turn only
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if loop.last %}{{ m['content'] }}{% else %}"
    "{{ m['content'].split('</think>')[-1] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REWRITES_USER = CHAT_TEMPLATE.replace(
    "message['content']", "(message['content'] if loop.last else message['content'] | upper)")
PIECES = ["Hello", " world", "\n", "ü", "日本語", "🦊", " e\u0301", "x = 1\n\n", "  ", "\u202e", "{{ a }}", "don't"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(params=[(CHAT_TEMPLATE, ""), (SMOLLM2_TEMPLATE, SMOLLM2_SYSTEM)], ids=["tiny", "smollm2"])
def chatml(request, tokenizer):
    """(tokenizer, the system turn that the template puts before a conversation without one)."""
    tokenizer.chat_template, system = request.param
    return tokenizer, system


def conversation(*turns) -> Conversation:
    """Turns as (role, content) or (role, content, finish_reason) or (role, content, finish_reason, token_ids)."""
    keys = ("role", "content", "finish_reason", "token_ids")
    return Conversation("c", [dict(zip(keys, turn, strict=False)) for turn in turns])


def expected(messages, system) -> list[tuple[str, int]]:
    """The row as (text, supervised) pieces, by hand: ChatML up to the last supervised character."""
    pieces = [("" if messages[0]["role"] == "system" else system, 0)]
    for m in messages:
        pieces.append((f"<|im_start|>{m['role']}\n", 0))
        answer = m["role"] == "assistant"
        pieces.append((m["content"], int(answer)))
        pieces.append(("<|im_end|>", int(answer and m.get("finish_reason") != "length")))
        pieces.append(("\n", 0))
    while not pieces[-1][1] or not pieces[-1][0]:
        pieces.pop()
    return pieces


def decode(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def check(tokenizer, system, c: Conversation) -> tuple[list[int], list[int]]:
    ids, mask = encode_conversation(tokenizer, c)
    pieces = expected(c.messages, system)
    assert decode(tokenizer, ids) == "".join(text for text, _ in pieces)
    for wanted in (0, 1):
        got = decode(tokenizer, [token for token, on in zip(ids, mask, strict=True) if on == wanted])
        assert got == "".join(text for text, on in pieces if on == wanted)
    assert mask[-1] == 1
    return ids, mask


@pytest.mark.parametrize("turns", [
    [("user", "What is rain?"), ("assistant", "Water.")],
    [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello ü 日本語 🦊\n\n")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", " d "), ("user", "e"), ("assistant", "f")],
    [("user", "a"), ("assistant", "b"), ("user", "a trailing question")],
    [("user", ""), ("assistant", ""), ("user", ""), ("assistant", "not empty")],
    [("user", "a"), ("assistant", "")],
    [("user", "a"), ("assistant", "b"), ("assistant", "c")],
    [("user", "a"), ("tool", "42"), ("assistant", "b")],
    [("user", "a"), ("assistant", "cut off", "length")],
    [("user", "a"), ("assistant", "cut", "length"), ("user", "go on"), ("assistant", "done", "stop")],
], ids=lambda turns: "-".join(t[0][0] for t in turns))
def test_supervised_text(chatml, turns):
    check(*chatml, conversation(*turns))


def test_supervised_text_of_random_conversations(chatml):
    rng = random.Random(0)
    for _ in range(40):
        turns = []
        for _ in range(rng.randint(1, 4)):
            turns.append(("user", "".join(rng.choices(PIECES, k=rng.randint(0, 5)))))
            text = "".join(rng.choices(PIECES, k=rng.randint(0, 6)))
            turns.append(("assistant", text, "length" if text and rng.random() < 0.3 else "stop"))
        check(*chatml, conversation(*turns))


def test_generated_token_ids_are_used_verbatim(chatml):
    tokenizer, system = chatml
    spelled = [tokenizer.convert_tokens_to_ids(c) for c in "battery"]  # not how the tokenizer would cut it
    assert tokenizer("battery", add_special_tokens=False)["input_ids"] != spelled
    end = tokenizer.eos_token_id
    ids, mask = check(tokenizer, system, conversation(("user", "a"), ("assistant", "battery", "stop", [*spelled, end])))
    assert ids[-8:] == [*spelled, end] and mask[-8:] == [1] * 8
    assert mask[-9] == 0
    cut = conversation(("user", "a"), ("assistant", "battery", "length", spelled), ("user", "b"), ("assistant", "c"))
    ids, mask = check(tokenizer, system, cut)
    first = mask.index(1)
    assert ids[first:first + 8] == [*spelled, end] and mask[first:first + 8] == [1] * 7 + [0]


def test_prompt_tokens_are_the_rows_context(chatml):
    """What the target continues is the row up to the answer, token for token, earlier generated ids included."""
    tokenizer, _ = chatml
    ids = [tokenizer.convert_tokens_to_ids(c) for c in "rain"]
    turns = [("user", "What is"), ("assistant", "rain", "stop", [*ids, 2]), ("user", "and?"), ("assistant", "water")]
    row, mask = encode_conversation(tokenizer, conversation(*turns))
    prompt = encode_prompt(tokenizer, conversation(*turns[:3]))
    assert row[:len(prompt)] == prompt
    assert decode(tokenizer, row[len(prompt):]) == "water<|im_end|>" and all(mask[len(prompt):])
    assert not mask[len(prompt) - 1]


def test_segments_alternate(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE
    segments = segment_conversation(tokenizer, conversation(("user", "a"), ("assistant", "b"), ("user", "c")))
    assert [s.supervised for s in segments] == [False, True, False]
    assert segments[1].text == "b<|im_end|>"
    assert segments[2].text == "\n<|im_start|>user\nc<|im_end|>\n"


def test_a_trimming_template_supervises_what_it_renders(tokenizer):
    tokenizer.chat_template = TRIMMING_TEMPLATE
    ids, mask = encode_conversation(tokenizer, conversation(("user", " a "), ("assistant", "  b c \n")))
    assert decode(tokenizer, [t for t, on in zip(ids, mask, strict=True) if on]) == "b c<|im_end|>"


@pytest.mark.parametrize(("template", "turns", "message"), [
    (CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"), [("user", "a"), ("assistant", "b")],
     "message 1: its content is not what the template renders"),
    (REWRITES_USER, [("user", "a"), ("assistant", "b")], "message 1: the template renders the turns before it diff"),
    (CHAT_TEMPLATE.replace("<|im_end|>", "<|other|>"), [("user", "a"), ("assistant", "b")], "end-of-turn token"),
    ("{{ raise_exception('only users here') }}", [("user", "a"), ("assistant", "b")], "refused.*only users here"),
    ("", [("user", "a"), ("assistant", "b")], "no chat template"),
    (CHAT_TEMPLATE, [("assistant", "b"), ("user", "a")], "message 0: begins with an assistant turn"),
])
def test_templates_that_cannot_be_aligned_are_refused(tokenizer, template, turns, message):
    tokenizer.chat_template = template
    with pytest.raises(ConversationError, match=message):
        encode_conversation(tokenizer, conversation(*turns))


def test_a_template_that_drops_thoughts_supervises_what_it_renders(tokenizer):
    tokenizer.chat_template = DROPS_THINKING
    turns = [("user", "a"), ("assistant", "<think>hm</think>b"), ("user", "c"), ("assistant", "<think>so</think>d")]
    ids, mask = encode_conversation(tokenizer, conversation(*turns))
    assert decode(tokenizer, [t for t, on in zip(ids, mask, strict=True) if on]) == (
        "b<|im_end|><think>so</think>d<|im_end|>")


def test_a_tokenizer_without_end_of_turn_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConversationError, match="no eos_token"):
        encode_conversation(tokenizer, conversation(("user", "a"), ("assistant", "b")))


LLAMA2 = "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else " \
         "' ' + m.content + eos_token }}{% endfor %}"
ZEPHYR = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}" \
         "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
REPLACE = normalizers.Replace(" ", "▁")


@pytest.mark.parametrize("template", [LLAMA2, ZEPHYR], ids=["llama2", "zephyr"])
@pytest.mark.parametrize("parts", [
    {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False)},
    {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always", split=False)},
    {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), REPLACE])}, {"normalizer": REPLACE},
    {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, {"rstrip": True, "normalizer": REPLACE},
], ids=["first", "always", "normalizer", "none", "byte level", "rstrip"])
def test_tokenizers_that_put_a_space_before_the_first_word(parts, template):
    """Segments have the tokens that they have in the whole, which is what the target is given and generates: not a
    space before each of them, as a text of its own would have."""
    model = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    for name in parts.keys() & {"pre_tokenizer", "normalizer"}:
        setattr(model, name, parts[name])
    model.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], show_progress=False,
        initial_alphabet=list("<|>▁\n")))
    model.add_special_tokens([AddedToken("</s>", rstrip=parts.get("rstrip", False))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    chat = conversation(("user", "battery"), ("assistant", "a device"), ("user", " the dog"), ("assistant", "fox"))
    whole = tokenizer.apply_chat_template(chat.messages, return_dict=False)
    ids, mask = encode_conversation(tokenizer, chat)
    assert ids == whole[:len(ids)] and ids[-1] == tokenizer.eos_token_id and set(whole[len(ids):]) <= {
        *tokenizer("\n", add_special_tokens=False)["input_ids"]}
    answer = "".join(tokenizer.convert_ids_to_tokens([i for i, on in zip(ids, mask, strict=True) if on]))
    answer = answer.replace("▁", " ").replace("Ġ", " ").replace("  ", " ")
    assert answer == (" a device</s> fox</s>" if template is LLAMA2 else "a device</s>fox</s>")
    prompt = Conversation("c", chat.messages[:3])
    assert encode_prompt(tokenizer, prompt) == tokenizer.apply_chat_template(
        prompt.messages, add_generation_prompt=True, return_dict=False)
