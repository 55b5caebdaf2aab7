"""Other ways in which the states of a row may have come about: other token ids, padding, packing.

Each is a row to run, and where in it the stored row begins; the comparison says whether it fits better.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dflash_lib.hidden_states.audit import faults
from dflash_lib.target.loading import Target


@dataclass(frozen=True)
class Alternative:
    """row: the ids to run; offset: stored row of a token is its place in `row` + offset; positions: position ids, None
    = counted through; text: what it would mean; key: equal for the same mistake in other samples."""

    code: str
    row: list[int]
    offset: int
    text: str
    key: tuple
    positions: list[int] | None = None


def special_ids(target: Target) -> list[int]:
    """Ids that tools put before a row: padding, beginning and end of text, and 0; those that the embedding has."""
    tokenizer, config = target.tokenizer, target.config
    found = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id,
             *[getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")], 0]
    flat = [k for value in found for k in (value if isinstance(value, list | tuple) else [value])]
    size = target.embedding.weight.shape[0]
    return list(dict.fromkeys(k for k in flat if isinstance(k, int) and 0 <= k < size))


def _token(target: Target, token: int) -> str:
    return f"{token} ({target.tokenizer.convert_ids_to_tokens(token)!r})"


def token_alternatives(target: Target, ids: list[int], first_tokens: Sequence[int]) -> Iterator[Alternative]:
    """The ids are not those that were run: one more or less in front, or another spelling of the same text.

    first_tokens: with which other samples begin.
    """
    specials = special_ids(target)
    if len(ids) > 1:
        code = faults.BOS if ids[0] == target.tokenizer.bos_token_id else faults.IDS_SHIFTED
        yield Alternative(code, ids[1:], 0, f"the states are those of the ids without their first, "
                          f"{_token(target, ids[0])}: state t belongs to token t + 1", (code, "-1"))
        yield Alternative(code, ids[1:], 1, f"the states were computed without the first token, "
                          f"{_token(target, ids[0])}", (code, "-1 in place"))
    for token in dict.fromkeys([*specials, *first_tokens]):
        code = faults.BOS if token in specials else faults.IDS_SHIFTED
        for offset, where in ((0, "state t belongs to token t - 1"), (-1, "its own state left out")):
            yield Alternative(code, [token, *ids], offset, f"the states were computed with {_token(target, token)} "
                              f"before the ids, {where}", (code, offset))
    text = target.tokenizer.decode(ids)
    other = target.tokenizer.encode(text, add_special_tokens=False)
    if other and other != ids and max(other) < target.embedding.weight.shape[0]:
        yield Alternative(faults.IDS_DIFFER, other, 0, "the states are those of the same text in the tokenizer's own "
                          "ids", (faults.IDS_DIFFER, "same text"))


def packing_alternatives(target: Target, ids: list[int], before: Mapping[str, list[int]]) -> Iterator[Alternative]:
    """The row was run behind others, in one row. before: their ids by what they are ("sample 3", "samples 2, 3")."""
    hybrid = "linear_attention" in (getattr(target.config, "layer_types", None) or [])
    for name, other in before.items():
        row, size = [*other, *ids], len(other)
        yield Alternative(faults.PACKING, row, -size, f"the row was run behind {name}, which it could see",
                          (faults.PACKING,))
        if hybrid:
            yield Alternative(faults.PACKING, row, -size, f"the row was run behind {name} with positions of its own: "
                              "attention was kept apart, the recurrent state was not", (faults.PACKING,),
                              [*range(size), *range(len(ids))])


def padding_alternatives(ids: list[int], token: int, amounts: Sequence[int]) -> Iterator[Alternative]:
    """The row was padded on the left, and nothing masked the padding."""
    for amount in amounts:
        yield Alternative(faults.LEFT_PADDING, [token] * amount + ids, -amount,
                          f"the row was run behind {amount} padding tokens (id {token}) that nothing masked",
                          (faults.LEFT_PADDING,))


def padding_amounts(longest: int, near: Sequence[int]) -> tuple[list[int], list[int]]:
    """Amounts of padding to try: first what other samples' lengths make likely, then steps that grow by a third."""
    steps, step = [], 1
    while step <= max(longest, 8):
        steps.append(step)
        step = max(step + 1, round(step * 4 / 3))
    likely = [n for n in dict.fromkeys([longest, *near]) if n > 0]
    return likely, [n for n in steps if n not in likely]
