"""Rows a second of `prepare`, against a plain loop in one process, and what it takes in memory.

    python benchmarks/prepare.py [--rows 20000] [--workers 1 2] [--words N] [--no-loop] [--model DIR]
                                 [--conversations FILE] [--work-dir DIR]

The conversations are those of the demo, repeated under new ids and without the ids that the target generated, so that
every text is rendered and tokenised; with --words each message has its first N words only. Each way runs in a process
of its own; the time is that of the call, start of the workers included, imports and the reading of the tokenizer not.
Prints a Markdown table; memory is the peak of the calling process above what it had before, that peak itself, and the
peak of the largest worker.
"""

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))


def write_rows(conversations: Path, out: Path, num_rows: int, num_words: int | None) -> None:
    """Writes `num_rows` conversations without generated ids, each message cut to `num_words` (None = whole)."""
    rows = [json.loads(line) for line in conversations.read_text(encoding="utf-8").splitlines()]
    with open(out, "w", encoding="utf-8") as f:
        for number, row in enumerate(itertools.islice(itertools.cycle(rows), num_rows)):
            messages = [{"role": m["role"], "content": m["content"] if num_words is None else
                         " ".join(m["content"].split()[:num_words])} for m in row["messages"]]
            f.write(json.dumps({"id": f"row-{number}", "messages": messages}, ensure_ascii=False) + "\n")


def plain_loop(source: Path, tokenizer, max_length: int) -> tuple[int, int]:
    """Rows and tokens of the obvious loop: read, encode, keep in a list. The rows are good ones, so that nothing is
    refused here that `prepare` would take."""
    from dflash_lib.conversations.formats import read_conversations
    from dflash_lib.conversations.templates import ChatTemplate, encode_conversation

    template, rows = ChatTemplate(tokenizer), []
    for conversation in read_conversations(source):
        ids, mask = encode_conversation(template, conversation)
        if len(ids) <= max_length and sum(mask) >= 8:
            rows.append((ids, mask))
    return len(rows), sum(len(ids) for ids, _ in rows)


def measure(way: str, source: Path, model: Path, work_dir: Path) -> dict:
    """One way, in this process."""
    from transformers import AutoTokenizer

    from dflash_lib.conversations.prepare import PrepareOptions, prepare

    tokenizer = AutoTokenizer.from_pretrained(model)
    here = resource.getrusage(resource.RUSAGE_SELF)
    before, cpu, start = here.ru_maxrss, here.ru_utime + here.ru_stime, time.perf_counter()
    if way == "loop":
        num_rows, num_tokens = plain_loop(source, tokenizer, 2048)
    else:
        rows = prepare(source, tokenizer, PrepareOptions(max_length=2048), work_dir=work_dir, num_workers=int(way))
        num_rows, num_tokens = len(rows), rows.num_tokens
    seconds = time.perf_counter() - start
    here, workers = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = here.ru_utime + here.ru_stime + workers.ru_utime + workers.ru_stime - cpu
    return {"seconds": seconds, "cpu": cpu, "num_rows": num_rows, "num_tokens": num_tokens,
            "grown": here.ru_maxrss - before, "peak": here.ru_maxrss, "worker": workers.ru_maxrss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[20000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--words", type=int, help="of a message (default: all)")
    parser.add_argument("--no-loop", action="store_true", help="leave the plain loop out, which keeps all rows")
    parser.add_argument("--work-dir", type=Path, help="for the rows, some 500 bytes each (default: a temporary folder)")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "data" / "models" / "smollm2-135m-instruct")
    parser.add_argument("--conversations", type=Path, default=REPOSITORY / "data" / "demo_conversations.jsonl")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, source, work_dir = options.one
        print(json.dumps(measure(way, Path(source), options.model, Path(work_dir))))
        return
    print("| rows | way | seconds | CPU seconds | rows/s | tokens/s | against the loop | memory grown by | peak | "
          "worker |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for num_rows in options.rows:
        with tempfile.TemporaryDirectory(dir=options.work_dir) as folder:
            source = Path(folder) / "rows.jsonl"
            write_rows(options.conversations, source, num_rows, options.words)
            loop = None
            for way in (*([] if options.no_loop else ["loop"]), *map(str, options.workers)):
                command = [sys.executable, __file__, "--model", str(options.model), "--one", way, str(source),
                           str(Path(folder) / f"work-{way}")]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout
                                   .strip().splitlines()[-1])
                loop = loop or found
                if found["num_tokens"] != loop["num_tokens"]:
                    raise SystemExit(f"the ways must agree: {loop['num_tokens']} tokens, {found['num_tokens']} {way}")
                rate = found["num_rows"] / found["seconds"]
                name = "plain loop, rows in memory" if way == "loop" else f"prepare, num_workers {way}"
                worker = f"{found['worker'] / 1000:.0f} MB" if way not in ("loop", "1") else ""
                against = "" if options.no_loop else f"{loop['seconds'] / found['seconds']:.2f}"
                print(f"| {num_rows:,} | {name} | {found['seconds']:.1f} | {found['cpu']:.1f} | {rate:,.0f} | "
                      f"{found['num_tokens'] / found['seconds']:,.0f} | {against} | "
                      f"{found['grown'] / 1000:.0f} MB | {found['peak'] / 1000:.0f} MB | {worker} |", flush=True)


if __name__ == "__main__":
    main()
