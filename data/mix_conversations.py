"""Writes `demo_conversations.jsonl` out of its parts, in an order drawn with a fixed seed, so that any first part of
the file is a fair sample of the parts that stand there.

    python data/mix_conversations.py OUT PART [PART ...] [--then PART [PART ...]]

Every part is a file of `python -m dflash_lib regenerate`, with its sidecar; OUT.meta.json lists the sidecars. The parts
behind `--then` are mixed among themselves and follow, so that a file can grow while its first rows stay what they were.
The shipped file: the answers to demo_prompts.jsonl (`--max-new-tokens 144 --batch-size 64`) and those to two files of
`python -m dflash_lib prompts --num 2000`, with `--seed 0` and `1` (`--max-new-tokens 64 --batch-size 128`); then those
to two more, with `--seed 2` and `3` (`--max-new-tokens 128 --batch-size 128`); then those to the prompts of
make_more_prompts.py (the same).
"""

import json
import random
import sys
from pathlib import Path

SEED = 20261129


def mix(out: Path, groups: list[list[Path]]) -> int:
    """Returns the number of conversations. Raises ValueError when two have one id."""
    parts, lines = [part for group in groups for part in group], []
    for group in groups:
        # by "\n" alone: str.splitlines would also cut at the line separators that JSON allows inside a text
        mixed = [line for part in group for line in part.read_text(encoding="utf-8").split("\n") if line]
        random.Random(SEED).shuffle(mixed)
        lines += mixed
    ids = [json.loads(line)["id"] for line in lines]
    if len(set(ids)) < len(ids):
        raise ValueError(f"{len(ids) - len(set(ids))} ids occur twice in {[str(part) for part in parts]}")
    sidecars = [json.loads(Path(f"{part}.meta.json").read_text(encoding="utf-8")) for part in parts]
    meta = {"conversations": len(lines), "generated_tokens": sum(s["generated_tokens"] for s in sidecars),
            "order_seed": SEED, "parts": sidecars}
    Path(f"{out}.meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    out.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    groups: list[list[Path]] = [[]]
    for name in sys.argv[2:]:
        if name == "--then":
            groups.append([])
        else:
            groups[-1].append(Path(name))
    print(mix(Path(sys.argv[1]), groups), "conversations")
