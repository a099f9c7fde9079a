"""The model of yours.py as one page that any browser opens: `python course/yours.py --chat`.

Your weights go into the GPT of model.py, which is lesson 5's with more options, and your merges
into a tokenizer.json. Both are compared with your own functions; then instruments/pages/page.py
writes the page, as it does for any model of the project.
"""

import lesson
import spine
import torch
from spine import BASE, BLOCKS, END, HEADS, T, WIDTH
from tokenizers.models import BPE

from config import GPTConfig
from instruments.pages import page
from machinery.formats import Provenance
from machinery.trained import EvalConfig, Trained
from model import GPT
from tokenizer import SPECIAL_TOKENS, Tokenizer, byte_symbols, untrained

ASKED = ["Who are you?", spine.NAME_IT, "Which arguments does join(a, b) take?"]
SCORED = 128  # rows of the exam, on which the cost of rounding is measured


def tokenizer_of(tokens: spine.Tokens) -> Tokenizer:
    """The special tokens are ids 0 to 3, as in exercise 14; behind them the vocabulary."""
    symbols = {byte: symbol for symbol, byte in byte_symbols().items()}
    written = lambda token: "".join(symbols[byte] for byte in token)
    names = [*SPECIAL_TOKENS, *map(written, tokens.vocabulary)]
    vocabulary = {name: i for i, name in enumerate(names)}
    bpe = untrained(spine.WORDS, nfc=False)
    bpe.model = BPE(vocabulary, [(written(a), written(b)) for a, b in tokens.merges])
    bpe.add_special_tokens([*SPECIAL_TOKENS])
    return Tokenizer(bpe.to_str())


@torch.no_grad()
def gpt_of(model: spine.Chat) -> GPT:
    """model.py's GPT with these weights."""
    weights = model.weights
    config = GPTConfig(
        seq_len=T,
        vocab_size=len(weights["embed"]),
        n_layer=BLOCKS,
        n_head=HEADS,
        n_kv_head=HEADS,
        head_dim=WIDTH // HEADS,
        n_embd=WIDTH,
        mlp_hidden=4 * WIDTH,
        qk_norm=False,
        embed_norm=False,
        logit_softcap=0.0,
        rope_theta=BASE,
        nope_every=0 if "positions" in model.have else 1,
    )
    gpt = GPT(config)
    gpt.init_weights()
    state = gpt.state_dict()
    for name, weight in weights.items():
        layer, _, kind = name.rpartition(".")
        part = "mlp" if kind in ("up", "down") else "attn"
        name = f"blocks.{layer}.{part}.{kind}" if layer else kind
        state[f"{name}.weight"][: len(weight)] = weight
        if kind == "q" and "attention" not in model.have:  # the average of the past: all scores 0
            state[f"{name}.weight"].zero_()
    return gpt.eval()


@torch.no_grad()
def write(model: spine.Chat, name: str, about: str) -> str | None:
    """course/out/yours_chat.html; or why there is none."""
    if "GPT" not in model.have:
        return "the page runs lesson 5's GPT: write yours first, course/exercises/ex05.py"
    tokenizer = tokenizer_of(model.tokens)
    gpt = gpt_of(model)
    text = "def answer(question):\n    return 42  # Größe \u2028 汉\n"
    ids = torch.tensor([tokenizer.encode(text)[:T]])
    far = float((gpt(ids) - model.scores(ids)).abs().max())
    if tokenizer.encode(text) != model.encode(text) or far > 1e-3:
        return f"no page: model.py computes other scores than your parts do, by up to {far:.3g}"
    _, held = spine.exam()
    exam = torch.from_numpy(model.tokens.encode(held)) + END + 1
    rows = exam[: SCORED * T + 1].unfold(0, T + 1, T)
    loss = lambda loaded: float(loaded.model(rows[:, :-1], rows[:, 1:]))
    loaded = Trained(
        config=EvalConfig(),
        path=lesson.OUT,
        provenance=Provenance(
            step=0, tokens=0, identity=dict(conversations=True), model=gpt.config
        ),
        model=gpt,
        own_tokenizer=tokenizer,
        about=about,
    )
    page.write(
        loaded,
        str(lesson.OUT / "yours_chat.html"),
        half=False,
        loss=loss,
        name=f"{name}, a toy GPT that I wrote",
        prompts=ASKED,
    )
