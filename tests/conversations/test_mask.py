"""The loss mask on real chat templates and on templates of the same habits, character for character, against texts
made by hand (said.py). Where ../shared is absent the real Qwen templates are not tested; the project's own are."""

import json
import os
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken

from dflash_lib.conversations.formats import ConversationError, parse_conversation
from dflash_lib.conversations.rendering import ChatTemplate, TemplateOptions
from dflash_lib.conversations.templates import encode_conversation, encode_prompt, segment_conversation
from tests.conftest import REPOSITORY
from tests.conversations import said
from tests.conversations.test_templates import SMOLLM2_SYSTEM
from tests.tiny import make_tokenizer

OWN = Path(__file__).parent / "own_templates"
SHARED = Path(os.environ.get("DFLASH_SHARED", REPOSITORY.parent / "shared")) / "fixtures" / "chat_templates"
TINY_HYBRID = REPOSITORY / "data" / "tiny_hybrid" / "chat_template.jinja"
SMOLLM2 = REPOSITORY / "data" / "models" / "smollm2-135m-instruct" / "chat_template.jinja"


def tokenizer_with(template: Path, special: str = "", plain: str = "<think> </think> <tool_call> </tool_call>",
                   eos: str = "<|im_end|>"):
    """The tiny tokenizer with a template and the tokens that the template writes."""
    if not template.is_file():
        pytest.skip(f"{os.path.relpath(template, REPOSITORY)} is absent")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special.split()])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain.split()])
    tokenizer.eos_token, tokenizer.chat_template = eos, template.read_text(encoding="utf-8")
    return tokenizer


def parse(name: str):
    return parse_conversation(json.loads(json.dumps(said.ALL[name])), "here", default_id="c")


def decode(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def check(tokenizer, conversation, pieces, options: TemplateOptions | None = None, variables=None) -> None:
    """The row decodes to the pieces, supervised and not, and the pieces are what the template itself renders."""
    template = ChatTemplate(tokenizer, options or TemplateOptions())
    whole = tokenizer.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False,
                                          **(variables or {}))
    by_hand = "".join(text for text, _ in pieces)
    assert whole.endswith(by_hand), "the text made by hand is not the template's"
    pieces = [(whole[:len(whole) - len(by_hand)], 0), *pieces]  # the tools' preface: context
    while pieces and not (pieces[-1][0] and pieces[-1][1]):
        pieces.pop()
    ids, mask = encode_conversation(template, conversation)
    assert decode(tokenizer, ids) == "".join(text for text, _ in pieces)
    runs, at = [], 0
    for i in range(1, len(mask) + 1):
        if i == len(mask) or mask[i] != mask[at]:
            runs.append((decode(tokenizer, ids[at:i]), mask[at]))
            at = i
    wanted = []
    for text, on in pieces:
        if text and wanted and wanted[-1][1] == on:
            wanted[-1] = (wanted[-1][0] + text, on)
        elif text:
            wanted.append((text, on))
    assert runs == wanted
    assert wanted, "nothing is supervised"


QWEN = {  # name: (template, tool calls by hand, options, the same as the template's variables, text by hand)
    "qwen3.5": (SHARED / "qwen3_5_0_8b.jinja", said.qwen_calls, {}, {}, {}),
    "qwen3.5 thinking": (SHARED / "qwen3_5_0_8b.jinja", said.qwen_calls, {"thinking": "on"}, {"enable_thinking": True},
                         {"mode": "on"}),
    "qwen3.6": (SHARED / "qwen3_6_27b_fp8_copy.jinja", said.qwen_calls, {}, {}, {}),
    "qwen3.6 thinking": (SHARED / "qwen3_6_27b_fp8_copy.jinja", said.qwen_calls, {"thinking": "on"},
                         {"force_thinking": True}, {"mode": "on"}),
    "qwen3.6 preserving": (SHARED / "qwen3_6_27b_fp8_copy.jinja", said.qwen_calls,
                           {"template_kwargs": {"preserve_thinking": True}}, {"preserve_thinking": True},
                           {"keep": True}),
    "own": (OWN / "drops_thinking.jinja", said.json_calls, {}, {}, {}),
    "own thinking": (OWN / "drops_thinking.jinja", said.json_calls, {"thinking": "on"}, {"enable_thinking": True},
                     {"mode": "on"}),
    "own preserving": (OWN / "drops_thinking.jinja", said.json_calls, {"template_kwargs": {"keep_thoughts": True}},
                       {"keep_thoughts": True}, {"keep": True}),
    "tiny hybrid": (TINY_HYBRID, said.json_calls, {}, {}, {}),
    "tiny hybrid thinking": (TINY_HYBRID, said.json_calls, {"thinking": "on"}, {"enable_thinking": True},
                             {"mode": "on"}),
    "tiny hybrid preserving": (TINY_HYBRID, said.json_calls, {"template_kwargs": {"preserve_thinking": True}},
                               {"preserve_thinking": True}, {"keep": True}),
}


def check_family(tokenizer, family: str, conversation) -> None:
    _, calls, options, variables, by_hand = QWEN[family]
    messages = conversation.messages
    if calls is said.qwen_calls and conversation.tools and messages[0]["role"] == "system":
        messages = messages[1:]  # Qwen's system prompt is part of the tools' preface
    pieces = said.qwen_like(messages, calls, **by_hand)
    check(tokenizer, conversation, pieces, TemplateOptions(**options), variables)


@pytest.mark.parametrize("name", said.ALL)
@pytest.mark.parametrize("family", QWEN)
def test_templates_that_rewrite_earlier_turns(family, name):
    check_family(tokenizer_with(QWEN[family][0]), family, parse(name))


@pytest.mark.parametrize("family", QWEN)
def test_random_conversations(family):
    tokenizer, rng = tokenizer_with(QWEN[family][0]), random.Random(0)
    for _ in range(30):
        check_family(tokenizer, family, parse_conversation(said.random_row(rng), "here", default_id="c"))


@pytest.mark.parametrize("name", said.PLAIN)
def test_smollm2(name):
    conversation = parse(name)
    check(tokenizer_with(SMOLLM2), conversation, said.chatml(conversation.messages, SMOLLM2_SYSTEM))


@pytest.mark.parametrize("name", said.PLAIN)
def test_a_turn_that_ends_with_another_token_than_eos(name):
    """Gemma's habits: `<end_of_turn>` is what the template puts behind an answer, `<eos>` is not."""
    conversation = parse(name)
    tokenizer = tokenizer_with(OWN / "other_end.jinja", "<bos> <eos> <start_of_turn> <end_of_turn>", eos="<eos>")
    tokenizer.bos_token = "<bos>"
    if not said.takes_turns(conversation.messages):
        with pytest.raises(ConversationError, match="refused the conversation: roles must take turns"):
            encode_conversation(tokenizer, conversation)
        return
    system, *rest = conversation.messages if conversation.messages[0]["role"] == "system" else [None,
                                                                                               *conversation.messages]
    pieces = [("<bos>", 0)]
    for i, m in enumerate(rest):
        answers = m["role"] == "assistant"
        before = system["content"] + "\n\n" if system and i == 0 else ""
        pieces += [(f"<start_of_turn>{'model' if answers else 'user'}\n" + before, 0),
                   (m["content"].strip(), int(answers)),
                   ("<end_of_turn>", int(answers and m.get("finish_reason") != "length")), ("\n", 0)]
    check(tokenizer, conversation, pieces)


@pytest.fixture
def channels(tmp_path):
    """A tokenizer with gpt-oss's habits; the folder's generation_config.json names the token that ends a call, too."""
    special = "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>"
    tokenizer = tokenizer_with(OWN / "channels.jinja", special, eos="<|return|>")
    ids = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer.name_or_path = str(tmp_path)
    return tokenizer


def test_a_target_that_writes_its_own_channels(channels):
    """All of it is generated behind `<|start|>assistant`; earlier thoughts are dropped, earlier answers end otherwise,
    and so the prompt of the second answer is not the beginning of the whole."""
    final = "<|channel|>final<|message|>"
    check(channels, parse("thoughts in each turn"), [
        ("<|start|>user<|message|>a<|end|><|start|>assistant", 0), (final + "b<|end|>", 1),
        ("<|start|>user<|message|>c<|end|><|start|>assistant", 0),
        ("<|channel|>analysis<|message|>two<|end|><|start|>assistant" + final + "d<|return|>", 1)])
    check(channels, parse("a thought before a call"), [
        ("<|start|>user<|message|>a<|end|><|start|>assistant", 0),
        (" to=weather<|channel|>commentary<|message|>"
         '{"days": 3}<|call|>', 1), ("<|start|>tool<|message|>x<|end|><|start|>assistant", 0),
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistant" + final + "b<|return|>", 1)])
    check(channels, parse("empty answer, then one"), [
        ("<|start|>user<|message|>a<|end|><|start|>assistant", 0), (final + "<|end|>", 1),
        ("<|start|>user<|message|>b<|end|><|start|>assistant", 0), (final + "c<|return|>", 1)])


def test_the_end_of_a_call_is_not_guessed(channels):
    """Without the generation config nothing says that `<|call|>` ends a turn: the row is refused, not run on."""
    channels.name_or_path = ""
    with pytest.raises(ConversationError, match="message 1: the template puts none of .* behind its tool calls"):
        encode_conversation(channels, parse("a thought before a call"))
    with pytest.raises(ConversationError, match="its tool calls contain the end-of-turn token"):
        encode_conversation(tokenizer_with(OWN / "drops_thinking.jinja"), parse_conversation(
            {"messages": [said.user("a"), said.calls({"city": "x<|im_end|>y"})]}, "here"))


def text_arguments():
    tokenizer = tokenizer_with(OWN / "text_arguments.jinja", "<s> </s> <|User|> <|Assistant|>", eos="</s>")
    tokenizer.bos_token = "<s>"
    return tokenizer


def test_arguments_joined_as_text_and_thoughts_never_rendered():
    tokenizer, conversation = text_arguments(), parse("arguments as text")
    ids, mask = encode_conversation(tokenizer, conversation)
    assert decode(tokenizer, [t for t, on in zip(ids, mask, strict=True) if on]) == (
        '<call>weather\n{"city": "Rome", "days": 2}</call></s>b</s>')
    check(tokenizer, parse("a thought in an earlier text"), [
        ("<s><|User|>a<|Assistant|>", 0), ("\n\nb</s>", 1), ("<|User|>c<|Assistant|>", 0), ("d</s>", 1)])


def test_marks_are_used():
    """The template's own marks, without the thought that the prompt opens and the line end behind the turn."""
    tokenizer = tokenizer_with(OWN / "marked.jinja")
    user = ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>", 0)
    check(tokenizer, parse("a thought"), [user, ("hm</think>b<|im_end|>", 1), ("\n", 0)])
    check(tokenizer, parse("two turns"), [user, ("</think>b<|im_end|>", 1), (
        "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>", 0), ("</think>d<|im_end|>", 1), ("\n", 0)])
    tokenizer.chat_template = tokenizer.chat_template.replace(" + '<|im_end|>\\n' }}{% endgeneration %}",
                                                              " }}{% endgeneration %}{{ '<|im_end|>\\n' }}")
    check(tokenizer, parse("a thought"), [user, ("hm</think>b<|im_end|>", 1), ("\n", 0)])
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- generation %}", "{%- generation %}{% endgeneration %}{% generation %}")
    with pytest.raises(ConversationError, match="marks 2 generated spans for 1 assistant turns"):
        encode_conversation(tokenizer, parse("a thought"))


def test_marks_that_hold_the_header_of_a_turn_whose_thoughts_are_dropped():
    """No generation prompt leads there as a whole; the header is the prompt's all the same."""
    tokenizer = tokenizer_with(OWN / "drops_thinking.jinja")
    header = "{{- '<|im_start|>assistant\\n' }}"
    end = "        {{- '<|im_end|>\\n' }}\n    {%- elif m.role == 'tool' %}"
    assert header in tokenizer.chat_template and end in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(header, "{%- generation %}" + header).replace(
        end, end.replace("}}", "}}{%- endgeneration %}", 1))
    for name, conversation in ((name, parse(name)) for name in said.ALL):
        if "tool" not in name and "call" not in name and conversation.messages[0]["role"] != "assistant":
            assert supervised(ChatTemplate(tokenizer), conversation) == supervised(own(), conversation), name
    rewrites = tokenizer.chat_template.replace("m.role + '\\n' + said",
                                               "m.role + '\\n' + (said if loop.last else said | upper)")
    assert rewrites != tokenizer.chat_template
    tokenizer.chat_template = rewrites
    with pytest.raises(ConversationError, match="message 1: the template renders the turns before it differently"):
        segment_conversation(tokenizer, parse("one turn"))


def own(**variables):
    return ChatTemplate(tokenizer_with(OWN / "drops_thinking.jinja"), TemplateOptions(**variables))


def supervised(template: ChatTemplate, conversation) -> list[str]:
    return [s.text for s in segment_conversation(template, conversation) if s.supervised]


def test_only_the_last_turn():
    conversation = parse("thoughts in each turn")
    assert supervised(own(), conversation) == ["b<|im_end|>", "two\n</think>\n\nd<|im_end|>"]
    assert supervised(own(turns="last"), conversation) == ["two\n</think>\n\nd<|im_end|>"]
    whole = [encode_conversation(own(turns=turns), conversation)[0] for turns in ("all", "last")]
    assert whole[0] == whole[1], "the same tokens, another mask"
    first = parse_conversation(said.turns("aua", "Hello!", "a", "b"), "here")
    with pytest.raises(ConversationError, match="message 0: begins with an assistant turn"):
        segment_conversation(own(), first)
    assert supervised(own(turns="last"), first) == ["b<|im_end|>"]


def test_a_turn_of_weight_zero_is_context():
    row = said.turns("uauaua", *"abcdef")
    row["messages"][1]["weight"], row["messages"][3]["weight"] = 0, 1
    conversation = parse_conversation(row, "here")
    assert supervised(own(), conversation) == ["d<|im_end|>", "f<|im_end|>"]
    plain = parse_conversation(said.turns("uauaua", *"abcdef"), "here")
    assert encode_conversation(own(), conversation)[0] == encode_conversation(own(), plain)[0]
    row["messages"][5]["weight"] = 0
    assert supervised(own(turns="last"), parse_conversation(row, "here")) == []


def thinks_by_default(**variables):
    """As Qwen3.6's own template: the generation prompt leaves the thought open unless enable_thinking is false."""
    template = own(**variables)
    template.tokenizer.chat_template = template.tokenizer.chat_template.replace(
        "if enable_thinking else", "if enable_thinking | default(true) else")
    return template


def test_each_turn_follows_the_prompt_that_leads_to_it():
    """A turn without a thought comes from the prompt that closes it, one with a thought from the one that opens it."""
    for template in (own(), thinks_by_default()):
        assert supervised(template, parse("one turn")) == ["Water.<|im_end|>"]
        assert supervised(template, parse("a thought")) == ["hm\n</think>\n\nb<|im_end|>"]
    assert supervised(thinks_by_default(thinking="on"), parse("one turn")) == ["\n</think>\n\nWater.<|im_end|>"]


def test_thinking_off_refuses_what_thinks():
    with pytest.raises(ConversationError, match="message 1: it thinks .* but thinking is off"):
        segment_conversation(own(thinking="off"), parse("a thought"))
    with pytest.raises(ConversationError, match="message 1: none of the template's generation prompts leads to it"):
        segment_conversation(own(thinking="off"), parse("a thought in the text"))
    assert supervised(own(thinking="off"), parse("a thought in the first turn only")) == [
        "b<|im_end|>", "d<|im_end|>"], "dropped there, so nothing thinks"


@pytest.mark.parametrize(("change", "conversation", "message"), [
    (("said + '<|im_end|>", "said | upper + '<|im_end|>"), "one turn", None),
    (("{{- said }}", "{{- said | upper }}"), "one turn", "message 1: its content is not what the template renders"),
    (("{{- said }}", "{{- said[:3] }}"), "one turn", "message 1: its content is not what the template renders"),
    (("{{- said }}", "{{- 'fixed' }}"), "one turn", "message 1: its content is not what the template renders"),
    (("thought | trim", "thought | upper"), "a thought", "its reasoning_content is not what the template renders"),
    (("{{- said }}", "{{- said ~ '!' }}"), "one turn", "message 1: the template does not put an end-of-turn token"),
    (("assistant\\n<think>\\n' + (''", "assistant\\n<guess>\\n' + (''"), "one turn",
     "not how its generation prompt begins"),
    (("m.role + '\\n' + said", "m.role + '\\n' + (said if loop.last else said | upper)"), "one turn",
     "message 1: the template renders the turns before it differently"),
])
def test_what_cannot_be_aligned_is_refused(change, conversation, message):
    """Planted faults in a template that is fine: each refuses the row, where a guess would shift the mask."""
    template = own()
    assert change[0] in template.tokenizer.chat_template
    template.tokenizer.chat_template = template.tokenizer.chat_template.replace(*change)
    if message is None:  # the user's words, not the assistant's: no matter
        assert supervised(template, parse(conversation)) == ["Water.<|im_end|>"]
        return
    with pytest.raises(ConversationError, match=message):
        segment_conversation(template, parse(conversation))


def test_generated_ids_of_a_turn_that_is_rewritten():
    """Where the template drops the thoughts, the generated ids do not stand there: the text is tokenised anew."""
    template = own()
    tokenizer = template.tokenizer
    spelled = [tokenizer.convert_tokens_to_ids(c) for c in "battery"]
    thought = tokenizer("hm\n</think>\n\n")["input_ids"]
    generated = {"token_ids": [*thought, *spelled, tokenizer.eos_token_id], "finish_reason": "stop"}
    row = [said.user("a"), said.answer("hm\n</think>\n\nbattery", **generated)]
    ids, mask = encode_conversation(template, parse_conversation({"messages": row}, "here"))
    assert [t for t, on in zip(ids, mask, strict=True) if on] == generated["token_ids"]
    later = parse_conversation({"messages": [*row, said.user("b"), said.answer("c")]}, "here")
    ids, mask = encode_conversation(template, later)
    assert [t for t, on in zip(ids, mask, strict=True) if on] == tokenizer("battery<|im_end|>c<|im_end|>")["input_ids"]
    row[1]["content"] = "hm\n</think>\n\nanother"
    with pytest.raises(ConversationError, match="message 1: its token_ids decode to another text"):
        encode_conversation(template, parse_conversation({"messages": row}, "here"))


def test_generated_ids_without_the_end_of_turn():
    """Some servers leave it out; a turn that ended by itself has it all the same, one that was cut off has not."""
    template = own()
    ids, end = template.tokenizer("battery")["input_ids"], template.tokenizer.eos_token_id
    for finish, wanted in (("stop", [*ids, end]), ("length", ids)):
        row = parse_conversation({"messages": [said.user("a"), said.answer("battery", token_ids=ids,
                                                                           finish_reason=finish)]}, "here")
        tokens, mask = encode_conversation(template, row)
        assert [t for t, on in zip(tokens, mask, strict=True) if on] == wanted


def test_a_turn_that_is_cut_off_in_its_thoughts():
    """The template closes the thought, the target did not. Generated ids that say so cannot be rendered at all."""
    cut = {"finish_reason": "length"}
    row = parse_conversation({"messages": [said.user("a"), said.thinks("", "first, I") | cut]}, "here")
    assert supervised(own(), row) == ["first, I"]
    ids = own().tokenizer("first, I")["input_ids"]
    row = parse_conversation({"messages": [said.user("a"), said.answer("first, I", token_ids=ids, **cut)]}, "here")
    with pytest.raises(ConversationError, match="message 1: its token_ids decode to another text"):
        segment_conversation(thinks_by_default(), row)  # a guess would put them behind a thought that is closed


@pytest.mark.parametrize("thinking", ["default", "on", "off"])
def test_the_prompt_is_the_templates_own(thinking):
    template, conversation = own(thinking=thinking), parse("trailing user after two turns")
    wanted = template.tokenizer.apply_chat_template(conversation.messages, tokenize=False, add_generation_prompt=True,
                                                    enable_thinking=thinking == "on")
    assert decode(template.tokenizer, encode_prompt(template, conversation)) == wanted
    tools = parse("a call, then a trailing question")
    assert decode(template.tokenizer, encode_prompt(template, tools)) == template.tokenizer.apply_chat_template(
        tools.messages, tools=tools.tools, tokenize=False, add_generation_prompt=True,
        enable_thinking=thinking == "on")
    assert wanted.endswith("<think>\n" if thinking == "on" else "</think>\n\n")


@pytest.mark.parametrize(("options", "message"), [
    ({"turns": "first"}, "turns"), ({"thinking": "yes"}, "thinking"),
    ({"template_kwargs": {"tokenize": True}}, "template_kwargs: tokenize cannot be set")])
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        TemplateOptions(**options)


def test_rows_that_are_tokenised_already():
    tokenizer = make_tokenizer()
    row = parse_conversation({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 0]}, "here")
    assert encode_conversation(tokenizer, row) == ([5, 6, 7, 8], [0, 1, 0, 1])
    row = parse_conversation({"prompt_token_ids": [5, 6], "token_ids": [7, 2]}, "here")
    assert encode_conversation(tokenizer, row) == ([5, 6, 7, 2], [0, 0, 1, 1])
    with pytest.raises(ConversationError, match="token id 384 is not in the tokenizer's vocabulary of 384"):
        encode_conversation(tokenizer, parse_conversation({"input_ids": [5, 384], "loss_mask": [0, 1]}, "here"))


def test_generated_ids_that_the_tokenizer_does_not_have():
    """Decoding passes over them, so that the text would be right and the row not."""
    ids = own().tokenizer("battery")["input_ids"]
    for unknown in (len(own().tokenizer), 1 << 40):
        row = {"messages": [said.user("a"), said.answer("battery", token_ids=[*ids, unknown], finish_reason="stop")]}
        with pytest.raises(ConversationError, match=f"c, message 1: token id {unknown} is not in the tokenizer's voc"):
            encode_conversation(own(), parse_conversation(row, "here", default_id="c"))


def test_a_call_with_what_json_has_no_word_for():
    row = {"messages": [said.user("a"), said.calls({"x": float("nan")})]}
    assert supervised(own(), parse_conversation(row, "here")) == [
        '<tool_call>\n{"name": "weather", "arguments": {"x": NaN}}\n</tool_call><|im_end|>']
