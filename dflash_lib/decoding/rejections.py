"""Which drafts are refused: what was drafted, what the target wanted there, and behind which text."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_lib.decoding.evaluation import Answer
from dflash_lib.decoding.speculative import Step

NUM_CONTEXT = 12  # tokens shown before a refused draft


@dataclass(frozen=True)
class Rejection:
    """A refused draft. slot: from 1; context_ids: prompt and answer before it, drafts that were accepted included;
    drafted: the refused token; wanted: the target's own choice there."""

    prompt_id: str
    prompt_set: str
    slot: int
    context_ids: list[int]
    drafted: int
    wanted: int


def find_rejections(drafts: Sequence[Sequence[Sequence[int]]], answers: Sequence[Answer],
                    walk: Sequence[Sequence[Step]]) -> list[Rejection]:
    """The refused draft of each verify step that has one, in order. A step that accepts all of its drafts, or whose
    accepted ones end the answer, refuses none.

    drafts: of `draft_answers`; walk: the steps that were walked with them.
    """
    found = []
    for answer, per_anchor, steps in zip(answers, drafts, walk, strict=True):
        text, prompt_len = answer.text_ids, len(answer.prompt.token_ids)
        for step in steps:
            at = step.position + step.accepted + 1  # of the first token that was not accepted
            if step.accepted < step.drafted and at < len(text):
                drafted = per_anchor[step.position - prompt_len][step.accepted]
                found.append(Rejection(answer.prompt.id, answer.prompt.prompt_set, step.accepted + 1, text[:at],
                                       drafted, text[at]))
    return found


def rejection_table(tokenizer, rejections: Sequence[Rejection], num_rows: int = 15) -> list[dict[str, Any]]:
    """The pairs of drafted and wanted token that occur most often, JSON-able, each with an example.

    Keys: times; share (of all refusals); slots (times by slot, as {slot: times}); drafted and wanted, as the tokenizer
    spells them between quotes; context: the text before the example, which is the pair's first one.
    """
    pairs: dict[tuple[int, int], list[Rejection]] = defaultdict(list)
    for rejection in rejections:
        pairs[rejection.drafted, rejection.wanted].append(rejection)
    rows = []
    for (drafted, wanted), same in sorted(pairs.items(), key=lambda item: (-len(item[1]), item[0]))[:num_rows]:
        slots = [rejection.slot for rejection in same]
        rows.append({"times": len(same), "share": len(same) / len(rejections),
                     "slots": {str(slot): slots.count(slot) for slot in sorted(set(slots))},
                     "context": context_text(tokenizer, same[0]), "drafted": token_text(tokenizer, drafted),
                     "wanted": token_text(tokenizer, wanted)})
    return rows


def rejection_examples(tokenizer, rejections: Sequence[Rejection], num_rows: int = 12) -> list[dict[str, Any]]:
    """Refused drafts as they come, evenly spread over all of them: prompt, slot, context, drafted and wanted."""
    num = min(num_rows, len(rejections))
    chosen = [rejections[i * len(rejections) // num] for i in range(num)]
    return [{"prompt": f"{r.prompt_set}/{r.prompt_id}" if r.prompt_set else r.prompt_id, "slot": r.slot,
             "context": context_text(tokenizer, r), "drafted": token_text(tokenizer, r.drafted),
             "wanted": token_text(tokenizer, r.wanted)} for r in chosen]


def token_text(tokenizer, token: int) -> str:
    """One token, readable: its text between quotes, with escapes for line ends and the like; its id where it is only a
    part of a character."""
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    return f"part of a character (id {token})" if "\ufffd" in text else _quoted(text)


def context_text(tokenizer, rejection: Rejection, num_tokens: int = NUM_CONTEXT) -> str:
    """The text before a refused draft, its last `num_tokens` tokens, on one line."""
    text = tokenizer.decode(rejection.context_ids[-num_tokens:], clean_up_tokenization_spaces=False)
    return ("… " if len(rejection.context_ids) > num_tokens else "") + _quoted(text)[1:-1]


def _quoted(text: str) -> str:
    """Between quotes, with Python's escapes for what cannot be seen; letters of any script stay as they are."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f"“{shown}”"
