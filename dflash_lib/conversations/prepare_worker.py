"""Makes the chunks of a preparation, in the caller's process or as one of several of its own:
`python -m dflash_lib.conversations.prepare_worker FOLDER WORKER PARENT`, with `job.json` and the tokenizer in FOLDER.

Each process reads the source itself and decodes only the rows of its chunks, so that no data goes from one to another.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_lib.conversations.chunks import Chunk, encode_chunk, read_chunks
from dflash_lib.conversations.formats import ConversationError, RowFormat
from dflash_lib.conversations.prepared_rows import PrepareOptions
from dflash_lib.conversations.rendering import ChatTemplate, tokenizer_hash
from dflash_lib.conversations.sources import SourceError
from dflash_lib.files import read_json, write_json
from dflash_lib.launch import die_with_parent

JOB, TOKENIZER = "job.json", "tokenizer"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is prepared: the source's path, the options, rows a chunk, processes; the tokenizer's hash and its special
    tokens, which templates may use."""

    source: str
    options: PrepareOptions
    chunk_rows: int
    num_workers: int
    tokenizer_hash: str
    special_tokens: dict[str, str]

    def save(self, folder: Path) -> None:
        write_json(folder / JOB, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Job":
        values = read_json(folder / JOB)
        return cls(**values | {"options": PrepareOptions(**values["options"])})


def special_tokens(tokenizer) -> dict[str, str]:
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items()}


def chunk_path(folder: Path, number: int) -> Path:
    return folder / f"chunk-{number:07d}.safetensors"


def make_chunks(job: Job, folder: Path, template: ChatTemplate, worker: int = 0) -> Iterator[tuple[int, bool]]:
    """Makes the chunks of worker `worker` (every num_workers-th) that are not there yet; yields the number of each and
    whether it was made now."""
    row_format, first = RowFormat(), True
    for number, rows, error in read_chunks(job.source, job.chunk_rows):
        if first and rows:  # the first row's form holds for the whole file, whoever makes the first chunk
            first = False
            try:
                row_format.check(rows[0].value(), rows[0].where)
            except (ConversationError, SourceError):
                pass  # it is an error of the first chunk, and found again where that is made
        if number % job.num_workers == worker:
            path, made = chunk_path(folder, number), False
            if not path.exists():
                encode_chunk(template, rows, job.options, row_format, error).save(path)
                made = True
            yield number, made


def load_chunk(folder: Path, number: int) -> Chunk:
    return Chunk.load(chunk_path(folder, number))


def main() -> None:
    folder, worker, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent)
    from transformers import PreTrainedTokenizerFast  # not AutoTokenizer, which imports PyTorch: seconds a process

    job = Job.load(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / TOKENIZER)
    if (tokenizer_hash(tokenizer), special_tokens(tokenizer)) != (job.tokenizer_hash, job.special_tokens):
        raise ValueError("this tokenizer is another one once it was saved and loaded again; use num_workers=1")
    for _ in make_chunks(job, folder, ChatTemplate(tokenizer, job.options.template), worker):
        pass


if __name__ == "__main__":
    main()
