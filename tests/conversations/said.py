"""Conversations of every habit that users' data has, as rows of a file, and what a template makes of them by hand."""

import json
import random
from itertools import pairwise

TOOL = {"type": "function", "function": {"name": "weather", "description": "Says how it is outside.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}
LETTERS = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}


def turns(order: str, *contents: str) -> dict:
    """A row of plain turns: one letter each, u, a, s or t."""
    return {"messages": [{"role": LETTERS[letter], "content": content}
                         for letter, content in zip(order, contents, strict=True)]}


def thinks(content: str, reasoning: str) -> dict:
    return {"role": "assistant", "content": content, "reasoning_content": reasoning}


def calls(*arguments, content: str | None = None, **more) -> dict:
    return {"role": "assistant", "content": content, **more, "tool_calls": [
        {"id": f"call_{i}", "type": "function", "function": {"name": "weather", "arguments": value}}
        for i, value in enumerate(arguments)]}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def tool(content: str) -> dict:
    return {"role": "tool", "content": content, "tool_call_id": "call_0"}


def answer(content: str, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


PLAIN = {
    "one turn": turns("ua", "What is rain?", "Water."),
    "system": turns("sua", "Be kind.", "Hi", "Hello."),
    "two turns": turns("uaua", "a", "b", "c", "d"),
    "five turns": turns("uauauauaua", *"abcdefghij"),
    "system and three turns": turns("suauaua", "Rules:\n- short\n- true", "1", "one", "2", "two", "3", "three"),
    "trailing user": turns("uau", "a", "b", "a question without answer"),
    "trailing user after two turns": turns("uauau", "a", "b", "c", "d", "e"),
    "two users in a row": turns("uua", "first", "second", "both"),
    "two assistants in a row": turns("uaa", "a", "b", "c"),
    "three assistants in a row, in the middle": turns("uaaaua", "a", "b", "c", "d", "e", "f"),
    "empty answer": turns("ua", "a", ""),
    "empty answer, then one": turns("uaua", "a", "", "b", "c"),
    "empty question": turns("ua", "", "b"),
    "white space only": turns("uaua", "a", " \n ", "b", "\t"),
    "white space around": turns("uaua", " a ", "  b \n\n", "\nc", "\n d  "),
    "line ends inside": turns("ua", "a\n\nb", "1. x\n\n2. y\n\n```\ncode\n```"),
    "unicode": turns("uaua", "日本語で?", "はい、日本語です。🦊", "naïve e\u0301?",
                     "Ünï\u202eçødé \U0001f468\u200d\U0001f469\u200d\U0001f467"),
    "the words of the role": turns("ua", "assistant", "assistant\nassistant"),
    "what begins like a thought": turns("uauaua", "a", "<b>bold</b>", "b", "<thin>", "c", "<think"),
    "a template's words": turns("ua", "{{ a }} {% b %}", "{% for x in y %}{{ x }}{% endfor %}"),
    "its own sentinels": turns("uaua", "one", "two", "three one", "one two one"),
    "the question again": turns("uaua", "say it", "say it", "say it", "say it"),
    "cut off": {"messages": [user("a"), answer("b and then", finish_reason="length")]},
    "cut off, then done": {"messages": [user("a"), answer("b", finish_reason="length"), user("go on"), answer("c")]},
    "parts of type text": {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c\n"}, {"type": "text", "text": "d"}]}]},
    "a long one": turns("uaua", "x " * 50, "y " * 80, "z", "w " * 60),
}
THINKING = {
    "a thought": {"messages": [user("a"), thinks("b", "hm")]},
    "a thought of lines": {"messages": [user("a"), thinks("b\nc", "first\n\nsecond\n")]},
    "an empty thought": {"messages": [user("a"), thinks("b", "")]},
    "a thought and no answer": {"messages": [user("a"), thinks("", "hm")]},
    "thoughts in each turn": {"messages": [user("a"), thinks("b", "one"), user("c"), thinks("d", "two")]},
    "a thought in the first turn only": {"messages": [user("a"), thinks("b", "hm"), user("c"), answer("d")]},
    "a thought in the last turn only": {"messages": [user("a"), answer("b"), user("c"), thinks("d", "hm 日本")]},
    "a thought in the text": {"messages": [user("a"), answer("<think>\nhm\n</think>\n\nb")]},
    "a thought in an earlier text": {"messages": [user("a"), answer("<think>\nhm\n</think>\n\nb"), user("c"),
                                                  answer("d")]},
    "a thought before a trailing question": {"messages": [user("a"), thinks("b", "hm"), user("c")]},
    "a thought and white space": {"messages": [user("a"), thinks("\n\n b ", "  hm \n"), user("c"), thinks(" d", "\n")]},
    "two thinking answers in a row": {"messages": [user("a"), thinks("b", "x"), thinks("c", "y")]},
    "a thought that is cut off": {"messages": [user("a"), thinks("b", "hm", ) | {"finish_reason": "length"}]},
}
TOOLS = {
    "a call and its answer": {"messages": [user("a"), calls({"city": "Rome"}), tool("sunny"), answer("It is sunny.")]},
    "arguments as text": {"messages": [user("a"), calls('{"city": "Rome", "days": 2}'), tool("x"), answer("b")]},
    "a call without arguments": {"messages": [user("a"), calls({}), tool("x"), answer("b")]},
    "two calls at once": {"messages": [user("a"), calls({"city": "Rome"}, {"city": "Oslo"}), tool("x"), tool("y"),
                                       answer("b")]},
    "words before a call": {"messages": [user("a"), calls({"days": 3}, content="Let me see. "), tool("x"),
                                         answer("b")]},
    "a thought before a call": {"messages": [user("a"), calls({"days": 3}, reasoning_content="hm"), tool("x"),
                                             thinks("b", "so")]},
    "calls in an earlier turn": {"messages": [
        user("a"), calls({"city": "Rome"}, reasoning_content="hm"), tool("x"), thinks("b", "so"), user("c"),
        calls({"city": "Oslo"}), tool("y"), answer("d")]},
    "call after call": {"messages": [user("a"), calls({"days": 1}), tool("x"), calls({"days": 2}), tool("y"),
                                     answer("b")]},
    "a call at the end": {"messages": [user("a"), calls({"city": "Zürich", "days": [1, {"x": None}]})]},
    "a call, then a trailing question": {"messages": [user("a"), calls({"days": 1}), tool("x"), answer("b"),
                                                      user("c")]},
    "calls in a row, then a trailing question": {"messages": [user("a"), calls({"days": 1}), calls({"city": "x"}),
                                                              user("b")]},
    "an earlier call with words": {"messages": [user("a"), calls({"days": 1}, content="one"), tool("two"),
                                                answer("b"), user("c"), answer("d")]},
    "a system prompt and tools": {"messages": [{"role": "system", "content": "Be kind."}, user("a"),
                                               calls({"city": "<|x|>"}), tool("{}"), answer("b")]},
}
for _row in TOOLS.values():
    _row["tools"] = [TOOL]
ALL = PLAIN | THINKING | TOOLS
assert len(ALL) >= 40


PIECES = ["Hello", " ", "\n", "ü", "日本", "one", "two", "<think", "</tool_call>", "<", "\n\n", "x=1", "  ",
          "assistant", "{{ a }}", "e\u0301", "o", "e"]


def random_row(rng: random.Random) -> dict:
    """A row of up to 8 messages or so: system prompts, thoughts, calls, tools and users in any order."""
    def text() -> str:
        return "".join(rng.choices(PIECES, k=rng.randint(0, 5)))

    messages = [{"role": "system", "content": text()}] * rng.randint(0, 1) + [user(text())]
    for _ in range(rng.randint(1, 7)):
        if messages[-1]["role"] == "assistant" and rng.random() < 0.75:
            messages.append(user(text()))
            continue
        thought = {"reasoning_content": text()} if rng.random() < 0.4 else {}
        if rng.random() < 0.7:
            messages.append(answer(text(), **thought))
            continue
        arguments = [{rng.choice("abc"): rng.choice([1, text(), [1, None]]) for _ in range(rng.randint(0, 2))}
                     for _ in range(rng.randint(1, 2))]
        messages.append(calls(*arguments, content=rng.choice([None, text()]), **thought))
        messages += [tool(text()) for _ in range(rng.randint(0, 2))]
    if not any(m["role"] == "assistant" for m in messages):
        messages.append(answer(text()))
    return {"messages": messages} | ({"tools": [TOOL]} if rng.random() < 0.3 else {})


def qwen_calls(message: dict, said: str) -> str:
    """Tool calls as Qwen3.5 and 3.6 write them."""
    text = ""
    for number, call in enumerate(message.get("tool_calls", [])):
        text += ("\n\n" if said else "") if number == 0 else "\n"
        text += f"<tool_call>\n<function={call['function']['name']}>\n"
        for name, value in call["function"]["arguments"].items():
            text += f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    return text


def json_calls(message: dict, said: str) -> str:
    """Tool calls as the project's own template writes them."""
    found = [json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
                        ensure_ascii=False) for call in message.get("tool_calls", [])]
    return "".join(("\n" if said or number else "") + f"<tool_call>\n{text}\n</tool_call>"
                   for number, text in enumerate(found))


def qwen_like(messages: list[dict], calls=qwen_calls, mode: str = "default", keep: bool = False):
    """The row behind the tools' preface as (text, supervised) pieces: the habits of Qwen3.5 and 3.6, by hand."""
    last_query = max(i for i, m in enumerate(messages) if m["role"] == "user")
    pieces = []
    for i, m in enumerate(messages):
        said, thought = m["content"].strip(), m.get("reasoning_content", "").strip()
        if m["role"] == "tool":
            first = messages[i - 1]["role"] != "tool"
            final = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            pieces.append((("<|im_start|>user" if first else "") + f"\n<tool_response>\n{said}\n</tool_response>"
                           + ("<|im_end|>\n" if final else ""), 0))
            continue
        pieces.append((f"<|im_start|>{m['role']}\n", 0))
        if m["role"] != "assistant":
            pieces.append((f"{said}<|im_end|>\n", 0))
            continue
        if "reasoning_content" not in m and "</think>" in said:
            thought, said = said.removeprefix("<think>").split("</think>")
            thought, said = thought.strip(), said.strip()
        if i > last_query or keep:
            pieces.append(("<think>\n", 0))
            # without a thought the closed one is the prompt's, unless thinking is on: then the target closes it itself
            pieces.append((f"{thought}\n</think>\n\n", int(bool(thought) or mode == "on")))
        pieces.append((said + calls(m, said), 1))
        pieces.append(("<|im_end|>", int(m.get("finish_reason") != "length")))
        pieces.append(("\n", 0))
    return pieces


def chatml(messages: list[dict], default_system: str = ""):
    """Plain ChatML as (text, supervised) pieces: nothing is trimmed or dropped."""
    pieces = [("" if messages[0]["role"] == "system" else default_system, 0)]
    for m in messages:
        answers = m["role"] == "assistant"
        pieces += [(f"<|im_start|>{m['role']}\n", 0), (m["content"], int(answers)),
                   ("<|im_end|>", int(answers and m.get("finish_reason") != "length")), ("\n", 0)]
    return pieces


def takes_turns(messages: list[dict]) -> bool:
    """Whether user and assistant alternate, as some templates demand."""
    return all(a["role"] != b["role"] for a, b in pairwise(m for m in messages if m["role"] != "system"))
