"""export.py, and hf/mapping.py, parity.py, template.py and modeling_nano2049.py: transformers
computes our numbers with an exported folder, makes our ids of conversations, and answers as ours
does; the folder can be read back, and a wrong one is never left."""

import contextlib
import json
import os
import random
import re
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import flip, read_json, write_json
from safetensors import SafetensorError
from torch.testing import assert_close

from config import EXTRAS, GPTConfig, UsageError
from hf import card, export, mapping, parity, template
from machinery import cli, disk
from machinery import trained as models
from machinery.errors import CheckpointError, DataError, ParityError, StorageError
from machinery.formats import Provenance
from machinery.shards import Manifest
from machinery.trained import EvalConfig, Trained
from model import GPT
from preparation import chat
from tokenizer import Tokenizer

os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp())
transformers = pytest.importorskip("transformers")

BASE = GPTConfig(
    n_layer=2, n_head=4, n_kv_head=4, head_dim=16, n_embd=64, mlp_hidden=96,
    seq_len=96, vocab_size=331, rope_theta=54_321.0,
)  # fmt: skip
STOCK = dict(mlp="swiglu", logit_softcap=0.0)
LLAMA = STOCK | dict(qk_norm=False, embed_norm=False, tie_embeddings=True)
CASES = {
    "grouped queries, another head_dim": (mapping.OWN, dict(n_kv_head=2, head_dim=24)),
    "d12": (mapping.OWN, dict(extras=("key_offset", "value_embeds"), doc_mask=True)),
    "smol": ("Llama", LLAMA | dict(n_kv_head=2)),
    "biatron": ("Llama", LLAMA | dict(tie_embeddings=False, n_kv_head=1)),
    "llama of an odd width": ("SmolLM3", LLAMA | dict(n_embd=66)),
    "NoPE on every 2nd layer": ("SmolLM3", LLAMA | dict(nope_every=2, n_kv_head=2, n_layer=4)),
    "norms of q and k": ("Qwen3", LLAMA | dict(qk_norm=True, head_dim=24)),
    "and their gains": ("Qwen3", STOCK | dict(qk_gain=True, n_kv_head=2, head_dim=24)),
    "gains alone": (mapping.OWN, LLAMA | dict(qk_gain=True)),
    "tiny-stock": ("Qwen3", STOCK | dict(n_kv_head=2)),
    "llama with a norm that folds": ("Llama", STOCK | dict(qk_norm=False)),
    "a norm that cannot fold": (mapping.OWN, STOCK | dict(tie_embeddings=True)),
    "norms and NoPE": (mapping.OWN, STOCK | dict(nope_every=2)),
    "all extras, grouped queries": (mapping.OWN, dict(extras=EXTRAS, qk_gain=True, n_kv_head=2)),
    **{name: (mapping.OWN, dict(extras=(name,))) for name in EXTRAS},
}


@pytest.fixture(scope="module")
def tokenizer():
    words = [f"def name_{i}(x):\n    return x + {i}  # caf\u00e9\n" for i in range(200)]
    return Tokenizer.train(words, BASE.vocab_size)


def build(**changes) -> GPT:
    """A model with random weights behind which nothing hides."""
    model = GPT(replace(BASE, **changes))
    model.init_weights()
    parity.set_unit_weights(model, seed=1)
    return model.eval()


def provenance_of(model: GPT, **identity) -> Provenance:
    return Provenance(step=7, tokens=7000, identity=identity, model=model.config)


@pytest.fixture
def export_model(tokenizer, tmp_path, monkeypatch):
    """export.export for a model in memory, without a run on disk."""
    path = tmp_path / "checkpoints" / "step_00000007"
    path.mkdir(parents=True)
    (path / "MANIFEST.json").write_text("{}")

    def export_model(model, **identity):
        loaded = Trained(EvalConfig(), path, provenance_of(model, **identity), model, tokenizer)
        monkeypatch.setattr(models, "load_model", lambda *_: loaded)
        return export.export(export.ExportConfig(out=str(tmp_path / "out")))

    return export_model


def open_in_transformers(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def ids_of_two() -> torch.Tensor:
    """(2, 60): two texts, with BOS in front."""
    torch.manual_seed(2)
    ids = torch.randint(1, BASE.vocab_size, (2, 60))
    ids[:, 0] = 0
    return ids


def assert_near(found, expected):
    assert_close(found, expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_transformers_computes_the_same_and_the_folder_can_be_read_back(case, export_model, capsys):
    name, changes = CASES[case]
    model = build(**changes)  # whose weights the export spoils
    ours = build(**changes)
    folder = export_model(model)
    assert f'class_name": "{name}"' in (folder / "config.json").read_text()
    printed = capsys.readouterr().out
    assert ("modeling_nano2049.py" if name == mapping.OWN else f"the stock {name}") in printed

    ids = ids_of_two()
    logits = ours(ids)
    back, record = mapping.load_exported(folder)
    assert (record.step, record.tokens) == (7, 7000)
    assert_near(back(ids), logits)
    # In a stock class, the norm after the embedding went into the table.
    assert back.config == replace(ours.config, embed_norm=back.config.embed_norm)

    theirs = open_in_transformers(folder)  # the comparison once more, without parity.py
    assert_near(theirs(ids).logits, logits)


@pytest.mark.parametrize("extras", [EXTRAS, ("key_offset",)])
@torch.no_grad()
def test_the_own_file_keeps_what_came_before_in_the_cache(extras, export_model):
    """In chunks, taken back, by beams, and beside a longer text, padded on the left."""
    changes = dict(extras=extras, n_layer=3)
    ours = build(**changes)
    theirs = open_in_transformers(export_model(build(**changes)))
    ids = ids_of_two()
    ids[1, 30] = 0
    expected = ours(ids)
    cache = transformers.DynamicCache(config=theirs.config)
    ask = lambda part: theirs(part, past_key_values=cache, use_cache=True).logits
    parts = [ask(part) for part in ids.split([17, 1, 22, 1, 19], dim=1)]
    assert_near(torch.cat(parts, 1), expected)
    cache.crop(-23)  # as after a guess that was refused
    assert_near(ask(ids[:, 37:]), expected[:, 37:])

    how = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    beams = how | dict(num_beams=4, attention_mask=torch.ones(2, 20))
    found = [theirs.generate(ids[:, :20], use_cache=on, **beams) for on in (True, False)]
    assert torch.equal(*found)

    both = ids[:, :20].clone()
    both[1, :8] = 0  # padding, before 12 tokens without BOS
    mask = torch.ones_like(both)
    mask[1, :8] = 0
    found = theirs.generate(both, attention_mask=mask, **how)[:, 20:]
    alone = [both[:1], both[1:, 8:]]
    expected_ids = [ours.generate(text, 12, temperature=0)[:, -12:] for text in alone]
    assert torch.equal(found, torch.cat(expected_ids))

    loss = theirs(ids, labels=ids).loss  # for those who finetune it
    assert loss.item() == pytest.approx(ours(ids[:, :-1], ids[:, 1:]).item(), abs=1e-4)
    theirs.set_attn_implementation("eager")  # which some tools ask for
    assert_near(theirs(ids).logits, expected)


def test_what_the_own_file_does_not_read_is_an_error(export_model):
    """A tensor or a cache under another name would vanish, and the text would be wrong."""
    theirs = open_in_transformers(export_model(build(extras=EXTRAS, n_layer=3)))
    ids = torch.ones(1, 4, dtype=torch.long)
    for value in (torch.ones(1, 4), transformers.DynamicCache(config=theirs.config)):
        with pytest.raises(TypeError, match="past_of_the_future"):
            theirs(ids, past_of_the_future=value)


def edit_json(file: str, **changes):
    """Lets write_text, which all JSON goes through, change a file on its way."""

    def spoil(monkeypatch):
        honest = disk.write_text

        def write(path, text):
            honest(path, json.dumps(json.loads(text) | changes) if path.name == file else text)

        monkeypatch.setattr(disk, "write_text", write)

    return spoil


def edit_names(monkeypatch, edit):
    honest = mapping.names_in
    monkeypatch.setattr(mapping, "names_in", lambda c, name: edit(honest(c, name)))


def exchanged(a: str, b: str):
    """An edit of the names: a_proj and b_proj for each other."""
    swap = {a: b, b: a}
    pattern = rf"\b({a}|{b})(?=_proj)"
    return lambda names: {k: re.sub(pattern, lambda m: swap[m[0]], v) for k, v in names.items()}


def windowed(q, k, v, mask):
    """model.attend, but each token sees itself and the 599 before it alone."""
    T = q.size(2)
    S = k.size(2)
    near = torch.ones(T, S, dtype=torch.bool).tril(S - T).triu(S - T - 599)
    return F.scaled_dot_product_attention(q, k, v, near, enable_gqa=True)


TOKENIZER = "tokenizer.json"
OPTIONS = "tokenizer_config.json"
STOCK_MUTANTS = {  # name -> (changes of the model, what is spoilt, what the refusal says)
    "k and v exchanged": (LLAMA, lambda m: edit_names(m, exchanged("k", "v")), "logits"),
    "a weight left out": (LLAMA, lambda m: m.setattr(mapping, "NORMS", {}), "missing_keys"),
    "a table that is not folded": (
        STOCK,
        lambda m: m.setattr(mapping, "rms_norm", lambda w: w),
        "logits",
    ),
    "a norm of twos": (
        STOCK,
        lambda m: m.setattr(torch, "ones", lambda *n: torch.full(n, 2.0)),
        "logits",
    ),
    "a window that only long texts show": (
        dict(seq_len=1024),
        lambda m: m.setattr("model.attend", windowed),
        "logits",
    ),
    "no BOS": ({}, edit_json(TOKENIZER, post_processor=None), "tokenizer encodes"),
    "special tokens parsed": ({}, edit_json(OPTIONS, split_special_tokens=False), r"'<\|bos\|>'"),
    "another end of text": ({}, edit_json(OPTIONS, eos_token="<|end|>"), r"\(331, 0, 3, 0\)"),
}
OWN_MUTANTS = {  # name -> (code of the own file, in its place, what the refusal says)
    "what came before lost in the cache": (
        "if cache is None:\n        return x",
        "if True:\n        return x",
        "greedy text differs from its token 6 of 32 on",
    ),
    "keys over the border": (".bool() & (ids != self.config.bos_token_id)", ".bool()", "logits"),
    "keys from before the first token": ("slow & has_previous[..., None, None]", "slow", "logits"),
    "the fast half of the keys": (">= D // 4", "< D // 4", "logits"),
    "the other layers' value embeddings": ("% 2 == 0", "% 2 == 1", "does not load"),
}


def refused(export_model, model, tmp_path, words):
    with pytest.raises(ParityError, match=words) as caught:
        export_model(model)
    assert caught.value.exit_code == 7
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("mutant", STOCK_MUTANTS)
def test_a_wrong_export_is_refused(mutant, export_model, tmp_path, monkeypatch):
    changes, spoil, words = STOCK_MUTANTS[mutant]
    spoil(monkeypatch)
    refused(export_model, build(**changes), tmp_path, words)


@pytest.mark.parametrize("mutant", OWN_MUTANTS)
def test_a_wrong_modelling_file_is_refused(mutant, export_model, tmp_path, monkeypatch):
    old, new, words = OWN_MUTANTS[mutant]
    text = mapping.OWN_FILE.read_text()
    assert old in text
    file = tmp_path / "modeling_nano2049.py"
    file.write_text(text.replace(old, new))
    monkeypatch.setattr(mapping, "OWN_FILE", file)
    refused(export_model, build(extras=EXTRAS, n_layer=3), tmp_path, words)


def test_an_untrained_model_passes_and_hides_nothing(export_model, tmp_path, monkeypatch):
    """Its logits are tiny, and `down` is zero: gate and up exchanged would change no logit."""
    model = GPT(replace(BASE, **LLAMA | dict(tie_embeddings=False)))
    model.init_weights()
    shutil.rmtree(export_model(model.eval()))
    edit_names(monkeypatch, exchanged("gate", "up"))
    model.init_weights()
    refused(export_model, model, tmp_path, "at random weights")


def test_the_folder(export_model):
    folder = export_model(build(**LLAMA))
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert {p.name for p in folder.iterdir()} == names | {TOKENIZER, OPTIONS}  # and nothing else
    tree = read_json(folder / "config.json")
    assert tree["rope_theta"] == tree["rope_parameters"]["rope_theta"]  # for transformers 4
    assert (folder / "model.safetensors").stat().st_mode & 0o444 == 0o444
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    batch = theirs(["def", "def name_1(x)"], padding=True)  # on the left, as generation needs it
    assert batch["attention_mask"][0][0] == 0 and batch["input_ids"][0][-1] != 0
    assert theirs.chat_template is None and theirs.split_special_tokens  # it is not tuned
    card = (folder / "README.md").read_text()
    assert "7 steps, 7,000 tokens" in card and "it does not answer" in card


def test_what_was_exported_before_its_class_was_known_is_read(export_model, monkeypatch):
    """Shapes of Qwen3 and SmolLM3 brought our own file once."""
    changes = STOCK | dict(n_kv_head=2)
    with monkeypatch.context() as before:
        before.setattr(mapping, "choose_class", lambda c: (mapping.OWN, "it was so"))
        folder = export_model(build(**changes))
    tree = read_json(folder / "config.json")
    del tree["qk_gain"], tree["nano2049"]["model"]["qk_gain"]  # nor did a file have gains
    write_json(folder / "config.json", tree)
    back, record = mapping.load_exported(folder)
    assert record.class_name == mapping.OWN and back.config.embed_norm


def test_reading_back_refuses_what_is_not_an_export(export_model, tmp_path):
    with pytest.raises(ValueError, match="was not written by export.py") as refused:
        mapping.load_exported(tmp_path)
    assert cli.exit_code(refused.value) == 2  # one sentence, no traceback
    folder = export_model(build())
    for name in ("model.safetensors", "tokenizer.json"):
        flip(folder / name, at=-3)
        with pytest.raises(CheckpointError, match=f"{name} is not as it was exported"):
            mapping.load_exported(folder)
        flip(folder / name, at=-3)
    mapping.load_exported(folder)
    file = folder / "config.json"
    write_json(file, read_json(file) | dict(rope_theta=54_322.0))  # for transformers, not for us
    with pytest.raises(CheckpointError, match="config.json is not as it was exported"):
        mapping.load_exported(folder)


FORGED = {  # name -> a change of what config.json says of the model
    "a name outside": lambda facts: facts["files"].update({"../../secret": "0" * 64}),
    "no hash of the weights": lambda facts: facts["files"].clear(),
    "more layers": lambda facts: facts["model"].update(n_layer=3),
    "a width that no machine holds": lambda facts: facts["model"].update(n_embd=1 << 20),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_config_json_is_an_error_before_anything_is_built(case, export_model):
    """Also if it says the same to transformers: whoever made the folder wrote that too."""
    file = export_model(build(**LLAMA)) / "config.json"
    tree = read_json(file)
    FORGED[case](tree["nano2049"])
    with contextlib.suppress(TypeError, UsageError):
        tree |= mapping.config_json(GPTConfig(**tree["nano2049"]["model"]), "Llama")
    write_json(file, tree)
    with pytest.raises((UsageError, DataError, CheckpointError)):
        mapping.load_exported(file.parent)


def test_the_program_on_a_trained_model(trained_run, small_data, tmp_path, capsys):
    """Its card, and the three lines that it prints, with greedy text."""
    out = tmp_path / "out"
    assert export.main([str(trained_run), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    card = (out / "README.md").read_text()
    n = Manifest.load(small_data).rows("val")
    assert re.search(rf"\| validation \| [\d.]+ bits per byte, on {n} rows \|", card)
    assert str(out) not in card  # a path of this machine
    assert "| text | `files:" in card

    usage = printed.partition("in Python:\n")[2].strip()
    assert usage.replace(str(out), "out") in card and len(usage.splitlines()) == 3
    exec(usage.replace("max_new_tokens=80", "max_new_tokens=16, do_sample=False"), {})
    tokenizer = Tokenizer.load(small_data / "tokenizer.json")
    model, _ = mapping.load_exported(out)
    ids = torch.tensor([[0, *tokenizer.encode("The largest planet is")]])
    new = model.generate(ids, 16, temperature=0, stop_id=0)[0, 1:].tolist()
    assert capsys.readouterr().out == tokenizer.decode(i for i in new if i) + "\n"


def test_a_run_is_exported_without_its_data_folder(trained_run, tmp_path, monkeypatch):
    """And from an earlier checkpoint than that of the loss on all rows."""

    def gone(loaded):
        raise DataError("it is gone")

    monkeypatch.setattr(Trained, "data", property(gone))
    earlier = trained_run / "checkpoints" / "step_00000004"
    assert export.main([str(earlier), "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| text | not known |" in card and "| validation | not known |" in card


def test_names_are_quoted_for_python():
    """In the card's lines: a folder whose name would run something."""
    odd = 'o"); print(1); ("$(touch planted) \n# x'
    code = card.usage(odd, "a prompt", own=False, tuned=False)
    assert repr(odd) in code and len(code.splitlines()) == 3


def test_a_full_disk_leaves_nothing(full_disk, trained_run, tmp_path, monkeypatch):
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(export, "save_file", mock.Mock(side_effect=full))
    args = [str(trained_run), "--out", str(tmp_path / "out")]
    with pytest.raises(StorageError, match="could not be written: .*No space left"):
        export.main(args)
    full_disk(1000)
    with pytest.raises(StorageError, match="0.001 MB are free.*; give another --out"):
        export.main(args)
    assert not list(tmp_path.iterdir())


def test_an_old_transformers_or_none_is_named(monkeypatch):
    monkeypatch.setattr(parity, "version", lambda name: "5.22.2")
    with pytest.raises(UsageError, match="5.22.2"):
        export.main([])
    monkeypatch.setattr(parity, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="requirements-eval.txt"):
        export.main([])


# -------------------------------------------------------------------------------- conversations
END = 3


PIECES = (" ", "\n", "Hello", " there", "a\n\nb ", "café 你好", "{{ x }}", "<|assis", "\\", "\t")


def as_messages(turns) -> list[dict]:
    return [dict(role=role, content=text) for role, text in turns]


@pytest.fixture
def theirs(tokenizer, tmp_path):
    export.write_tokenizer(tokenizer, tmp_path, 96, tuned=True)
    return transformers.AutoTokenizer.from_pretrained(tmp_path)


def test_what_counts_is_what_transformers_masks(theirs, tokenizer):
    """The assistant mask of the template covers the answers and the <|end|> of each; ids of up to 5
    exchanges are ours."""
    rng = random.Random(0)
    how = dict(return_assistant_tokens_mask=True, return_dict=True)
    for _ in range(40):
        roles = ["system"] * (rng.random() < 1 / 3) + ["user", "assistant"] * rng.randint(1, 5)
        # An empty answer has no character to mask but that of <|end|>.
        turns = [(role, "".join(rng.choices(PIECES, k=rng.randint(1, 4)))) for role in roles]
        out = theirs.apply_chat_template(as_messages(turns), **how)
        assert out["input_ids"] == [0, *chat.encode(turns, tokenizer, False)]
        speaks = False
        expected = []
        for i in out["input_ids"]:
            expected.append(int(speaks))
            speaks = (speaks or i == 2) and i != END
        assert out["assistant_masks"] == expected


def test_parts_that_are_text_are_joined_and_others_refused(theirs):
    turns = [("system", "Be <|end|> brief."), ("user", "What is it? \n"), ("assistant", "A pen")]
    how = dict(return_dict=False) | template.TYPED
    expected = theirs.apply_chat_template(as_messages(turns), **how)
    for form in (lambda text: dict(type="text", text=text), lambda text: text):
        parts = [(role, [*map(form, re.split("(?<= )", text))]) for role, text in turns]
        assert theirs.apply_chat_template(as_messages(parts), **how) == expected
    image = dict(type="image", url="a.png")
    for odd in (image, ["a", image], None, 5, [dict(text=5)]):
        with pytest.raises(Exception, match="a content or a part of one is not text"):
            theirs.apply_chat_template(as_messages([("user", odd)]))
    for roles in ("assistant", "user user", "user system", "user tool"):
        with pytest.raises(Exception, match="roles out of turn"):
            theirs.apply_chat_template(as_messages((role, "x") for role in roles.split()))


FIRST = [("system", "Answer briefly."), ("user", "What is it?")]


def ending(tokenizer) -> GPT:
    """A model whose answer to FIRST ends: <|end|> takes the place of its sixth token."""
    extras = ("key_offset", "value_embeds")
    model = build(tie_embeddings=False, extras=extras, seq_len=256)
    ids = torch.tensor([[0, *chat.encode(FIRST, tokenizer, reply=True)]])
    sixth = model.generate(ids, 6, temperature=0)[0, -1].item()
    with torch.no_grad():
        model.head.weight[END] = 1.3 * model.head.weight[sixth]
    return model


def test_the_pipeline_answers_as_ours(export_model, tokenizer, capsys):
    ours = ending(tokenizer)
    folder = export_model(ending(tokenizer), conversations=True)
    printed = capsys.readouterr().out
    assert re.search(r"and [1-9]\d conversations", printed)  # compared, too
    transformers.set_seed(3)
    exec(printed.partition("in Python:\n")[2], {})
    said = capsys.readouterr().out
    assert said.strip() and "<|" not in said
    tree = read_json(folder / "generation_config.json")
    assert (tree["bos_token_id"], tree["eos_token_id"], tree["pad_token_id"]) == (0, [END, 0], 0)
    assert mapping.load_exported(folder)[1].tuned

    generate = transformers.pipeline("text-generation", str(folder), trust_remote_code=True)
    how = dict(max_new_tokens=20, do_sample=False, tokenizer_encode_kwargs=template.TYPED)
    turns = FIRST[:1]
    lengths = []
    for question in (FIRST[1][1], "Where is it? <|assistant|>", "name_1(x)", ""):
        turns.append(("user", question))
        ids = torch.tensor([[0, *chat.encode(turns, tokenizer, reply=True)]])
        new = ours.generate(ids, 20, temperature=0, stop_id=END)[0, ids.size(1) :].tolist()
        mine = tokenizer.decode(i for i in new if i != END)
        (out,) = generate(as_messages(turns), **how)
        assert out["generated_text"][-1] == dict(role="assistant", content=mine), question
        lengths.append(len(tokenizer.encode(mine)))
        turns.append(("assistant", mine))
    assert min(lengths) < 20  # an answer ended by itself


def test_a_wrong_template_is_refused(export_model, tmp_path, monkeypatch):
    """One that puts the system text in front of every question."""
    wrong = template.TEMPLATE.replace("{% set ns.before = '' %}", "")
    monkeypatch.setattr(template, "TEMPLATE", wrong)
    tuned = partial(export_model, conversations=True)
    refused(tuned, build(), tmp_path, "the chat template encodes")
