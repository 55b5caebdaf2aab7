"""What a target generated becomes a message whose row holds the very ids that were generated, or is refused."""

import pytest

from dflash_lib.conversations.formats import Conversation, ConversationError
from dflash_lib.conversations.generated import assistant_message
from dflash_lib.conversations.rendering import ChatTemplate, TemplateOptions
from dflash_lib.conversations.templates import encode_conversation, encode_prompt, segment_conversation
from tests.conversations.said import user
from tests.conversations.test_mask import OWN, QWEN, decode, tokenizer_with
from tests.tiny import make_tokenizer

ASKED = Conversation("c", [user("a")])


def thinker(path=OWN / "drops_thinking.jinja", **options):
    return ChatTemplate(tokenizer_with(path), TemplateOptions(**options))


def generate(template, text, finish_reason="stop", asked=ASKED):
    """The message for a text that the target wrote, its end-of-turn token behind it."""
    ids = template.tokenizer(text, add_special_tokens=False)["input_ids"]
    end = [template.tokenizer.eos_token_id] if finish_reason == "stop" else []
    return assistant_message(template, asked, text, {"token_ids": [*ids, *end], "finish_reason": finish_reason})


def supervised(template, *messages, asked=ASKED):
    row = Conversation("c", [*asked.messages, *messages], tools=asked.tools)
    ids, mask = encode_conversation(template, row)
    return [token for token, on in zip(ids, mask, strict=True) if on]


def parts(message):
    return message.get("reasoning_content"), message["content"]


@pytest.mark.parametrize(("text", "finish", "wanted"), [
    ("hm\n</think>\n\nbattery", "stop", ("hm", "battery")),
    ("hm\n\nso\n</think>\n\n a b \n", "stop", ("hm\n\nso", " a b \n")),
    ("hm</think>b", "stop", ("hm", "b")), ("\n</think>\n\nb", "stop", ("", "b")),
    ("\n\n</think>\n\nb", "stop", ("\n", "b")),
    ("hm\n</think>\n\nb </think> c", "stop", ("hm", "b </think> c")),
    ("first, I", "length", ("first, I", "")), ("hm\n</think>\n\nand th", "length", ("hm", "and th")),
    ("hm\n</think>\n\n<tool_call>\n{}\n</tool_call>", "stop", ("hm", "<tool_call>\n{}\n</tool_call>")),
])
@pytest.mark.parametrize("family", ["own thinking", "qwen3.5 thinking", "qwen3.6 thinking"])
def test_a_thought_is_set_apart_and_all_of_it_is_supervised(family, text, finish, wanted):
    path, _, options, *_ = QWEN[family]
    template = thinker(path, **options)
    message = generate(template, text, finish)
    assert parts(message) == wanted
    assert supervised(template, message) == message["token_ids"]
    if wanted[0].strip():  # a thought comes from no other prompt, so 04's default finds the same mask
        assert supervised(thinker(path), message) == message["token_ids"]


@pytest.mark.parametrize(("text", "finish"), [("battery", "stop"), ("a </think> b", "stop"), ("cut o", "length")])
def test_without_thinking_all_of_it_is_content(text, finish):
    template = thinker(thinking="off")
    message = generate(template, text, finish)
    assert message == {"role": "assistant", "content": text, "token_ids": message["token_ids"],
                       "finish_reason": finish}
    if "</think>" not in text:  # the template takes that for a thought of its own
        assert supervised(template, message) == message["token_ids"]
        with pytest.raises(ConversationError, match="decode to another text .*is thinking set as it was"):
            supervised(thinker(thinking="on"), message)


@pytest.mark.parametrize("thinking", ["default", "on", "off"])
def test_a_thought_that_was_never_closed_is_refused(thinking):
    """Put behind a closed thought it would look like an answer that the target gave without thinking."""
    message = generate(thinker(thinking="on"), "hm, so what", "stop")
    with pytest.raises(ConversationError, match="message 1: "):
        supervised(thinker(thinking=thinking), message)


def test_a_target_that_opens_its_thoughts_itself():
    """Qwen3's habit: the generation prompt ends before `<think>`."""
    template = thinker(thinking="on")
    tokenizer = template.tokenizer
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|im_start|>assistant\\n<think>\\n' + ('' if enable_thinking else '\\n</think>\\n\\n')",
        "<|im_start|>assistant\\n' + ('' if enable_thinking else '<think>\\n\\n</think>\\n\\n')")
    template = ChatTemplate(tokenizer, template.options)
    assert template.thought_marks == ("<think>\n", "\n</think>\n\n")
    message = generate(template, "<think>\nhm\n</think>\n\nb")
    assert parts(message) == ("hm", "b") and supervised(template, message) == message["token_ids"]
    cut = generate(template, "<think>\nhm", "length")
    assert parts(cut) == ("hm", "") and supervised(template, cut) == cut["token_ids"]
    assert parts(generate(template, "b at once")) == (None, "b at once")


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_channels(key):
    """gpt-oss's habits: thought and answer each have a channel, and its own template reads `thinking`."""
    tokenizer = tokenizer_with(OWN / "channels.jinja", "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>",
                               eos="<|return|>")
    tokenizer.chat_template = tokenizer.chat_template.replace("m.reasoning_content", f"m.{key}")
    template = ChatTemplate(tokenizer)
    message = generate(template, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
                                 "<|channel|>final<|message|>b")
    assert parts(message) == ("hm", "b") and supervised(template, message) == message["token_ids"]
    plain = generate(template, "<|channel|>final<|message|>b")
    assert parts(plain) == (None, "b") and supervised(template, plain) == plain["token_ids"]
    later = supervised(template, message, user("c"), plain)
    assert decode(tokenizer, later) == "<|channel|>final<|message|>b<|end|><|channel|>final<|message|>b<|return|>"


def test_a_template_that_knows_no_thoughts():
    template = ChatTemplate(make_tokenizer())
    assert template.thought_marks is None and template.answer_mark == ""
    message = generate(template, "<think>hm</think>b")
    assert parts(message) == (None, "<think>hm</think>b") and supervised(template, message) == message["token_ids"]


def test_the_next_prompt_is_what_the_template_makes_of_the_message():
    template = thinker(thinking="on")
    message = generate(template, "hm\n</think>\n\nb")
    asked = Conversation("c", [*ASKED.messages, message, user("c")])
    assert decode(template.tokenizer, encode_prompt(template, asked)) == template.tokenizer.apply_chat_template(
        asked.messages, tokenize=False, add_generation_prompt=True, enable_thinking=True)


@pytest.mark.parametrize(("content", "thought", "text", "good"), [
    ("b", "hm", "hm\n</think>\n\nb", True), ("hm\n</think>\n\nb", None, "hm\n</think>\n\nb", True),
    ("b", "hm", "another\n</think>\n\nb", False), ("b", None, "hm\n</think>\n\nb", False),
    ("b", None, "a quick b", False), ("", None, "battery", False), ("b", None, "\n</think>\n\nb", True),
    ("b", "hm", "c", False),
])
def test_ids_that_say_more_than_the_message_are_refused(content, thought, text, good):
    """In an earlier turn the template drops the thought, so the ids cannot be compared as a whole. What they say beyond
    the rendered text must be that thought: else content and ids are of two answers."""
    template = thinker()
    ids = template.tokenizer(text)["input_ids"]
    message = {"role": "assistant", "content": content, "token_ids": ids, "finish_reason": "stop",
               **({} if thought is None else {"reasoning_content": thought})}
    row = Conversation("c", [user("a"), message, user("c"), {"role": "assistant", "content": "d"}])
    if good:
        texts = [s.text for s in segment_conversation(template, row) if s.supervised]
        assert texts == ["b<|im_end|>", "d<|im_end|>"]
    else:
        with pytest.raises(ConversationError, match="message 1: its token_ids decode to another text"):
            segment_conversation(template, row)


def test_an_answer_that_ended_at_its_limit_has_one_end_of_turn():
    """finish_reason says length, the ids say that it ended: the end is not put there twice."""
    template = ChatTemplate(make_tokenizer())
    ids = [*template.tokenizer("b")["input_ids"], template.tokenizer.eos_token_id]
    message = {"role": "assistant", "content": "b", "token_ids": ids, "finish_reason": "length"}
    row = Conversation("c", [user("a"), message, user("c"), {"role": "assistant", "content": "d"}])
    tokens, mask = encode_conversation(template, row)
    assert decode(template.tokenizer, tokens).count("b<|im_end|>\n<|im_start|>user\nc<|im_end|>") == 1
    assert [t for t, on in zip(tokens, mask, strict=True) if on][:2] == ids


@pytest.mark.parametrize(("message", "what"), [
    ({"content": "a<|im_end|>b"}, "content contains"), ({"content": "<|im_end|>"}, "content contains"),
    ({"content": "b", "reasoning_content": "h<|im_end|>m"}, "reasoning_content contains"),
])
def test_an_end_of_turn_token_inside_an_answer(message, what):
    """The target would have stopped there, so what follows is not its text."""
    template = thinker()
    row = Conversation("c", [user("a"), {"role": "assistant", **message}])
    with pytest.raises(ConversationError, match=f"message 1: its {what} the end-of-turn token '<.im_end.>'"):
        segment_conversation(template, row)
    context = Conversation("c", [user("a<|im_end|>"), {"role": "assistant", "weight": 0, **message}, user("c"),
                                 {"role": "assistant", "content": "d"}])
    assert supervised(template, *context.messages[1:]) == template.tokenizer("d<|im_end|>")["input_ids"]
