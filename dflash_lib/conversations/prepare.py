"""From a file of conversations to token rows with their loss mask: streamed, in several processes, resumable.

Rows are encoded chunk by chunk into files that are whole or absent, which are joined in order. So a run that is killed
goes on where it was, and what comes out is the same, byte for byte, for any number of processes and interruptions. In
memory are one chunk a process and, of each row, its id.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import numpy as np
from safetensors import safe_open

from dflash_lib.conversations.chunks import CHUNK_ROWS, ERRORS, Chunk
from dflash_lib.conversations.formats import ConversationError, repeated_id
from dflash_lib.conversations.prepare_worker import TOKENIZER, Job, chunk_path, load_chunk, make_chunks, special_tokens
from dflash_lib.conversations.prepared_rows import (
    ARRAYS,
    FORMAT,
    META,
    REFUSED,
    ROWS,
    PreparedRows,
    PrepareOptions,
    row_entry,
)
from dflash_lib.conversations.rendering import ChatTemplate, tokenizer_hash
from dflash_lib.conversations.sources import SourceError, count_rows, data_files, hash_source
from dflash_lib.files import hash_tree, hash_value, write_json
from dflash_lib.progress import Progress

__all__ = ["PrepareOptions", "PreparedRows", "prepare"]

POLL_S = 0.05
GRACE_S = 10.0  # from SIGTERM to SIGKILL


def prepare(source: Path | str, tokenizer, options: PrepareOptions, *, work_dir: Path | str | None = None,
            num_workers: int = 1, chunk_rows: int = CHUNK_ROWS) -> PreparedRows:
    """Tokenises the conversations of a file or data set folder, in its order, until `max_samples` rows are kept.

    work_dir: where chunks, and in the end the rows, are kept, to be resumed, or taken as they are when nothing changed;
    the result's arrays are mapped from there, so `save` them elsewhere to keep them. None = a temporary folder, and
    arrays in memory. num_workers: processes; a source of two chunks or less is done in this one. One call at a time
    works in a work_dir.

    A row that cannot be used (not valid JSON, no conversation, a template that does not let its mask be aligned, too
    long, too few supervised tokens) is refused and listed with its number and reason. What is wrong with the file as a
    whole raises SourceError or ConversationError, naming the row: damage behind which nothing can be read, an end in
    the middle of a line, a first row of no known form, rows of several forms, an id that two rows have; and so does a
    file of which no row is left: training on an all-zero mask would look fine and learn nothing.
    """
    if num_workers < 1 or chunk_rows < 1:
        raise ValueError(f"num_workers and chunk_rows must be at least 1, got {num_workers} and {chunk_rows}")
    if work_dir is None:
        with tempfile.TemporaryDirectory(prefix="dflash-prepare-") as folder:
            return prepare(source, tokenizer, options, work_dir=folder, num_workers=num_workers,
                           chunk_rows=chunk_rows).in_memory()
    source, template = Path(source), ChatTemplate(tokenizer, options.template)
    state = _state(source)
    source_hash = hash_source(source)
    num_rows = count_rows(source)
    if num_rows is not None:
        num_rows = min(num_rows, options.max_samples or num_rows)
    if num_rows is not None and num_rows <= 2 * chunk_rows:
        num_workers = 1
    folder = _job_folder(Path(work_dir), {
        "source": source_hash, "tokenizer": tokenizer_hash(tokenizer), "ends": template.end_tokens,
        "options": asdict(options), "chunk_rows": chunk_rows, "code": hash_tree(Path(__file__).parent),
        "date": datetime.date.today().isoformat() if "strftime_now" in tokenizer.chat_template else ""})
    if (folder / "rows").is_dir():
        return PreparedRows.load(folder / "rows")
    job = Job(source=str(source), options=options, chunk_rows=chunk_rows, num_workers=num_workers,
              tokenizer_hash=tokenizer_hash(tokenizer), special_tokens=special_tokens(tokenizer))
    with _unchanged(source, state, folder), _Join(folder, job, source_hash) as join:
        progress = Progress(num_rows, "prepare", "rows") if num_rows and num_rows > 2 * chunk_rows else None
        for chunk in _chunks_in_process(job, folder, template) if num_workers == 1 else _chunks(job, folder, template):
            join.add(chunk)
            if progress is not None:
                progress.set(min(join.num_kept + join.num_refused, num_rows))
            if join.complete:
                break
        if progress is not None:
            progress.close()
        join.finish()
    for path in folder.glob("chunk-*"):
        path.unlink()
    return PreparedRows.load_unchecked(folder / "rows")  # its fingerprint has just been taken from these very files


def _state(source: Path) -> list[tuple]:
    """What tells that a file was written to or replaced, without reading it."""
    stats = [(file, file.stat()) for file in data_files(source)]
    return [(str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino) for file, stat in stats]


@contextmanager
def _unchanged(source: Path, state: list[tuple], folder: Path) -> Iterator[None]:
    """Raises SourceError when the source is not as it was in `state` at the end, whatever else went wrong: rows before
    and after the change would stand side by side. What was made of them is removed, so that nothing resumes it."""
    try:
        yield
    finally:
        if not source.exists() or _state(source) != state:
            shutil.rmtree(folder)
            raise SourceError(f"{source}: was changed while it was being prepared; nothing is kept. Run it again, and "
                              "leave the file alone meanwhile.")


def _job_folder(work_dir: Path, settings: dict) -> Path:
    """The folder of the job with these settings; those of other settings, begun or done before, are removed."""
    folder = work_dir / f"job-{hash_value(settings)[:16]}"
    if work_dir.is_dir():
        for other in work_dir.iterdir():
            if other != folder and other.is_dir() and re.fullmatch("job-[0-9a-f]{16}", other.name):
                shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _chunks_in_process(job: Job, folder: Path, template: ChatTemplate) -> Iterator[Chunk]:
    for number, _ in make_chunks(job, folder, template):
        yield load_chunk(folder, number)


def _chunks(job: Job, folder: Path, template: ChatTemplate) -> Iterator[Chunk]:
    """The chunks in order, as processes of their own finish them. They are started anew, not forked: a fork of a
    process with PyTorch's or the tokenizer's threads can wait for ever. Raises RuntimeError when one of them fails."""
    job.save(folder)
    template.tokenizer.save_pretrained(folder / TOKENIZER)
    ends = [template.tokenizer.convert_tokens_to_ids(token) for token in template.end_tokens]
    write_json(folder / TOKENIZER / "generation_config.json", {"eos_token_id": ends})
    with _workers(job, folder) as (workers, log):
        number = 0
        while True:
            ended = [worker.poll() for worker in workers]  # before looking for the chunk: what is done then is there
            if chunk_path(folder, number).exists():
                yield load_chunk(folder, number)
                number += 1
            elif any(code not in (0, None) for code in ended):
                raise RuntimeError(f"preparing {job.source}: a process ended with code "
                                   f"{next(code for code in ended if code)}. The end of its output ({log}):\n"
                                   f"{log.read_text(errors='replace')[-3000:]}")
            elif all(code == 0 for code in ended):
                return
            else:
                time.sleep(POLL_S)


@contextmanager
def _workers(job: Job, folder: Path) -> Iterator[tuple[list[subprocess.Popen], Path]]:
    """Starts the processes, and ends them on leaving; they end by themselves when this process does."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1",
           "TOKENIZERS_PARALLELISM": "false"}
    log, workers = folder / "workers.log", []
    try:
        with open(log, "wb") as f:
            for worker in range(job.num_workers):
                command = [sys.executable, "-m", "dflash_lib.conversations.prepare_worker", str(folder), str(worker),
                           str(os.getpid())]
                workers.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=f, stderr=f))
        yield workers, log
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            try:
                worker.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


class _Join:
    """Appends chunks to the final files, which become the folder `rows` in the end. Nothing but a number of 16 bytes
    is kept of a row meanwhile."""

    def __init__(self, folder: Path, job: Job, source_hash: str):
        self.folder, self.job, self.source_hash = folder, job, source_hash
        self.partial = folder / "rows.partial"
        self.numbers, self.hashes = array("Q"), array("Q")  # of every row seen: its number, a hash of its id
        self.num_kept = self.num_refused = self.num_tokens = self.num_empty_masks = 0
        self.first_refused: list[dict] = []
        self.error: dict | None = None
        self.unit, self.complete = "row", False

    def __enter__(self) -> "_Join":
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir()
        self.files = {name: open(self.partial / name, "wb") for name in (*(f"{a}.npy" for a in ARRAYS), ROWS, REFUSED)}
        for name in ARRAYS:
            self._write_header(name, 0)
        self._append("offsets", np.zeros(1, np.int64))
        return self

    def __exit__(self, *_) -> None:
        for file in self.files.values():
            file.close()

    def _write_header(self, name: str, length: int) -> None:
        """NumPy's header of a one-dimensional array; it has room for any length, so it can be written again."""
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(ARRAYS[name])), "fortran_order": False,
                  "shape": (length,)}
        self.files[f"{name}.npy"].seek(0)
        np.lib.format.write_array_header_1_0(self.files[f"{name}.npy"], header)

    def _append(self, name: str, values: np.ndarray) -> None:
        self.files[f"{name}.npy"].write(np.ascontiguousarray(values, ARRAYS[name]).tobytes())

    def add(self, chunk: Chunk) -> None:
        """Takes the chunk's rows, up to max_samples."""
        self.unit = chunk.unit
        room = (self.job.options.max_samples or sys.maxsize) - self.num_kept
        kept, refused, seen = chunk.kept[:room], chunk.refused, chunk.seen
        if kept and len(kept) == room:
            last = kept[-1]["number"]
            refused = [entry for entry in refused if entry["number"] < last]
            seen = [entry for entry in seen if entry[0] <= last]
            self.complete = True
        elif chunk.error is not None:
            self.error, self.complete = chunk.error, True
        lengths = chunk.lengths[:len(kept)]
        num_tokens = int(lengths.sum())
        self._append("input_ids", chunk.input_ids[:num_tokens])
        self._append("loss_mask", chunk.loss_mask[:num_tokens])
        self._append("offsets", self.num_tokens + np.cumsum(lengths))
        self._append_lines(ROWS, (row_entry(e["id"], e["kind"], e["truncated"]) for e in kept))
        self._append_lines(REFUSED, refused)
        self.numbers.extend(number for number, _ in seen)
        self.hashes.extend(_hash(name) for _, name in seen)
        self.first_refused += refused[:3 - len(self.first_refused)]
        self.num_kept += len(kept)
        self.num_refused += len(refused)
        self.num_tokens += num_tokens
        self.num_empty_masks += chunk.num_empty_masks

    def _append_lines(self, name: str, values) -> None:
        for value in values:
            self.files[name].write((json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8"))

    def finish(self) -> None:
        """Publishes the rows. Raises ConversationError or SourceError, whichever fault comes first in the source."""
        self._check()
        for name, length in zip(ARRAYS, (self.num_tokens, self.num_tokens, self.num_kept + 1), strict=True):
            self._write_header(name, length)
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        write_json(self.partial / META, {
            "format": FORMAT, "options": asdict(self.job.options), "num_refused": self.num_refused,
            "tokenizer_hash": self.job.tokenizer_hash, "source_sha256": self.source_hash})
        rows = PreparedRows.load_unchecked(self.partial)
        write_json(self.partial / META, rows.meta())  # now that its fingerprint is known
        self.partial.rename(self.folder / "rows")

    def _check(self) -> None:
        source, repeated = self.job.source, self._first_repeated_id()
        if repeated is not None and (self.error is None or repeated[0] < self.error["number"]):
            number, name, first = repeated
            raise ConversationError(repeated_id(f"{source}, {self.unit} {number}", name, self.unit, first))
        if self.error is not None:
            raise ERRORS[self.error["type"]](self.error["message"])
        if not self.num_kept + self.num_refused:
            raise ConversationError(f"{source}: holds no conversation")
        if self.num_kept:
            return
        if self.num_empty_masks == self.num_refused:
            raise ConversationError(f"{source}: the loss mask is zero in every row, so nothing would be learned. "
                                    "Are the assistant turns empty?")
        reasons = "; ".join(f"{entry['id']}: {entry['reason']}" for entry in self.first_refused)
        raise ConversationError(f"{source}: all {self.num_refused} conversations were refused, so nothing is left to "
                                f"train on. The first: {reasons}")

    def _first_repeated_id(self) -> tuple[int, str, int] | None:
        """Number and id of the first row whose id an earlier one has, and that one's number."""
        hashes = np.frombuffer(self.hashes, np.uint64)
        order = np.argsort(hashes, kind="stable")
        same = hashes[order[1:]] == hashes[order[:-1]]
        suspects = set(hashes[order[1:][same]].tolist())
        if not suspects:
            return None
        first: dict[str, int] = {}
        last = self.numbers[-1]
        for path in sorted(self.folder.glob("chunk-*.safetensors")):
            with safe_open(path, framework="np") as f:
                seen = json.loads(f.metadata()["rows"])["seen"]
            for number, name in seen:
                if number > last:
                    return None
                if _hash(name) in suspects:
                    if name in first:
                        return number, name, first[name]
                    first[name] = number
        return None


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
