"""Trains the tiny hybrid of `data/tiny_hybrid/` from scratch: a target of Qwen3.5's architecture (Gated DeltaNet, and
full attention in every fourth layer) that has learned something, and small enough to be shipped.

    python data/train_tiny_hybrid.py [--conversations FILE] [--out DIR] [--work DIR] [--threads N]

The text is what SmolLM2 answered (data/demo_conversations.jsonl), with the prompts. Each conversation is rendered twice
with the model's own chat template: as it is, and with a thought before each answer, a plan that a rule makes of the
answer (`plan`), since SmolLM2 does not think. An epoch takes one of the two, the next epoch the other. Every twentieth
conversation (by the hash of its id) is held out. A killed training goes on from its newest checkpoint in --work.

What comes out is in bfloat16, as the real checkpoints are; `training.json` beside it records data, recipe, losses.
"""

import argparse
import datetime
import hashlib
import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from dflash_lib.conversations.formats import Conversation, read_conversations
from dflash_lib.conversations.templates import ChatTemplate, encode_conversation
from dflash_lib.drafter.checkpoints import load_newest, restore_tensors, save_checkpoint, state_tensors
from dflash_lib.files import hash_file, hash_tree, hash_value, write_json
from dflash_lib.progress import Progress

HERE = Path(__file__).resolve().parent
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")  # ids 0 to 3; the mask token is a drafter's
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # tokens of their own, but text, as in Qwen3.5
END = SPECIAL.index("<|im_end|>")
HELDOUT_OUT_OF = 20
NUM_SAMPLES = 8  # held-out conversations whose loss is on record one by one, so that a test can measure it again


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """num_conversations: the first ones of the file, which grows at its end; batch_tokens: of a step, padding included;
    sort_rows: rows that are sorted by length together, so that a batch has rows of like length; evaluations: of the
    held-out conversations, spread over the training."""

    num_conversations: int = 9495
    vocab_size: int = 2048
    epochs: int = 2
    batch_tokens: int = 2048
    sort_rows: int = 512
    max_length: int = 512
    learning_rate: float = 4e-3
    final_learning_rate: float = 0.02
    warmup_steps: int = 60
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 20261130
    evaluations: int = 10


def model_config(vocab_size: int) -> Qwen3_5TextConfig:
    """Eight layers in the real pattern, several value heads to a key head, gated attention, partial RoPE; the sizes are
    those that a CPU core trains in half an hour (data/tiny_hybrid/README.md), and the embeddings are tied."""
    return Qwen3_5TextConfig(
        vocab_size=vocab_size, hidden_size=192, intermediate_size=512, num_hidden_layers=8, num_attention_heads=3,
        num_key_value_heads=1, head_dim=64, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=64,
        linear_value_head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=END, pad_token_id=None, rope_parameters={
            "rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25,
            "mrope_interleaved": True, "mrope_section": [3, 3, 2]})


# --- data ------------------------------------------------------------------------------------------------------------


def plan(answer: str) -> str:
    """The thought that leads to an answer: its form and its first words, found by rule."""
    lines = [line.strip() for line in answer.split("\n") if line.strip()]
    if "```" in answer:
        form = "code"
    elif sum(line[:2] in ("- ", "* ", "+ ") or line.split(".")[0].isdigit() for line in lines) > 1:
        form = "a list"
    elif len(lines) == 1:
        form = "one paragraph"
    else:
        form = "some paragraphs"
    words = lines[0].split()[:4] if lines else []
    return f"The answer is {form}. It begins with: {' '.join(words)}"


def with_plans(conversation: Conversation) -> Conversation:
    """The conversation with a plan before each answer."""
    return Conversation(conversation.id, [
        {**m, "reasoning_content": plan(m["content"])} if m["role"] == "assistant" else m
        for m in conversation.messages])


def is_held_out(conversation_id: str) -> bool:
    """By the hash of the id, so that a conversation stays on its side when others are added to the file."""
    return int(hashlib.sha256(conversation_id.encode()).hexdigest(), 16) % HELDOUT_OUT_OF == 0


def question(conversation: Conversation) -> str:
    """The first user turn."""
    return next(m["content"] for m in conversation.messages if m["role"] == "user")


def read_text(path: Path, num_conversations: int) -> tuple[list[Conversation], list[Conversation], int]:
    """Training and held-out conversations without SmolLM2's token ids, and how many were left out because their first
    question is a held-out one's, too, or one of demo_heldout_prompts.jsonl."""
    found = [Conversation(c.id, [{k: v for k, v in m.items() if k != "token_ids"} for m in c.messages])
             for c in islice(read_conversations(path), num_conversations)]
    heldout = [c for c in found if is_held_out(c.id)]
    kept_away = {question(c) for c in heldout} | {question(c) for c in read_conversations(
        HERE / "demo_heldout_prompts.jsonl", need_assistant=False)}
    train = [c for c in found if not is_held_out(c.id) and question(c) not in kept_away]
    return train, heldout, len(found) - len(heldout) - len(train)


def hash_lines(path: Path, num_lines: int) -> str:
    """SHA-256 of the first lines of a file."""
    with path.open("rb") as file:
        return hashlib.sha256(b"".join(islice(file, num_lines))).hexdigest()


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with single digits, trained on `texts`, with the chat template of data/tiny_hybrid."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size - len(PLAIN), special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[END], pad_token=SPECIAL[0],
                                   model_max_length=4096, clean_up_tokenization_spaces=False)
    fast.chat_template = (HERE / "tiny_hybrid" / "chat_template.jinja").read_text(encoding="utf-8")
    assert len(fast) == vocab_size, f"the text is too short for {vocab_size} tokens"
    return fast


@dataclass(frozen=True)
class Row:
    """input_ids and answer (1 where the target would generate the token), int64 [tokens]."""

    input_ids: Tensor
    answer: Tensor


def encode(template: ChatTemplate, conversations: Sequence[Conversation], max_length: int) -> list[Row]:
    """The rows, cut at `max_length` tokens."""
    return [Row(*(torch.tensor(values[:max_length]) for values in encode_conversation(template, c)))
            for c in conversations]


def epoch_batches(lengths: Sequence[int], recipe: Recipe, epoch: int) -> list[list[int]]:
    """Row numbers by batch, a function of seed and epoch: rows of like length together, at most `batch_tokens` with
    their padding, batches in random order."""
    rng = random.Random(f"{recipe.seed},{epoch}")
    order = rng.sample(range(len(lengths)), len(lengths))
    batches: list[list[int]] = []
    for start in range(0, len(order), recipe.sort_rows):
        batch: list[int] = []
        for row in sorted(order[start:start + recipe.sort_rows], key=lengths.__getitem__):
            if batch and lengths[row] * (len(batch) + 1) > recipe.batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches.append(batch)
    rng.shuffle(batches)
    return batches


def collate(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """input_ids, labels (those of the next position; -100 = no loss) and answer (of the labels), int64 [rows, tokens],
    padded on the right: no token sees what stands behind it, so no mask is needed.

    The end-of-turn behind an answer that was cut off is nobody's choice and carries no loss.
    """
    length = max(len(row.input_ids) for row in rows)
    input_ids, labels = torch.zeros(len(rows), length, dtype=torch.int64), torch.full((len(rows), length), -100)
    answer = torch.zeros(len(rows), length, dtype=torch.int64)
    for i, row in enumerate(rows):
        n = len(row.input_ids)
        input_ids[i, :n], labels[i, :n - 1], answer[i, :n - 1] = row.input_ids, row.input_ids[1:], row.answer[1:]
        cut_off = (row.input_ids[1:] == END) & (row.answer[1:] == 0) & (row.answer[:-1] == 1)
        labels[i, :n - 1][cut_off] = -100
    return input_ids, labels, answer


# --- training --------------------------------------------------------------------------------------------------------


def label_losses(model: Qwen3_5ForCausalLM, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood (nats) of each label, float32 [rows, tokens], 0 where there is none."""
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
    keep = labels >= 0
    losses = functional.cross_entropy(model.lm_head(hidden[keep]).float(), labels[keep], reduction="none")
    return torch.zeros(labels.shape).masked_scatter(keep, losses)


def learning_rate(step: int, steps: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to `final_learning_rate` of the peak; step from 0."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    share = max(0.0, (step - recipe.warmup_steps) / max(1, steps - recipe.warmup_steps))
    low = recipe.final_learning_rate
    return recipe.learning_rate * warm * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))


@torch.no_grad()
def answer_losses(model: Qwen3_5ForCausalLM, rows: Sequence[Row], recipe: Recipe) -> list[tuple[int, float]]:
    """(tokens, summed negative log-likelihood in nats) of each row's answers, what is in the row before them given."""
    found: list[tuple[int, float]] = [(0, 0.0)] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids))
    while order:
        num = max(1, recipe.batch_tokens // len(rows[order[-1]].input_ids))
        batch, order = order[-num:], order[:-num]
        input_ids, labels, answer = collate([rows[i] for i in batch])
        losses = label_losses(model, input_ids, labels) * answer
        for i, tokens, loss in zip(batch, answer.sum(1).tolist(), losses.double().sum(1).tolist(), strict=True):
            found[i] = tokens, loss
    return found


def mean_loss(losses: Sequence[tuple[int, float]]) -> float:
    """Nats a token."""
    return sum(loss for _, loss in losses) / sum(tokens for tokens, _ in losses)


def num_bytes(tokenizer, rows: Sequence[Row]) -> int:
    """UTF-8 bytes of what the answers say, thoughts included, end-of-turn tokens not."""
    return sum(len(tokenizer.decode(row.input_ids[row.answer > 0], skip_special_tokens=True).encode()) for row in rows)


class Training:
    """The model on its way: one step after the other, with checkpoints in `work`."""

    def __init__(self, renderings: tuple[list[Row], list[Row]], heldout: list[Row], recipe: Recipe, work: Path,
                 fingerprint: str):
        self.renderings, self.heldout, self.recipe, self.work = renderings, heldout, recipe, work
        self.fingerprint = fingerprint
        torch.manual_seed(recipe.seed)
        self.model = Qwen3_5ForCausalLM(model_config(recipe.vocab_size)).float()
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if p.ndim != 2]  # norms, convolutions, decays
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)
        self.steps = [(epoch, batch) for epoch in range(recipe.epochs) for batch in epoch_batches(
            [len(renderings[(epoch + i) % 2][i].input_ids) for i in range(len(renderings[0]))], recipe, epoch)]
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.curve: list[dict] = []
        self._resume()

    def _resume(self) -> None:
        newest = load_newest(self.work / "checkpoints")
        if newest is None:
            return
        path, meta = newest
        if meta["fingerprint"] != self.fingerprint:
            raise SystemExit(f"{self.work}: begun with other data, another recipe or other code; remove it, or choose "
                             "another --work")
        restore_tensors(path, self.model, {}, [self.optimizer])
        self.step, self.tokens, self.seconds, self.curve = (
            meta["step"], meta["tokens"], meta["seconds"], meta["curve"])

    def run(self) -> None:
        """Trains to the end."""
        interval = math.ceil(len(self.steps) / self.recipe.evaluations)
        with Progress(len(self.steps), "train", "steps", interval=10, start=self.step) as progress:
            losses: list[float] = []
            while self.step < len(self.steps):
                losses.append(self._train_step())
                last = self.step == len(self.steps)
                if last or self.step % interval == 0:
                    self._evaluate(sum(losses) / len(losses))
                    losses = []
                progress.set(self.step, f"loss {losses[-1] if losses else self.curve[-1]['loss']:.3f}, held out "
                                        f"{self.curve[-1]['heldout_loss'] if self.curve else math.nan:.3f}")

    def _train_step(self) -> float:
        began = time.monotonic()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, len(self.steps), self.recipe)
        epoch, batch = self.steps[self.step]
        input_ids, labels, _ = collate([self.renderings[(epoch + i) % 2][i] for i in batch])
        loss = label_losses(self.model, input_ids, labels).sum() / (labels >= 0).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += int((labels >= 0).sum())
        self.seconds += time.monotonic() - began
        return loss.item()

    def _evaluate(self, loss: float) -> None:
        self.curve.append({"step": self.step, "tokens": self.tokens, "loss": round(loss, 4), "heldout_loss": round(
            mean_loss(answer_losses(self.model, self.heldout, self.recipe)), 4)})
        save_checkpoint(self.work / "checkpoints", self.step, state_tensors(self.model, {}, [self.optimizer]), {
            "fingerprint": self.fingerprint, "tokens": self.tokens, "seconds": self.seconds, "curve": self.curve})


# --- the result ------------------------------------------------------------------------------------------------------


def save(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Qwen3_5ForCausalLM:
    """Writes the model folder in bfloat16 and returns the model as it is then read: rounded, in float32."""
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=0)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.float().eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the tiny hybrid.")
    parser.add_argument("--conversations", type=Path, default=HERE / "demo_conversations.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "tiny_hybrid")
    parser.add_argument("--work", type=Path, default=HERE.parent / "runs" / "tiny_hybrid")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    options = parser.parse_args()
    recipe = Recipe(epochs=options.epochs)
    torch.set_num_threads(options.threads)
    train, heldout, num_dropped = read_text(options.conversations, recipe.num_conversations)
    texts = (m.get(key, "") for c in train for m in with_plans(c).messages for key in ("reasoning_content", "content"))
    tokenizer = make_tokenizer(texts, recipe.vocab_size)
    template = ChatTemplate(tokenizer)
    renderings = (encode(template, train, recipe.max_length),
                  encode(template, [with_plans(c) for c in train], recipe.max_length))
    # half of the held-out conversations think
    judged = encode(template, [with_plans(c) if i % 2 else c for i, c in enumerate(heldout)], recipe.max_length)
    data = {"file": options.conversations.name,
            "first_lines_sha256": hash_lines(options.conversations, recipe.num_conversations),
            "training_conversations": len(train), "heldout_conversations": len(heldout), "left_out": num_dropped,
            "epoch_tokens": [sum(len(row.input_ids) for row in rows) for rows in renderings]}
    fingerprint = hash_value([data["first_lines_sha256"], asdict(recipe), hash_file(__file__), hash_file(
        HERE / "tiny_hybrid" / "chat_template.jinja"), hash_tree(HERE.parent / "dflash_lib" / "conversations")])
    training = Training(renderings, judged, recipe, options.work, fingerprint)
    print(f"{sum(p.numel() for p in training.model.parameters()):,} parameters, {len(training.steps)} steps, {data}")
    training.run()

    model = save(training.model, tokenizer, options.out)
    losses = answer_losses(model, judged, recipe)
    seen = answer_losses(model, [renderings[i % 2][i] for i in range(min(len(heldout), len(train)))], recipe)
    tokens, nats, size = sum(t for t, _ in losses), sum(n for _, n in losses), num_bytes(tokenizer, judged)
    write_json(options.out / "training.json", {
        "data": data, "recipe": asdict(recipe), "steps": training.step, "tokens_seen": training.tokens,
        "seconds": round(training.seconds), "threads": options.threads, "date": datetime.date.today().isoformat(),
        "torch": torch.__version__, "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in model.parameters()), "curve": training.curve,
        "heldout": {"tokens": tokens, "bytes": size, "loss": nats / tokens, "training_loss": mean_loss(seen),
                    "perplexity": math.exp(nats / tokens), "perplexity_a_byte": math.exp(nats / size)},
        "samples": [{"id": c.id, "thinks": bool(i % 2), "tokens": losses[i][0], "nats": losses[i][1]}
                    for i, c in enumerate(heldout[:NUM_SAMPLES])]})
    print(f"{options.out}: held-out loss {nats / tokens:.4f} (training text {mean_loss(seen):.4f}), perplexity "
          f"{math.exp(nats / tokens):.2f} a token, {math.exp(nats / size):.3f} a byte")


if __name__ == "__main__":
    main()
