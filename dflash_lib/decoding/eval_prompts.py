"""Prompts to evaluate on: files of conversations or of plain questions, in named sets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_lib.conversations.formats import ConversationError, detect_format, read_conversations
from dflash_lib.conversations.templates import as_template, encode_prompt

# Plain fields of public prompt sets that hold what a user says: gsm8k's, MATH's, and MT-bench's turns, whose first is
# asked (the second needs an answer to the first). HumanEval's and MBPP's `prompt` is a form of conversations already.
PLAIN_FIELDS = ("question", "problem", "turns")
ID_FIELDS = ("task_id", "question_id", "unique_id")
SHIPPED = Path(__file__).resolve().parents[2] / "data" / "eval_prompts"


@dataclass(frozen=True)
class EvalPrompt:
    """A held-out prompt: its text, and its tokens with the generation prompt; the set that it belongs to, if any."""

    id: str
    kind: str
    text: str
    token_ids: list[int]
    prompt_set: str = ""


def read_prompts(path: Path | str, template, num_prompts: int | None = None) -> list[EvalPrompt]:
    """The first `num_prompts` rows of a file (None = all), each to be continued by the target.

    A row is a conversation in any form of `conversations.formats` that ends with a user turn, or has one of
    `PLAIN_FIELDS`. template: a ChatTemplate, made with the options that the training text was rendered with, or a
    tokenizer for the default ones. `text` is what the user says. Raises as `read_conversations`, and ConversationError
    for a conversation that does not end with a user turn.
    """
    prompts, template = [], as_template(template)
    for conversation in read_conversations(path, num_prompts, need_assistant=False, convert=_from_plain_field):
        if conversation.messages[-1]["role"] != "user":
            raise ConversationError(f"{path}: conversation {conversation.id!r} does not end with a user turn, so there "
                                    "is nothing to answer")
        text = "\n".join(m["content"] for m in conversation.messages if m["role"] == "user")
        kind = conversation.extra.get("kind", conversation.extra.get("category", ""))
        prompts.append(EvalPrompt(conversation.id, str(kind), text, encode_prompt(template, conversation)))
    return prompts


def _from_plain_field(row: Any, where: str) -> Any:
    """A row with a plain field as one with messages; any other as it is."""
    if not isinstance(row, dict):
        return row
    for field in ID_FIELDS:
        if row.get("id") is None and row.get(field) is not None:
            row = {**row, "id": row[field]}
    try:
        detect_format(row, where)
        return row
    except ConversationError as error:
        fields = [field for field in PLAIN_FIELDS if row.get(field) is not None]
        if not fields:
            raise ConversationError(f"{error}. Plain prompts are taken from the keys {', '.join(PLAIN_FIELDS)}, "
                                    "too") from error
    text = row[fields[0]]
    if fields[0] == "turns":
        text = text[0] if isinstance(text, list) and text else None
    if not isinstance(text, str) or not text.strip():
        raise ConversationError(f"{where}: {fields[0]} must be text that is not empty"
                                f"{' in a list' if fields[0] == 'turns' else ''}")
    return {**row, "messages": [{"role": "user", "content": text}]}


def parse_prompt_sets(arguments: Sequence[str]) -> dict[str, Path]:
    """Files by name from texts such as "gsm8k=data/gsm8k.jsonl"; without any, those of `SHIPPED`.

    Raises ValueError for a text without name, and for a name that two files have.
    """
    if not arguments:
        return {path.stem: path for path in sorted(SHIPPED.glob("*.jsonl"))}
    sets: dict[str, Path] = {}
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not (name and equals and path):
            raise ValueError(f"--prompts {argument}: expected NAME=FILE, such as gsm8k=data/gsm8k.jsonl")
        if name in sets:
            raise ValueError(f"--prompts {argument}: the set {name!r} is {sets[name]} already; give each file a name "
                             "of its own")
        sets[name] = Path(path)
    return sets


def read_prompt_sets(sets: dict[str, Path], template, num_prompts: int | None = None) -> list[EvalPrompt]:
    """The prompts of all sets, the first `num_prompts` of each (None = all), set by set.

    Raises as `read_prompts`, and ValueError for a `num_prompts` below 1.
    """
    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"num_prompts: at least 1 is needed, got {num_prompts}")
    return [replace(prompt, prompt_set=name) for name, path in sets.items()
            for prompt in read_prompts(path, template, num_prompts)]
