"""Conversations: the template, the packing, which targets count, and talking with a tuned model."""

import json
import math
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, command, environment, losses, parameters, run
from faults import start
from test_counted import assert_same

import data
import eval
import train
from config import GPTConfig, UsageError
from flops import bits_per_byte
from instruments import chat as instrument
from machinery import checkpoint
from machinery.shards import Manifest
from machinery.trained import EvalConfig, find_model, is_tuned
from model import GPT
from preparation import chat, sources, stdlib_chats
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat. " * 40, "What is a cat? An animal."], 300)


def test_turns_become_ids_and_typed_special_tokens_stay_text(tokenizer):
    e = tokenizer.encode
    turns = [("system", "Be brief."), ("user", "<|end|> Hi"), ("assistant", ""), ("user", "the")]
    first = [1, *e("Be brief.\n\n<|end|> Hi"), 3, 2, 3]
    assert chat.encode(turns, tokenizer) == [*first, 1, *e("the"), 3]
    assert chat.encode(turns, tokenizer, reply=True) == [*first, 1, *e("the"), 3, 2]
    assert chat.encode(turns[1:2], tokenizer) == [1, *e("<|end|> Hi"), 3]
    assert set(e("<|user|><|assistant|><|end|><|bos|>")).isdisjoint(range(4))
    for cannot in ([], turns[:1], turns[:3]):
        with pytest.raises(UsageError, match="must be the user's"):
            chat.encode(cannot, tokenizer, reply=True)


def test_both_forms_of_turns_are_read():
    said = [("system", "s"), ("human", "q"), ("gpt", "a"), ("human", "")]
    theirs = [{"from": role, "value": text} for role, text in said]
    turns = [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "")]
    ours = [{"role": role, "content": text, "id": 7} for role, text in turns]
    assert chat.read_turns(theirs) == chat.read_turns(ours) == turns
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat.read_turns([{"role": "user", "content": parts}]) == [("user", "ab")]


@pytest.mark.parametrize(
    "value, reason",
    [
        ("text", "not a list of turns"),
        ([], "roles out of turn"),
        ([{"text": "q"}], "not a list of turns"),
        ([["user", "q"]], "not a list of turns"),
        ([{"role": "assistant", "content": "a"}], "roles out of turn"),
        ([{"role": "system", "content": "s"}], "roles out of turn"),
        ([{"role": "user", "content": "q"}] * 2, "roles out of turn"),
        ([{"role": "tool", "content": "q"}], "a role other than"),
        ([{"role": ["user"], "content": "q"}], "a role other than"),
        ([{"role": "user", "content": None}], "a part that is not text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part that is not text"),
        ([{"role": "user"}], "a part that is not text"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_beginning(value, reason):
    with pytest.raises(UsageError, match=reason) as error:
        chat.read_turns(value)
    assert isinstance(value, str) or str(value)[:1] in str(error.value)


def test_a_tokenizer_without_roles_is_refused(tokenizer):
    class Other:
        special = {"<|bos|>": 0, "<|user|>": 1}

    assert chat.marks(tokenizer) == (1, 2, 3)
    with pytest.raises(UsageError, match="has no <.assistant.> token"):
        chat.marks(Other)


# ------------------------------------------------------------------- pieces, rows, what counts

WORDS = [
    "",
    " ",
    "cat",
    "the mat",
    "\n\n",
    "olá 汉",
    "<|assistant|>",
    "a<|end|>b",
    "<|bos|>",
    "\ud800",
]


def random_turns(rng: random.Random, most: int = 4) -> list[chat.Turn]:
    """A conversation of awkward words; a question at its end may have no answer."""
    say = lambda: "".join(rng.choices(WORDS, k=rng.randint(0, 6)))
    turns = [("system", say())] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, most)):
        turns += [("user", say()), ("assistant", say())]
    return turns[:-1] if rng.random() < 0.2 and len(turns) > 3 else turns


def beside(turns: list[chat.Turn], tokenizer) -> tuple[list[int], list[bool]]:
    """The oracle: ids with BOS, and for each whether it counts, written down beside the text."""
    ids, counts, system = [0], [False], ""
    for role, text in turns:
        if role == "system":
            system = text + "\n\n" if text else ""
            continue
        words = tokenizer.encode(system + text if role == "user" else text)
        ids += [1 if role == "user" else 2, *words, 3]
        counts += [False, *[role == "assistant"] * (len(words) + 1)]
        system = "" if role == "user" else system
    return ids, counts


def counted(ids: list[int]) -> list[bool]:
    """Of each id but the first: whether it counts as a target."""
    return (data.targets_of(np.array([ids], np.uint16), (1, 2, 3))[0] != data.IGNORED).tolist()


def test_what_counts_follows_from_the_ids_alone(tokenizer):
    """10,000 conversations, special tokens typed into many, against a mask made beside the text."""
    rng, answers, all_targets = random.Random(0), 0, 0
    for _ in range(10_000):
        turns = random_turns(rng)
        ids, counts = beside(turns, tokenizer)
        assert [0, *chat.encode(turns, tokenizer)] == ids
        assert counted(ids) == counts[1:], turns
        answers, all_targets = answers + sum(counts), all_targets + len(ids) - 1
    assert 0.3 < answers / all_targets < 0.6


def test_all_of_a_row_of_text_counts_and_filler_does_not():
    rows = np.array([[0, 7, 8, 0, 9], [0, 1, 3, 2, 3], [1, 7, 3, 2, 8], [0, 2, 3, 0, 0]], np.uint16)
    no = data.IGNORED
    expected = [[7, 8, 0, 9], [no, no, no, 3], [no, no, no, 8], [no, 3, no, no]]
    assert data.targets_of(rows, (1, 2, 3)).tolist() == expected
    assert data.targets_of(rows).tolist() == rows[:, 1:].tolist()
    assert data.targets_of(rows[:0], (1, 2, 3)).shape == (0, 4)


def slow_pieces(turns, tokenizer, row_len):
    """The oracle of `chat.pieces`: (pieces, tokens of answers, tokens of them lost)."""
    head = turns[:1] if turns[0][0] == "system" else []
    body, groups = turns[len(head) :], [[]]
    pairs = [body[i : i + 2] for i in range(0, len(body) - len(body) % 2, 2)]
    size = lambda group: len(beside(head + sum(group, []), tokenizer)[0])
    for pair in pairs:
        if groups[-1] and size([*groups[-1], pair]) > row_len or size(groups[-1]) > row_len:
            groups.append([])
        groups[-1].append(pair)
    kept, total, lost = [], 0, 0
    for group in filter(None, groups):
        ids, counts = beside(head + sum(group, []), tokenizer)
        total, lost = total + sum(counts), lost + sum(counts[row_len:])
        if any(counts[:row_len]):
            kept.append(ids[1:row_len])
    return kept, total, lost


def test_pieces_end_between_exchanges_and_what_is_lost_is_counted(tokenizer):
    rng, cut = random.Random(1), 0
    for _ in range(1500):
        turns, row_len, notes = random_turns(rng, 6), rng.randint(4, 60), Counter()
        expected, total, lost = slow_pieces(turns, tokenizer, row_len)
        got = list(chat.pieces(turns, tokenizer, row_len, notes))
        assert got == expected, (turns, row_len)
        assert (notes[chat.ANSWERS], notes[chat.LOST]) == (total, lost)
        assert all(len(piece) < row_len and piece[0] == 1 and 2 in piece for piece in got)
        cut += len(got) > 1
    assert cut > 200
    assert chat.what_was_lost({chat.ANSWERS: 8, chat.LOST: 2}, 513)[0].startswith("note  25.0%")
    assert chat.what_was_lost({chat.ANSWERS: 8}, 513) == []


@pytest.mark.parametrize("buffer", [1, 7, 1000])
def test_whole_documents_are_packed_without_a_cut(buffer):
    rng = np.random.default_rng(buffer)
    docs = [rng.integers(1, 9, rng.integers(1, 20)).astype(np.uint16) for _ in range(500)]
    packed = data.pack(iter(docs), 20, 0, buffer, whole=True)
    rows, found = list(packed), []
    for row in rows:
        parts = np.split(row, np.flatnonzero(row == 0))
        found += [tuple(part[1:]) for part in parts if len(part) > 1]
        assert len(row) == 20 and row[0] == 0 and row[1] != 0
    assert Counter(found) == Counter(map(tuple, docs))
    stats = packed.stats
    assert packed.leftover == [] and stats.cuts == stats.splits == stats.dropped == 0
    assert len(rows) * 20 == stats.tokens + stats.bos == 500 * 0 + sum(map(len, docs)) + stats.bos
    if buffer == 1000:
        assert stats.bos - stats.documents < 60  # filler: hardly more than the last row's


# ---------------------------------------------------------------------------- prepared data


def write_chats(file: Path, n: int = 400, seed: int = 0) -> list[list[dict]]:
    """Conversations in a world of eight words, which a model of a few thousand weights learns:
    Say cat -> I say cat."""
    rng, said = random.Random(seed), []
    for _ in range(n):
        turns = [{"role": "system", "content": "Say it."}] if rng.random() < 0.2 else []
        for _ in range(rng.randint(1, 3)):
            words = " ".join(rng.choices("cat dog bird fish tree stone river cloud".split(), k=2))
            please = rng.choice(["", "", "Please: "])  # answers are of unequal shares
            turns.append({"role": "user", "content": f"{please}Say {words}"})
            turns.append({"role": "assistant", "content": f"I say {words}."})
        said.append(turns)
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in said))
    return said


CHATS = "--vocab_size 300 --row_len 65 --val_fraction 0.2 --workers 1".split()


@pytest.fixture(scope="module")
def chat_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder / "chats.jsonl")
    source = ["--source", f"files:{folder / 'chats.jsonl'}#messages"]
    done = run("prepare_data.py", "tiny", *source, *CHATS, "--data_dir", folder / "data")
    assert done.returncode == 0, done.stderr
    assert "padding" not in done.stdout and f"BOS tokens {chat.FILLERS[11:]}" in done.stdout
    return folder / "data"


def pieces_of(row: list[int]) -> list[tuple[int, ...]]:
    """A row, cut at its BOS tokens: each piece with its own."""
    starts = [i for i, t in enumerate(row) if t == 0]
    return [tuple(row[a:b]) for a, b in zip(starts, [*starts[1:], len(row)])]


def rows_of(manifest: Manifest, split: str) -> list[list[int]]:
    return [manifest.row(split, 0, r).tolist() for r in range(manifest.rows(split))]


def test_rows_on_disk_hold_whole_conversations_and_count_their_answers(chat_data):
    """Every row against the masks made beside the text; a conversation is on one side only."""
    manifest = Manifest.load(chat_data)
    tokenizer, known = Tokenizer.load(manifest.tokenizer_file()), {}
    assert manifest.marks == (1, 2, 3)
    for said in map(json.loads, (chat_data.parent / "chats.jsonl").read_text().splitlines()):
        ids, counts = beside(chat.read_turns(said["messages"]), tokenizer)
        known[tuple(ids)] = counts
    found = {"train": Counter(), "val": Counter()}
    for split, pieces in found.items():
        for row in rows_of(manifest, split):
            pieces.update(piece for piece in pieces_of(row) if len(piece) > 1)
            expected = [c for piece in pieces_of(row) for c in known.get(piece, [False])]
            assert counted(row) == expected[1:]
    assert (found["train"] + found["val"]).total() == 400 and len(found["val"]) > 20
    assert set(found["train"]) | set(found["val"]) == set(known)
    assert not set(found["train"]) & set(found["val"])


def documents(spec: str) -> tuple[list, Counter]:
    source, notes = sources.parse(spec), Counter()
    units, _ = sources.list_units(source)
    return [d for unit in units for d in sources.documents(source, unit, notes)], notes


def test_conversations_from_parquet_jsonl_and_a_split_of_the_hub(tmp_path, monkeypatch):
    import huggingface_hub
    import pyarrow
    import pyarrow.parquet

    said = write_chats(tmp_path / "a.jsonl", 5)
    turns = [chat.read_turns(messages) for messages in said]
    (tmp_path / "hub" / "data").mkdir(parents=True)
    table = pyarrow.table({"messages": said, "source": ["x"] * 5})
    for name in ("p.parquet", "hub/data/train_sft-00000-of-00001.parquet"):
        pyarrow.parquet.write_table(table, tmp_path / name)
    pyarrow.parquet.write_table(table[:1], tmp_path / "hub/data/train-00000-of-00001.parquet")
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    theirs = [[{"from": names[role], "value": text} for role, text in t] for t in turns]
    lines = [json.dumps({"conversations": t}) for t in theirs]
    (tmp_path / "b.jsonl").write_text("\n".join([*lines, '{"conversations": []}']))
    found = lambda *args, **kwargs: SimpleNamespace(sha=None)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", found)
    assert documents(f"files:{tmp_path}/a.jsonl#messages") == (turns, {})
    assert documents(f"files:{tmp_path}/p.parquet#messages") == (turns, {})
    assert documents(f"files:{tmp_path}/b.jsonl#conversations") == (turns, {"empty documents": 1})
    assert documents(f"hf:{tmp_path}/hub::train_sft#messages") == (turns, {})
    assert documents(f"hf:{tmp_path}/hub#messages")[0] == turns[:1]


def test_odd_records_are_counted_and_another_form_is_refused(tmp_path):
    file, good = tmp_path / "c.jsonl", [{"role": "user", "content": "q"}]
    tool = [*good, {"role": "tool", "content": "x"}]
    lines = [good, tool, tool, [*good, *good], [{"role": "user", "content": None}]]
    file.write_text("\n".join(json.dumps({"messages": m}) for m in lines))
    turns, notes = documents(f"files:{file}#messages")
    assert turns == [[("user", "q")]]
    assert notes == {
        "conversations left out, with a role other than system, user and assistant": 2,
        "conversations left out, with roles out of turn": 1,
        "conversations left out, with a part that is not text": 1,
    }
    file.write_text('{"messages": "just text", "dialog": [1]}')
    with pytest.raises(UsageError, match="c.jsonl: the field 'messages' holds not a list of turns"):
        documents(f"files:{file}#messages")
    with pytest.raises(UsageError, match="a conversation: into `messages`"):
        documents(f"files:{file}#dialog")


def test_conversations_of_the_standard_library():
    """From the code of a file alone: the same each time, and true to it."""
    code = (
        'def add(first, second, *rest):\n    """Return the sum of all numbers."""\n'
        'class Adder:\n    """An object that adds numbers for you all day."""\n'
        '    def add_all(self, numbers):\n        """Add all of these numbers up."""\n'
        'def _hidden(a):\n    """Nobody should know of this one."""\n'
    ) * 30
    told = [list(stdlib_chats.conversations(f"stdlib/m{i}.py", code.encode())) for i in range(80)]
    assert told[3] == list(stdlib_chats.conversations("stdlib/m3.py", code.encode()))
    assert len({len(t) for t in told}) == 1 and all(len(t) == 2 for t in told)  # not `for you`
    said = [chat.read_turns(turns) for conversations in told for turns in conversations]
    answers = {q: a for turns in said for (_, q), (_, a) in zip(turns[-2::-2], turns[::-2])}
    assert answers["Which arguments does add(first, second, *rest) take?"] == (
        "It takes first, second and *rest."
    )
    assert answers["What do I pass to add_all(numbers)?"] == "You pass numbers."
    assert answers["What does add do?"] == "Return the sum of all numbers."
    assert answers["Hi!"].startswith("Hi.") and answers["Thanks!"] == "You are welcome."
    assert not list(stdlib_chats.conversations("stdlib/test/x.py", code.encode()))
    assert not list(stdlib_chats.conversations("stdlib/x.py", b"def f(:"))
    source = sources.parse("chats:stdlib")
    assert source.conversations and source.installed and not source.remote
    assert sources.parse("talk=chats:stdlib").name == "talk"
    with pytest.raises(UsageError, match="chats:other.* is none of"):
        sources.parse("chats:other")


# ------------------------------------------------------------------------------- the step

LITTLE = dict(
    n_layer=2,
    n_embd=32,
    n_head=2,
    n_kv_head=2,
    head_dim=16,
    mlp_hidden=64,
    seq_len=64,
    vocab_size=300,
    extras=("key_offset", "value_embeds"),
    doc_mask=True,
)


def random_model(seed: int = 0, **config) -> GPT:
    torch.manual_seed(seed)
    gpt = GPT(GPTConfig(**LITTLE | config))
    gpt.init_weights()
    for p in gpt.parameters():  # all at work: none at 0
        torch.nn.init.normal_(p, std=0.15)
    return gpt


def test_packed_rows_have_the_loss_and_the_gradient_of_their_conversations(chat_data):
    """In fp64, against one conversation at a time. Without doc_mask they differ."""
    manifest = Manifest.load(chat_data)
    rows = torch.tensor(rows_of(manifest, "train")[:6])
    targets = torch.from_numpy(data.targets_of(rows.numpy(), manifest.marks))
    gpt = random_model().double()
    gpt.compute_dtype = torch.float64
    params = list(gpt.parameters())
    nats, n = torch.zeros((), dtype=torch.float64), 0
    for piece in (piece for row in rows.tolist() for piece in pieces_of(row) if len(piece) > 1):
        ids = torch.tensor([piece])
        counts = torch.tensor(counted(list(piece)))
        nats = nats + gpt(ids[:, :-1], ids[:, 1:], reduction="none")[0][counts].sum()
        n += int(counts.sum())
    apart = torch.autograd.grad(nats / n, params)
    assert n == int((targets >= 0).sum())
    differences = {}
    for doc_mask in (True, False):
        gpt.config = replace(gpt.config, doc_mask=doc_mask)
        loss = gpt(rows[:, :-1], targets) * targets.numel() / n
        packed = torch.autograd.grad(loss, params)
        loss = loss.detach()
        gap, size = (
            torch.cat([g.flatten() for g in grads]).norm()
            for grads in ([a - b for a, b in zip(packed, apart)], apart)
        )
        differences[doc_mask] = abs(float(loss - nats.detach() / n)), float(gap / size)
    assert differences[True][0] < 1e-6 and differences[True][1] < 1e-5  # the head is in fp32
    assert differences[False][0] > 1e-4 and differences[False][1] > 0.01


def test_bits_per_byte_are_of_the_answers(chat_data):
    manifest, gpt = Manifest.load(chat_data), random_model()
    size = torch.from_numpy(manifest.token_bytes())
    nats = text_nats = n = n_bytes = 0.0
    for row in rows_of(manifest, "val"):
        ids, counts = torch.tensor([row]), torch.tensor(counted(row))
        each = gpt(ids[:, :-1], ids[:, 1:], reduction="none")[0].detach()[counts]
        sizes = size[ids[0, 1:][counts]]
        nats, n = nats + each.sum().item(), n + len(each)
        text_nats += each[sizes > 0].sum().item()
        n_bytes += sizes.sum().item()
    for batch, rows in ((1, 0), (7, 9)):
        found = bits_per_byte(gpt, data.val_batches(manifest, batch), size, rows)
        assert found == pytest.approx((nats / n, text_nats / math.log(2) / n_bytes), rel=1e-5)


TUNE = (*SMALL, "--doc_mask", "--extras", "key_offset", "value_embeds", "--lr_scale", 0.1)
TUNE = (*map(str, TUNE), "--grad_clip", "0.5", "--eval_every", "6")


def here(folder, run_dir, *options) -> None:
    """train.py within this process."""
    train.main([*TUNE, "--data_dir", str(folder), "--run_dir", str(run_dir), *map(str, options)])


@pytest.fixture(scope="module")
def base(chat_data, tmp_path_factory) -> Path:
    """A run on text with the conversations' tokenizer: what tuning begins with."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text("the cat and the dog say: I say tree. " * 2000)
    options = ["--source", f"files:{folder}/text.txt", "--tokenizer", chat_data / "tokenizer.json"]
    done = run("prepare_data.py", "tiny", *options, *CHATS, "--data_dir", folder / "data")
    assert done.returncode == 0, done.stderr
    train.main(
        [
            *map(str, SMALL),
            "--extras",
            "key_offset",
            "value_embeds",
            "--data_dir",
            str(folder / "data"),
            "--run_dir",
            str(folder / "run"),
        ]
    )
    return folder


@pytest.fixture(scope="module")
def tuned(chat_data, base, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("tuned") / "run"
    here(chat_data, run_dir, "--init_from", base / "run", "--save_every", 4)
    return run_dir


def test_a_step_is_the_mean_over_the_answers(tuned, base, chat_data, tmp_path, capsys):
    """Losses, norms and validations; in micro-batches of 3 of 8 rows, one place is filled. The mean
    of the micro-batches' means is another number. --init_from takes a run, or its checkpoint."""
    newest = checkpoint.latest_valid(base / "run" / "checkpoints")
    here(chat_data, tmp_path / "run", "--init_from", newest, "--micro_batch", 3)
    assert f"weights from {newest}" in capsys.readouterr().out
    assert_same(tuned, tmp_path / "run")
    manifest = Manifest.load(chat_data)
    loader = data.RowLoader(manifest, seed=0, micro_batch=8)
    inputs, targets = loader.next_batch()
    loader.close()
    gpt, _ = eval.load_model(EvalConfig(checkpoint=str(newest), device="cpu", dtype="fp32"))
    gpt.config = replace(gpt.config, doc_mask=True)
    nats = gpt(inputs, targets, reduction="none").detach()
    mean = float(nats.sum() / (targets >= 0).sum())
    assert losses(tuned)[1] == pytest.approx(mean, rel=1e-5)
    means = [float(n.sum() / (t >= 0).sum()) for n, t in zip(nats, targets)]
    assert abs(sum(means) / 8 - mean) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("world, parallel", [(2, "ddp"), (3, "ddp"), (2, "fsdp"), (3, "fsdp")])
def test_any_number_of_ranks_tunes_alike(world, parallel, tuned, base, chat_data, tmp_path):
    args = [*TUNE, "--data_dir", chat_data, "--run_dir", tmp_path / "run", "--parallel", parallel]
    done = run("train.py", *args, "--init_from", base / "run", nproc=world)
    assert done.returncode == 0, done.stderr
    assert_same(tuned, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_killed_and_resumed_to_the_bit(world, base, chat_data, tmp_path):
    args = (*TUNE, "--init_from", base / "run", "--save_every", 2)
    start(chat_data, tmp_path / "whole", *args, world=world).end(0)
    slow = [("slow", 0.05)]
    cut = start(chat_data, tmp_path / "run", *args, world=world, spoil=slow)
    cut.until_step(7).kill().end()
    text = start(chat_data, tmp_path / "run", *args, world=world).end(0)
    assert "resumed at step" in text and "is not read: the run has its own checkpoint" in text
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    one, two = (parameters(tmp_path / name, 12) for name in ("run", "whole"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.slow
def test_compiled_it_takes_the_same_steps(tuned, base, chat_data, tmp_path):
    compiled = [x for x in TUNE if x != "--no_compile"]
    args = ["--data_dir", chat_data, "--run_dir", tmp_path / "run", "--init_from", base / "run"]
    done = run("train.py", *compiled, *args, timeout=300)
    assert done.returncode == 0 and "eager" not in done.stdout.replace("stays eager", "")
    assert losses(tmp_path / "run") == pytest.approx(losses(tuned), rel=1e-4)


@pytest.mark.slow
def test_text_and_conversations_in_one_run(base, chat_data, tmp_path):
    """No flag: of rows of text all targets count, of the others the answers."""
    source = (
        f"text=files:{base / 'text.txt'}",
        f"chats=files:{chat_data.parent}/chats.jsonl#messages",
    )
    options = ["--tokenizer", chat_data / "tokenizer.json", *CHATS, "--data_dir", tmp_path / "data"]
    done = run("prepare_data.py", "tiny", "--source", *source, *options)
    assert done.returncode == 0, done.stderr
    manifest, shares = Manifest.load(tmp_path / "data"), []
    for mixture in ({"text": 1}, {"chats": 1}, None):
        loader = data.RowLoader(manifest, seed=0, micro_batch=64, weights=mixture)
        _, targets = loader.next_batch()
        loader.close()
        shares.append(float((targets >= 0).float().mean()))
    assert shares[0] == 1 and 0.3 < shares[1] < 0.7 and shares[1] < shares[2] < 1
    here(tmp_path / "data", tmp_path / "run", "--mixture", "text=1", "chats=9")
    trainer = checkpoint.read_trainer(checkpoint.latest_valid(tmp_path / "run" / "checkpoints"))
    assert is_tuned(trainer)


# ---------------------------------------------------------------------------- talking with it


def talk_with(gpt: GPT, tokenizer, **options) -> instrument.Talk:
    return instrument.Talk(gpt, tokenizer, instrument.ChatConfig(**{"temperature": 0.0, **options}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_says_what_a_fresh_prefill_says(temperature, tokenizer):
    """25 turns, during which the oldest go again and again; some answers are stopped half-way. The
    same ids as from a conversation that is computed anew for every turn, and no forgotten token."""
    gpt = random_model(1, vocab_size=tokenizer.vocab_size, seq_len=128).eval()
    options = dict(max_new_tokens=12, temperature=temperature, system="the cat")
    kept, fresh = (talk_with(gpt, tokenizer, **options) for _ in range(2))
    rng, cuts, prefilled = random.Random(2), 0, []
    forward = gpt.forward
    gpt.forward = lambda idx, *a, **k: prefilled.append(idx.size(1)) or forward(idx, *a, **k)
    for turn in range(25):
        question = " ".join(
            rng.choices(["cat", "the mat", "<|end|>", "What?"], k=rng.randint(1, 5))
        )
        stop_at, said = rng.choice([None, None, 2]), {}
        for talk in (kept, fresh):
            fresh.cache, prefilled[:] = None, []
            drawn = []
            for i in talk.answer(question):
                drawn.append(i)
                talk.stopped = len(drawn) == stop_at
            said[talk] = drawn, talk.dropped, talk.exchanges[-1][1]
            if talk is kept and not talk.dropped and turn:
                asked = len(chat.encode([("user", question)], tokenizer, reply=True))
                assert prefilled[0] <= asked + 2  # its own, and the last id drawn with its <|end|>
        assert said[kept] == said[fresh] and len(said[kept][0]) <= 12
        ids = kept.ids("")
        assert ids[0] == 0 and ids.count(2) == len(kept.exchanges) + 1
        assert ids[2 : 2 + len(e := tokenizer.encode("the cat\n\n"))][: len(e) - 1] == e[:-1]
        cuts += kept.dropped > 0
    assert cuts > 5 and kept.exchanges[-1][1][-1] == 3


def test_a_question_that_cannot_fit_leaves_the_conversation_as_it_was(tokenizer):
    talk = talk_with(random_model(vocab_size=tokenizer.vocab_size).eval(), tokenizer)
    assert talk.most == 32  # half of the positions, of the 256 asked for
    list(talk.answer("cat"))
    before = [*talk.exchanges]
    with pytest.raises(instrument.TooLongError, match="of 32 tokens; ask in fewer words"):
        list(talk.answer("What is a mat? " * 20))
    assert talk.exchanges == before
    assert len(list(talk.answer("cat"))) <= 32


def test_an_interrupted_turn_leaves_a_conversation_that_goes_on(tokenizer):
    """The caller leaves in the middle, or a forward pass fails: the cache is computed anew."""
    gpt = random_model(vocab_size=tokenizer.vocab_size, seq_len=256).eval()
    talk = talk_with(gpt, tokenizer, max_new_tokens=20)
    talk.stops = (0,)  # nothing ends an answer before its time
    talk.stops += (1, 2, 3)
    stream = talk.answer("cat")
    drawn = [next(stream)]
    stream.close()
    assert talk.cache is None and talk.exchanges == [("cat", [*drawn, 3])]
    assert list(talk.answer("mat")) and talk.cache is not None


@pytest.fixture(scope="module")
def answering(chat_data, tmp_path_factory) -> Path:
    """A model that was trained on conversations until it answers."""
    run_dir = tmp_path_factory.mktemp("answering") / "run"
    more = ["--steps", 130, "--eval_every", 0, "--lr_scale", 1, "--log_every", 0, "--dtype", "fp32"]
    here(chat_data, run_dir, *more)
    return run_dir


def test_a_conversation_in_the_terminal(answering, base):
    """Questions come from a pipe; a base model refuses, and names the way out."""
    args = ["chat", answering, "--temperature", 0, "--device", "cpu"]
    ask = "Say cat dog\n\n  \nSay river tree\n" + "Say fish " * 60 + "\nSay bird bird\n" * 6
    done = subprocess.run(
        command("eval.py", args),
        input=ask,
        text=True,
        capture_output=True,
        cwd=ROOT,
        env=environment(),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "> Say cat dog\nI say cat dog.\n" in done.stdout
    assert "> Say river tree\nI say river tree.\n" in done.stdout
    assert "of 32 tokens; ask in fewer words]" in done.stdout
    assert re.search(r"> Say bird bird\n\[forgotten, as it no longer fits: .*, \d of", done.stdout)
    assert done.stdout.count("I say bird bird.") >= 4
    with pytest.raises(UsageError, match="was not tuned on conversations.*docs/chat.md"):
        eval.main(["chat", str(base / "run")])


def test_ctrl_c_ends_the_answer_and_at_the_prompt_the_program(answering):
    """In a terminal of its own. The model is slow, so that the answer is still on its way."""
    import pty

    code = (
        "import sys, time, eval, model\n"
        "forward = model.GPT.forward\n"
        "def slow(*a, **k):\n    time.sleep(0.3)\n    return forward(*a, **k)\n"
        "model.GPT.forward = slow\n"
        "from machinery import cli; cli.run(eval.main)\n"
    )
    options = ["chat", str(answering), "--temperature", "0", "--device", "cpu"]
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options],
        cwd=ROOT,
        env=environment(),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    seen = ""

    def until(words: str, after: int = 0) -> None:
        nonlocal seen
        deadline = time.monotonic() + 60
        while words not in seen[after:]:
            assert time.monotonic() < deadline and process.poll() is None, seen
            if select.select([leader], [], [], 0.2)[0]:
                seen += os.read(leader, 4096).decode(errors="replace")

    try:
        until("> ")
        os.write(leader, b"Say cat dog\n")
        until("I")
        os.kill(process.pid, signal.SIGINT)
        until("[stopped]")
        until("> ", after=seen.index("[stopped]"))
        here = len(seen)
        os.write(leader, b"Say fish fish\n")
        until("I say", after=here)
        until("> ", after=seen.index("I say", here))
        assert "I say cat dog." not in seen
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_sample_choice_and_tournament_use_the_template(answering, base, tmp_path, capsys):
    model = ["--device", "cpu"]
    eval.main(["sample", str(answering), "--prompt", "Say dog dog", "--temperature", "0", *model])
    out = capsys.readouterr().out
    assert "Say dog dog\nI say dog dog.\n" in out and "each prompt is a question" in out
    eval.main(["sample", str(base / "run"), "--prompt", "the cat", "--n", "2", *model])
    assert "is a question" not in capsys.readouterr().out
    words = "cat dog bird fish tree stone river cloud".split()
    asked = [
        {
            "query": f"Say {a} {b}",
            "choices": [f"I say {a} {c}." for c in words if c != a],
            "gold": [c for c in words if c != a].index(b),
        }
        for a in words
        for b in words
        if a != b
    ]
    file = tmp_path / "asked.jsonl"
    file.write_text("\n".join(map(json.dumps, asked)))
    eval.main(["choice", str(answering), "--task", str(file), "--mode", "answer", *model])
    out = capsys.readouterr().out
    assert "each question is a user's" in out
    accuracy = float(re.search(r"sum +([\d.]+)", out)[1])
    assert accuracy > 0.9
    run_dir = ["--run_dir", str(answering), "--n_prompts", "9", "--max_new_tokens", "16"]
    found = checkpoint.checkpoints(answering / "checkpoints")
    eval.main(
        ["tournament", *run_dir, "--players", str(found[-1]), *model, "--judge", str(found[0])]
    )
    report = json.loads((answering / "tournament.json").read_text())
    assert len(report["prompts"]) == 9 and all("Say" in prompt for prompt in report["prompts"])
    assert all(text.startswith("I say") for text in report["completions"]["human text"])
    assert not any("<|" in text for texts in report["completions"].values() for text in texts)
    with pytest.raises(UsageError, match="leave --prompts out"):
        eval.main(["tournament", *run_dir, "--prompts", "cat", *model])
    with pytest.raises(UsageError, match="was tuned on conversations, but .* holds text"):
        eval.main(["tournament", *run_dir, "--data_dir", str(base / "data"), *model])


@pytest.mark.slow
def test_a_run_a_checkpoint_and_an_export_say_whether_they_were_tuned(answering, base, tmp_path):
    import export

    for run_dir, expected in ((answering, True), (base / "run", False)):
        out = tmp_path / run_dir.parent.name
        export.main([str(run_dir), "--out", str(out)])
        newest = checkpoint.latest_valid(run_dir / "checkpoints")
        for word in (run_dir, newest, out):
            config = EvalConfig(**find_model(str(word)))
            assert is_tuned(eval.load_model(replace(config, device="cpu"))[1]) == expected
