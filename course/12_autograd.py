# %% [markdown]
# # 12. Autograd: backward is a topological sort
#
# **Question.** How does a library know derivatives that nobody wrote down, and what do lazy
# evaluation and fusion buy?
#
# Source: *NfNN*, "1.1.2 Definição de diferenciação automática", "1.1.5 Avaliação imediata vs.
# avaliação preguiçosa", "1.1.6 Capacidade de fusão de kernel", "1.1.7 Alocação de memória", "3.2
# Alocação de memória", "3.3 Diferenciação automática", "3.4 Otimizadores", "3.6 Diferentes
# backends". Core file: none, all of it is here; torch judges. Before: lesson 8. Next: lesson 13.
# Takes 6 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import time
import weakref

import numpy as np
import torch

lesson.begin(12, "autograd")
torch.set_num_threads(1)


# %% [markdown]
# ## A table of rules and a walk
# Somebody did write the derivatives down, but only of a few operations. Each gives its result and,
# for each input, a rule: gradient of the result -> gradient of the input. All arithmetic is in this
# one class, so another backend is another class.


# %%
class Ops:
    add = lambda a, b: (a + b, (lambda g: g, lambda g: g))
    mul = lambda a, b: (a * b, (lambda g: g * b, lambda g: g * a))
    matmul = lambda a, b: (a @ b, (lambda g: g @ b.T, lambda g: a.T @ g))
    relu = lambda a: (np.maximum(a, 0), (lambda g: g * (a > 0),))

    def sigmoid(a):
        s = 1 / (1 + np.exp(-a))
        return s, (lambda g: g * s * (1 - s),)

    def cross_entropy(a, hot):  # logits and one-hot labels, (B, V) -> mean negative log-likelihood
        a = a - a.max(1, keepdims=True)
        log_p = a - np.log(np.exp(a).sum(1, keepdims=True))
        return -(hot * log_p).sum() / len(a), (lambda g: g * (np.exp(log_p) - hot) / len(a),)


class Tensor:
    """A value, the tensors it was made from, and the rules that lead back to them."""

    place = staticmethod(np.asarray)  # where a result is put; the arena below changes it

    def __init__(self, data, parents=(), rules=()):
        self.data, self.parents, self.rules, self.grad = data, parents, rules, 0.0

    def apply(self, op, *others):
        value, rules = op(self.data, *(t.data for t in others))
        return Tensor(Tensor.place(value), (self, *others), rules)

    __add__ = lambda self, other: self.apply(Ops.add, other)
    __mul__ = lambda self, other: self.apply(Ops.mul, other)
    __matmul__ = lambda self, other: self.apply(Ops.matmul, other)
    relu, sigmoid = lambda self: self.apply(Ops.relu), lambda self: self.apply(Ops.sigmoid)


def parents_first(t: Tensor, seen: set):
    """t and all it was made from, each once, after everything that it was made from."""
    if t not in seen:
        seen.add(t)
        for parent in t.parents:
            yield from parents_first(parent, seen)
        yield t


def backward(root: Tensor) -> None:
    """Add d root / d t to the grad of every tensor t; root is a number."""
    root.grad = 1.0
    for t in reversed(list(parents_first(root, set()))):  # the topological order
        for parent, rule in zip(t.parents, t.rules):
            g = rule(t.grad)
            while np.ndim(g) > np.ndim(parent.data):  # a bias was copied to each row of the batch:
                g = g.sum(0)  # its gradient is the sum over the copies
            parent.grad = parent.grad + g


# %% [markdown]
# ## By hand, and by torch
# The source's own examples, then a net of 784-32-10 on pictures of digits, and ten steps of AdamW.
# The same lines run on our tensors and on torch's.


# %%
def sgd_step(p, g, lr):
    return p - lr * g


def adamw_step(p, g, m, v, t, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    """Step t = 1, 2, ... -> parameter, moments (Loshchilov & Hutter 2019)."""
    m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    return p * (1 - lr * weight_decay) - lr * m_hat / (np.sqrt(v_hat) + eps), m, v


def net(x, w):
    return (x @ w[0] + w[1]).relu() @ w[2] + w[3]


gap = lambda ours, theirs: max(np.abs(a - b.detach().numpy()).max() for a, b in zip(ours, theirs))
twin = lambda values: [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in values]
rows = []
for name, values, f in (
    ("A B", (2.0, 3.0), lambda a, b: a * b),
    ("sigmoid(x) + x", (0.5,), lambda x: x.sigmoid() + x),
    ("x x + x y + y y", (2.0, 3.0), lambda x, y: x * x + x * y + y * y),
):
    ours, theirs = [Tensor(v) for v in values], twin(values)
    backward(f(*ours)), f(*theirs).backward()
    far = gap([t.grad for t in ours], [t.grad for t in theirs])
    rows.append((name, ", ".join(f"{t.grad:.4g}" for t in ours), far))
lesson.holds([row[1] for row in rows[::2]] == ["3, 2", "7, 8"], "2 x + y and x + 2 y, by hand")

images, labels = lesson.digits(64, seed=0)
images, hot, rng = images.astype(float), np.eye(10)[labels], np.random.default_rng(0)
shapes = {(784, 32): 0.05, (32,): 0.0, (32, 10): 0.2, (10,): 0.0}
initial = [rng.normal(0, scale, shape) for shape, scale in shapes.items()]
weights, moments, theirs = [Tensor(w) for w in initial], [(0.0, 0.0)] * 4, twin(initial)
judge = torch.optim.AdamW(theirs, lr=0.01)
for t in range(1, 11):
    judge.zero_grad()
    logits = net(torch.tensor(images), theirs)
    torch.nn.functional.cross_entropy(logits, torch.tensor(labels)).backward()
    backward(net(Tensor(images), weights).apply(Ops.cross_entropy, Tensor(hot)))
    if t == 1:
        far = gap([w.grad for w in weights], [w.grad for w in theirs])
        rows.append(("784-32-10", "25,450 numbers", far))
    judge.step()
    for i, w in enumerate(weights):
        w.data, *moments[i] = adamw_step(w.data, w.grad, *moments[i], t, lr=0.01)
        w.grad = 0.0
rows.append(("its weights after ten steps", "", gap([w.data for w in weights], theirs)))
lesson.table(["expression", "gradient", "distance to torch"], rows)
lesson.holds(max(row[2] for row in rows) < 1e-6, "gradients and ten steps are torch's")

# %% [markdown]
# ## What lazy evaluation buys
# Run at once, each of six elementwise operations reads and writes 16 MB. Recorded first, they can
# run block by block: 4,096 numbers stay in the cache while all six pass over them. (Lesson 16 lets a
# compiler do it.)

# %%
chain = [np.sqrt, np.exp, np.tanh, np.square, np.negative, np.exp]
big = rng.random(4_000_000, np.float32)


def run(x, block):
    """All operations on a block, then the next -> result, how many results were as long as x."""
    parts, whole = [], 0
    for i in range(0, len(x), block):
        part = x[i : i + block]
        for f in chain:
            part = f(part)
            whole += len(part) == len(x)
        parts.append(part)
    return np.concatenate(parts), whole


rows, results = [], []
for way, block in (("eager", len(big)), ("fused", 4096)):
    began = time.perf_counter()
    result, whole = run(big, block)
    rows.append((way, whole, 1e3 * (time.perf_counter() - began)))
    results.append(result)
lesson.table(["way", "results of 16 MB", "ms"], rows, "six operations")
lesson.holds([row[1] for row in rows] == [6, 0], "no operation writes 16 MB any more")
lesson.holds((results[0] == results[1]).all(), "with the same bits")

# %% [markdown]
# ## An arena
# A training step makes the same tensors each time, so their bytes can be counted beforehand, taken
# once, and handed out by moving a pointer. The end of the step moves it back.


# %%
class Arena:
    def __init__(self, n_bytes: int):
        self.memory, self.used = np.empty(n_bytes, np.uint8), 0

    def place(self, value):
        first, self.used = self.used, self.used + 8 * np.size(value)  # float64
        out = self.memory[first : self.used].view(np.float64).reshape(np.shape(value))
        out[...] = value
        return out

    def reset(self) -> int:
        used, self.used = self.used, 0
        return used


def malloc(value):
    out = np.array(value)
    held.append(held[-1] + out.nbytes)
    weakref.finalize(out, lambda n: held.append(held[-1] - n), out.nbytes)
    return out


def train(place, end_of_step) -> list:
    """100 steps of SGD -> the weights."""
    Tensor.place, w = staticmethod(place), [Tensor(values) for values in initial]
    for _ in range(100):
        backward(net(Tensor(images), w).apply(Ops.cross_entropy, Tensor(hot)))
        for t in w:
            t.data, t.grad = sgd_step(t.data, t.grad, lr=0.1), 0.0
        end_of_step()
    return [t.data for t in w]


held, peaks = [0], []
bound = 8 * (64 * (3 * 32 + 2 * 10) + 1)  # matmul, + and ReLU 32 wide, matmul and + 10 wide, loss
arena = Arena(bound)
ways = train(malloc, lambda: None), train(arena.place, lambda: peaks.append(arena.reset()))
asked = sum(b > a for a, b in zip(held, held[1:]))
rows = [("malloc", asked, max(held)), ("arena", 1, max(peaks))]
lesson.table(["memory", "allocations", "peak bytes"], rows, "100 steps")
lesson.holds(asked == 600 and all((a == b).all() for a, b in zip(*ways)), "600 or 1: same weights")
lesson.holds(set(peaks) == {bound} == {max(held)}, "the peak is the bound computed beforehand")

# %%
fig = lesson.figure(8, 3.2)
left, right = fig.subplots(1, 2)
places = {"x": (0, 0), "h = x x": (1, 0), "f(h)": (1.7, 1), "h + f(h)": (2.4, 0)}
for a, b in (("x", "h = x x"), ("h = x x", "f(h)"), ("h = x x", "h + f(h)"), ("f(h)", "h + f(h)")):
    arrow = dict(arrowstyle="->", shrinkA=16, shrinkB=24)
    left.annotate("", places[b], places[a], arrowprops=arrow)
for (name, at), sorted_, met in zip(places.items(), (4, 3, 2, 1), (4, 2, 3, 1)):
    left.text(*at, name, ha="center", va="center", bbox=dict(boxstyle="round", fc="white"))
    left.text(at[0] - 0.15, at[1] - 0.4, sorted_, color="tab:blue", weight="bold")
    left.text(at[0] + 0.1, at[1] - 0.4, met, color="silver" if met == sorted_ else "crimson")
left.text(-0.3, 1.3, "backward, sorted: right", color="tab:blue", weight="bold")
left.text(-0.3, 1.1, "in the order met: h too early", color="crimson")
left.set(xlim=(-0.4, 2.9), ylim=(-0.7, 1.5)), left.axis("off")
right.step(range(37), held[:37], color="crimson", where="post", label="malloc: 6 a step, freed")
right.axhline(bound, color="tab:blue", label="arena: taken once")
right.set(xlabel="events in three steps", ylabel="bytes held", ylim=(0, 1.5 * bound))
right.legend(loc="upper right")
lesson.save(fig, "12_autograd")

# %% [markdown]
# ## Trap
# Walk back in the order in which you meet the tensors, and one that is used twice passes its
# gradient on before its second half has arrived: right on every chain, wrong on the first residual
# connection, h + f(h).
#
# ## Exercise
# `exercises/ex12.py`: write `backward` for given nodes. `python course/check.py 12`
