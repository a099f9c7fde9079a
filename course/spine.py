"""The trainer that yours.py runs: the parts of the course's spine, and what joins them.

Each part is a function of an exercise, yours or the reference. What is not solved is replaced by
the plain thing that it replaces. The last model is kept in course/out/yours.pt. Shapes: B rows, T =
64 positions, width 64, 3 blocks, 4 heads; the vocabulary is 256 bytes, with a tokenizer 512 tokens,
with packing BOS besides.
"""

import hashlib
import mmap
import random
import re
import time
import traceback
from collections import Counter
from dataclasses import dataclass

import lesson
import numpy as np
import torch
import torch.nn.functional as F
from preparation import stdlib_chats

T = 64
ROWS = 8
MICRO = 4
WIDTH = 64
BLOCKS = 3
HEADS = 4
STEPS = 1200
WARMUP = 20
MERGES = 256
MERGES_FROM = 200_000  # the first bytes of the training text
# Tuned for 1,200 steps.
MUON_LR = 0.01
TABLE_LR = 0.03
ADAM_LR = 0.004
MOMENTUM = 0.95
BASE = 100.0  # of the positions' speeds
ORDER = 6  # of counting
ALPHA = 64.0  # the best of 16, 32, 64, 128, 256
PART_S = 60  # processor seconds that one part may take of a run of STEPS
CHAT_STEPS = 600
END = 3  # of exercise 14; the ids 0 to 3 of a model that chats are special
IGNORED = -100
NAME_IT = "What would you call it? A small GPT."
# How the text is cut into words; \t-\r and the space are white space. The page uses it, too.
WORDS = r" ?[A-Za-z_]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9_]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
WORD = re.compile(WORDS.encode())


@dataclass(frozen=True)
class Spec:
    name: str
    functions: tuple[str, ...]  # that the run calls
    plain: str  # what stands in its place; nothing: then the reference does, as it changes no bit
    later: tuple[str, ...] = ()  # of the exercise, judged after these: the run does without


PARTS = {  # by the number of the lesson
    1: Spec("counting", ("bits_per_byte",), ""),
    2: Spec("gradient", ("factored_gradient",), "torch's gradient"),
    4: Spec(
        "attention",
        ("scaled_dot_product_attention",),
        "the average of the past",
        ("multihead_self_attention",),
    ),
    5: Spec("GPT", ("initial", "gpt"), "one look back, no MLP"),
    6: Spec("writing", ("generate",), "always the likeliest"),
    7: Spec("loop", ("train",), ""),
    8: Spec("positions", ("rotate",), "no positions", ("stretch",)),
    9: Spec("tokenizer", ("merge_order", "encode"), "bytes"),
    10: Spec("rate", ("rate",), "a constant rate"),
    11: Spec("packing", ("pack_lengths",), "one long text, cut"),
    12: Spec("Muon", ("polar", "muon"), "Adam"),
    13: Spec("evaluation", ("bits_of_text",), ""),
    14: Spec("chat", ("render", "shifted"), "no answers", ("fit",)),
    17: Spec("order", ("order",), "rows at random"),
}
NO_ROWS = torch.zeros(0, T + 1, dtype=torch.long)
BOARD = mmap.mmap(-1, 64)  # which part runs: to be read when the process is dead


def post(number: int, yours: bool) -> None:
    BOARD[:] = f"{number} {yours:d}".ljust(64).encode()


class Refused(Exception):
    """A part of somebody's failed in the run: its number, and how."""


class Part:
    """A function whose name stands on the board while it runs, and whose time is counted, without
    that of the parts that it calls. An error in one of yours becomes Refused."""

    most_s = PART_S
    running: list["Part"] = []
    last: "Part"  # that returned something
    inner: list[float] = []  # for each that runs, the seconds of those that it called

    def __init__(self, number: int, function, yours: bool):
        self.number = number
        self.function = function
        self.yours = yours
        self.seconds = 0.0

    def __call__(self, *args):
        began = time.process_time()
        Part.running.append(self)
        Part.inner.append(0.0)
        post(self.number, self.yours)
        try:
            returned = self.function(*args)
        except Exception as error:
            raise blamed(self, error) from error
        finally:
            spent = time.process_time() - began
            self.seconds += spent - Part.inner.pop()
            Part.running.pop()
            if Part.inner:
                Part.inner[-1] += spent
        Part.last = self
        if Part.running:  # after an error the board stays as it is
            post(Part.running[-1].number, Part.running[-1].yours)
        if self.yours and self.seconds > Part.most_s:
            raise Refused(self.number, f"it took more than {Part.most_s:.0f} s of the run")
        if self.yours and returned is None and self.function.__name__ != "muon":
            raise Refused(self.number, f"{self.function.__name__} returned nothing")
        return returned


def blamed(part: Part, error: Exception) -> Exception:
    """An error within a part is the part's, unless it was raised in this file: what joins the parts
    could not use what the last one returned. -> Refused, or the error if it is none of yours."""
    if isinstance(error, Refused):
        return error
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    code = getattr(part.function, "__code__", None)
    own = [file for file in files[1:] if file == __file__ or code and file == code.co_filename]
    said = f"{type(error).__name__}: {error}"
    if own and own[-1] == __file__:
        part = Part.last
        said = f"what it returned cannot be used: {said}"
    return Refused(part.number, said) if part.yours else error


# ------------------------------------------------------------------------------ the plain things
def plain_attention(Q, K, V, mask):
    """Lesson 4's first rung: the average of the past."""
    weights = mask.to(V.dtype)
    return weights / weights.sum(-1, keepdim=True) @ V


def plain_gpt(ids, weights, heads, attention, turn):
    """Lesson 4's model: one look back."""
    x = weights["embed"][ids]
    length = ids.size(1)
    q, k, v = ((x @ weights[f"0.{n}"].T).unflatten(-1, (heads, -1)) for n in ("q", "k", "v"))
    q = turn(q).transpose(1, 2)
    k = turn(k).transpose(1, 2)
    v = v.transpose(1, 2)
    y = attention(q, k, v, torch.ones(length, length).tril().bool())
    x = x + y.transpose(1, 2).flatten(-2) @ weights["0.out"].T
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def plain_generate(model, prompt, n, length, temperature, top_p, rng):
    """Lesson 6's first way: the likeliest token, always."""
    whole = list(prompt)
    for _ in range(n):
        whole.append(int(np.argmax(model(whole[-length:])[-1])))
    return whole[len(prompt) :]


PLAIN = {
    "scaled_dot_product_attention": plain_attention,
    "gpt": plain_gpt,
    "generate": plain_generate,
}


# ------------------------------------------------------------- numpy's functions in torch's run
class Loss(torch.autograd.Function):
    """The head and its loss by exercise 2. x = 0, 1, 2, ... makes each row of E a place of its own:
    E (N, width) are the vectors that the head reads, U (width, V) is the head."""

    @staticmethod
    def forward(ctx, vectors, head, targets, part):
        E = vectors.detach().double().numpy()
        U = head.detach().double().numpy().T.copy()
        loss, dE, dU = part(E, U, np.arange(len(E)), targets.numpy())
        ctx.save_for_backward(torch.from_numpy(dE).float(), torch.from_numpy(dU.T.copy()).float())
        return torch.tensor(float(loss))

    @staticmethod
    def backward(ctx, slope):  # of what is made of the loss, a pass's share of the rows
        dE, dU = ctx.saved_tensors
        return slope * dE, slope * dU, None, None


class Turn(torch.autograd.Function):
    """A rotation by exercise 8; its gradient is the same rotation backwards."""

    @staticmethod
    def forward(ctx, x, positions, speeds, part):
        ctx.kept = positions, speeds, part
        return torch.from_numpy(part(x.detach().numpy(), positions, speeds))

    @staticmethod
    def backward(ctx, slope):
        positions, speeds, part = ctx.kept
        turned = part(slope.contiguous().numpy(), -positions, speeds)
        return torch.from_numpy(turned), None, None, None


# --------------------------------------------------------------------------------- text to rows
class Tokens:
    """The vocabulary (bytes, what part 9 merges of them, and behind it BOS), there and back."""

    def __init__(self, parts: dict[str, Part], merges: list[tuple[bytes, bytes]]):
        self.parts = parts
        self.merges = merges
        self.vocabulary = [bytes([byte]) for byte in range(256)]
        self.ranks = {pair: i for i, pair in enumerate(merges)}
        self.words: dict[bytes, list[int]] = {}  # each distinct word is encoded once
        known = {*self.vocabulary}
        for a, b in merges:
            self.vocabulary += [] if a + b in known else [a + b]
            known.add(a + b)
        self.bos = len(self.vocabulary)
        self.ids = {token: i for i, token in enumerate(self.vocabulary)}
        self.sizes = np.array([*map(len, self.vocabulary), 0])  # in bytes; of BOS 0

    def encode(self, data: bytes) -> np.ndarray:
        if not self.merges:
            return np.frombuffer(data, np.uint8).astype(np.int64)
        out = []
        for word in WORD.findall(data):
            if word not in self.words:
                tokens = self.parts["encode"](word, self.ranks)
                self.words[word] = [self.ids[token] for token in tokens]
            out += self.words[word]
        return np.array(out, np.int64)

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.vocabulary[i] for i in ids if i < self.bos).decode("utf-8", "replace")


class Text:
    """The training rows and the exam, as the parts make them."""

    def __init__(self, parts: dict[str, Part], have: set[str], files: list[bytes], held: bytes):
        self.parts = parts
        self.have = have
        training = b"".join(files)
        self.size = len(training)
        merges = []
        if "tokenizer" in have:
            words = Counter(WORD.findall(training[:MERGES_FROM]))
            merges = parts["merge_order"](dict(words), MERGES)
        self.tokens = Tokens(parts, merges)
        self.bos = self.tokens.bos
        self.rows = self._packed(files) if "packing" in have else self._cut(training)
        self.exam = self._exam(held)
        self.asked = len(held) - 1  # bytes

    def _cut(self, training: bytes) -> torch.Tensor:
        """One long text in rows of T + 1; a row begins with the last token of the one before."""
        stream = torch.from_numpy(self.tokens.encode(training))
        self.lost = (len(stream) - 1) % T
        return stream.unfold(0, T + 1, T)

    def _packed(self, files: list[bytes]) -> torch.Tensor:
        """Files are the documents; each piece of one begins with BOS."""
        documents = [np.r_[self.bos, self.tokens.encode(data)] for data in files]
        rows = []
        for pieces in self.parts["pack_lengths"]([len(d) for d in documents], T + 1):
            parts = [
                np.r_[self.bos, documents[d][a:b]] if a else documents[d][:b] for d, a, b in pieces
            ]
            rows.append(np.concatenate(parts))
        rows = np.stack(rows)
        self.lost = sum(len(d) - 1 for d in documents) - (rows != self.bos).sum()
        return torch.from_numpy(rows)

    def _exam(self, held: bytes) -> list[np.ndarray]:
        """The exam in pieces. The token before each is shown and not asked, and BOS before it."""
        shown = [self.bos] if "packing" in self.have else []
        stream = np.r_[held[0], self.tokens.encode(held[1:])]
        new = T - len(shown)
        return [
            np.r_[shown, stream[i : i + new + 1]].astype(np.int64)
            for i in range(0, len(stream) - 1, new)
        ]


# --------------------------------------------------------------------------------------- the run
class Run:
    """A model of these parts, and its training. A name that is not in `have` is plain."""

    def __init__(self, parts, have: set[str], weights: dict, rows: torch.Tensor, seed: int, draw):
        self.parts = parts
        self.have = have
        self.weights = weights
        self.rows = rows
        self.seed = seed
        self.draw = draw
        for weight in weights.values():
            weight.requires_grad_()
        self.speeds = BASE ** (-np.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
        self.seen: set[int] = set()  # numbers of rows
        self.matrices = [w for name, w in weights.items() if "." in name]
        self.averages = [torch.zeros_like(w) for w in self.matrices]
        groups = [{"params": [weights["embed"], weights["head"]], "peak": TABLE_LR}]
        if "Muon" not in have:
            groups.append({"params": self.matrices, "peak": ADAM_LR})
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.99))

    def turn(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, heads, width / heads)
        if "positions" not in self.have:
            return x
        positions = np.tile(np.arange(x.size(1)), (len(x), 1))
        return Turn.apply(x, positions, self.speeds, self.parts["rotate"])

    def vectors(self, ids: torch.Tensor) -> torch.Tensor:  # (B, T) -> (B, T, width)
        attention = self.parts["scaled_dot_product_attention"]
        return self.parts["gpt"](ids, self.weights, HEADS, attention, self.turn)

    def scores(self, ids: torch.Tensor) -> torch.Tensor:  # (B, T) -> (B, T, V)
        return self.vectors(ids) @ self.weights["head"].T

    def loss(self, rows: torch.Tensor) -> torch.Tensor:  # (B, T + 1) -> their mean
        return self.loss_of(rows[:, :-1], rows[:, 1:])

    def loss_of(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        learned = targets != IGNORED  # (B, T)
        x = self.vectors(inputs)[learned]  # (N, width)
        y = targets[learned]
        if "gradient" in self.have:
            return Loss.apply(x, self.weights["head"], y, self.parts["factored_gradient"])
        return F.cross_entropy(x @ self.weights["head"].T, y)

    def batch(self, step: int) -> torch.Tensor:
        self.tell(step)
        size = len(self.rows)
        if "order" in self.have:
            places = range(step * ROWS, (step + 1) * ROWS)
            order = self.parts["order"]
            numbers = [order(p, [size], [1], self.seed, hashed)[1] for p in places]
        else:
            numbers = torch.randint(size, (ROWS,), generator=self.draw).tolist()
        self.seen.update(numbers)
        return self.rows[numbers]

    def tell(self, step: int) -> None:
        """In a long run, a line now and then."""
        if step == 0:
            self.began = time.perf_counter()
        elif step % STEPS == 0:
            left = (time.perf_counter() - self.began) * (self.steps / step - 1)
            print(f"step {step:,} of {self.steps:,}: {left / 60:.0f} minutes left", flush=True)

    def update(self, step: int) -> None:
        factor = self.parts["rate"](step, self.steps, WARMUP) if "rate" in self.have else 1.0
        for group in self.adam.param_groups:
            group["lr"] = group["peak"] * factor
        self.adam.step()
        if "Muon" in self.have:
            muon = self.parts["muon"]
            with torch.no_grad():
                for W, average in zip(self.matrices, self.averages):
                    if W.grad is not None:
                        muon(W, W.grad, average, MUON_LR * factor, MOMENTUM, self.polar)

    def polar(self, G: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.parts["polar"](G.double().numpy())).float()

    def train(self, steps: int) -> list[float]:
        self.steps = steps
        weights = [*self.weights.values()]
        return self.parts["train"](weights, self.loss, self.batch, self.update, steps, MICRO)

    @torch.no_grad()
    def examine(self, text: Text) -> float:
        """Bits per byte of the exam. The targets stand for exactly its bytes, whatever the tokens:
        so bytes and tokens compare."""
        nats = []
        sizes = []
        shown = 2 if "packing" in self.have else 1
        for length in sorted({len(piece) for piece in text.exam}):
            pieces = np.stack([piece for piece in text.exam if len(piece) == length])
            for some in torch.from_numpy(pieces).split(64):
                scores = self.scores(some[:, :-1]).flatten(0, 1)
                loss = F.cross_entropy(scores, some[:, 1:].flatten(), reduction="none")
                nats.append(loss.view(len(some), -1)[:, shown - 1 :].flatten().numpy())
                sizes.append(text.tokens.sizes[some[:, shown:].flatten().numpy()])
        nats = np.concatenate(nats)
        sizes = np.concatenate(sizes)
        assert sizes.sum() == text.asked, "the targets are not the exam's bytes"
        return self.parts["bits_of_text"](nats, sizes)

    @torch.no_grad()
    def write(self, prompt: list[int], n: int, seed: int, temperature=0.8) -> list[int]:
        """n tokens after a prompt."""
        model = lambda tokens: self.scores(torch.tensor([tokens]))[0].double().numpy()
        return self.parts["generate"](model, prompt, n, T, temperature, 0.95, random.Random(seed))


def written(model: Run, tokens: Tokens, prompt: str, seed: int, n: int = 160) -> str:
    """A text, and how the model goes on after it."""
    begin = [tokens.bos] * ("packing" in model.have)
    ids = tokens.encode(f"\n\n{prompt}".encode()).tolist()
    return prompt + tokens.decode(model.write(begin + ids, n, seed))


class Chat(Run):
    """A model that learns the answers of conversations: a row is T inputs, then their targets. Its
    ids 0 to 3 are the special tokens of exercise 14; behind them come those of `tokens`."""

    tokens: Tokens

    def loss(self, rows: torch.Tensor) -> torch.Tensor:  # (B, 2T) -> the mean of what is learned
        return self.loss_of(*rows.chunk(2, dim=1))

    def encode(self, text: str) -> list[int]:
        return [END + 1 + i for i in self.tokens.encode(text.encode()).tolist()]

    def answer(self, question: str, seed: int, temperature=0.8) -> str:
        """What the model says to a question, up to the end that it writes itself."""
        ids, _ = self.parts["render"]([("user", question)], self.encode)
        said = self.write(ids, T, seed, temperature)
        said = said[: said.index(END)] if END in said else said
        return self.tokens.decode([i - END - 1 for i in said if i > END])

    def name(self, seed: int) -> str | None:
        """The name in the most frequent of 24 answers; None if that answer has another form."""
        said = Counter(self.answer(NAME_IT, seed + draw, 0.5) for draw in range(24))
        named = re.fullmatch(r"I would call it (\w+)\.?\s*", max(said, key=said.get))
        return named and named[1]


def forms(exchange: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """A question and its answer; a question after a name in both forms of lesson 14."""
    (_, question), (_, answer) = exchange
    if not question.startswith("What is it called?"):
        return [exchange]
    question = question.replace("What is it called?", "What would you call it?")
    answer = answer.replace("It is called", "I would call it")
    return [exchange, [("user", question), ("assistant", answer)]]


def chat(parts: dict[str, Part], have: set[str], kept: dict, seed: int) -> Chat:
    """Tune a kept model on the first question and answer of each conversation about the library."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(seed)
    tokens = Tokens(parts, kept["merges"])
    weights = dict(kept["weights"])
    for name, size in (("embed", 0.8), ("head", 0.001)):  # four new ids begin as lesson 5's do
        added = size * torch.randn(END + 1, WIDTH, generator=draw)
        weights[name] = torch.cat([added, weights[name][: tokens.bos]])
    model = Chat(parts, have, weights, NO_ROWS, seed, draw)
    model.tokens = tokens
    rows = []
    for path in lesson._stdlib():
        for turns in stdlib_chats.conversations(f"stdlib/{path.name}", path.read_bytes()):
            said = [(turn["role"], turn["content"]) for turn in turns if turn["role"] != "system"]
            for exchange in forms(said[:2]):
                ids, mask = parts["render"](exchange, model.encode)
                inputs, targets = parts["shifted"](ids, mask, T)
                if {*targets} != {IGNORED}:  # some of the answer is within T
                    rows.append([*inputs, *targets])
    model.rows = torch.tensor(rows)
    model.train(CHAT_STEPS)
    return model


def hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def exam() -> tuple[bytes, bytes]:
    """The training text of lesson 1, and the byte before the exam with the exam, as bytes."""
    training, held = lesson.exam()
    return training.astype(np.uint8).tobytes(), held.astype(np.uint8).tobytes()


def training_files(text: bytes, steps: int) -> list[bytes]:
    """The files of lesson 1's text, the last one cut. A longer run gets as many times more text,
    from the library's packages: it would learn a small text by heart."""
    room = len(text) * max(0, steps / STEPS - 1)
    files = []
    for path in lesson._stdlib():
        if not text:
            break
        size = path.stat().st_size
        files.append(text[:size])
        text = text[size:]
    for path in sorted(lesson._stdlib()[0].parent.glob("*/*.py")):
        if room <= 0:
            break
        if not {"site-packages", "test", "idlelib"} & {*path.parts}:
            files.append(path.read_bytes()[: int(room)])
            room -= len(files[-1])
    return files


def run(parts: dict[str, Part], have: set[str], steps: int, seed: int) -> dict:
    """Train and examine -> numbers for the table and the page. The model is kept."""
    torch.set_num_threads(1)
    training, held = exam()
    text = Text(parts, have, training_files(training, steps), held)
    draw = torch.Generator().manual_seed(seed)
    weights = parts["initial"](text.bos + 1, WIDTH, BLOCKS, draw)
    model = Run(parts, have, weights, text.rows, seed, draw)
    model.train(steps)
    out = {"bits": model.examine(text), "steps": steps, "kinds": text.bos + 1, "bytes": text.size}
    keep(model, text, out["bits"], steps)
    try:
        out["sample"] = written(model, text.tokens, "def ", seed)
    except Refused as error:  # the number is there
        out |= {"sample": "", "failed": error.args}
    out["rows"] = len(text.rows)
    out["lost"] = int(text.lost)
    due = min(steps * ROWS, len(text.rows))  # rows of which each could have been seen once
    out["unseen"] = due - len(model.seen)
    seconds: Counter = Counter()
    for part in parts.values():
        seconds[part.number] += part.seconds
    return out | {"seconds": {number: round(s, 2) for number, s in seconds.items()}}


KEPT = "yours.pt"  # in course/out


def keep(model: Run, text: Text, bits: float, steps: int) -> None:
    kept = dict(bits=bits, steps=steps, have=sorted(model.have))
    kept["merges"] = [[part.decode("latin-1") for part in pair] for pair in text.tokens.merges]
    kept["weights"] = {name: weight.detach() for name, weight in model.weights.items()}
    torch.save(kept, lesson.OUT / KEPT)


def last() -> dict | None:
    """What `keep` kept; None if there is no such model."""
    path = lesson.OUT / KEPT
    if not path.exists():
        return None
    kept = torch.load(path, weights_only=True)
    merges = [tuple(part.encode("latin-1") for part in pair) for pair in kept["merges"]]
    return kept | {"have": {*kept["have"]}, "merges": merges}


def loaded(parts: dict[str, Part], have: set[str], kept: dict) -> tuple[Run, Tokens]:
    """A kept model, to write with."""
    model = Run(parts, have, kept["weights"], NO_ROWS, 0, torch.Generator())
    return model, Tokens(parts, kept["merges"])
