# %% [markdown]
# # 3. Autograd: backward is a topological sort
#
# **Afterwards** you can write the part of PyTorch that finds gradients, and say what it keeps.
#
# **Question.** A library that writes down each operation has a record. What can it do with it?
#
# Source: *NfNN*, "1.1.2 Definição de diferenciação automática", "1.1.5 Avaliação imediata vs.
# avaliação preguiçosa", "1.1.6 Capacidade de fusão de kernel", "1.1.7 Alocação de memória", "3.2
# Alocação de memória", "3.3 Diferenciação automática", "3.4 Otimizadores", "3.6 Diferentes
# backends". Core file: none, all of it is here; torch judges. Before: lesson 18. Next: lesson 23.
# Takes 5 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import resource
import tracemalloc

import numpy as np
import torch

lesson.begin(3, "autograd")


# %% [markdown]
# ## A table of rules
# Exercise 2 found one gradient with pen and paper. A library needs few rules: one per operation.
# `forward` computes the result; `backward` gets `g`, the gradient of the loss with respect to that
# result, and returns the gradient with respect to each input. All arithmetic is in these classes,
# so another device needs other classes, and nothing else changes.


# %%
class Add:
    def forward(a, b):
        return a + b

    def backward(g, out, a, b):
        return g, g


class Multiply:
    def forward(a, b):
        return a * b

    def backward(g, out, a, b):
        return g * b, g * a


class MatMul:
    def forward(a, b):
        return a @ b

    def backward(g, out, a, b):
        return g @ b.T, a.T @ g


class ReLU:
    def forward(a):
        return np.maximum(a, 0)

    def backward(g, out, a):
        return (g * (a > 0),)


class CrossEntropy:  # logits and one-hot labels (B, V) -> mean negative log-likelihood
    def forward(a, hot):
        a = a - a.max(1, keepdims=True)
        return np.mean(np.log(np.exp(a).sum(1)) - (hot * a).sum(1))

    def backward(g, out, a, hot):
        p = np.exp(a - a.max(1, keepdims=True))
        return g * (p / p.sum(1, keepdims=True) - hot) / len(a), None  # labels get no gradient


# %% [markdown]
# ## The record
# A tensor remembers the operation and the tensors that it was made from. That is the whole record:
# running the program writes it.


# %%
class Tensor:
    def __init__(self, data, operation=None, parents=()):
        self.data = np.asarray(data, dtype=float)
        self.operation = operation
        self.parents = parents
        self.grad = np.zeros_like(self.data)

    def __add__(self, other):
        return apply(Add, self, other)

    def __mul__(self, other):
        return apply(Multiply, self, other)

    def __matmul__(self, other):
        return apply(MatMul, self, other)

    def relu(self):
        return apply(ReLU, self)


def apply(operation, *inputs: Tensor) -> Tensor:
    return Tensor(operation.forward(*(t.data for t in inputs)), operation, inputs)


# %% [markdown]
# ## Use one: derivatives
# The chain rule goes from the result back to the inputs. A tensor may pass its gradient on only
# when it has all of it, from everything that was made from it. So put the tensors in an order where
# each comes after all that it was made from (a *topological* order), and go through it backwards.


# %%
def topological(root: Tensor) -> list[Tensor]:
    order = []
    seen = set()

    def visit(t: Tensor) -> None:
        if t not in seen:
            seen.add(t)
            for parent in t.parents:
                visit(parent)
            order.append(t)

    visit(root)
    return order


def backward(root: Tensor, order=topological) -> None:
    """Add d root / d t to the grad of every tensor t below root, a single number."""
    root.grad = np.ones(())
    for t in reversed(order(root)):
        if t.operation:
            inputs = [parent.data for parent in t.parents]
            for parent, g in zip(t.parents, t.operation.backward(t.grad, t.data, *inputs)):
                while g is not None and g.ndim > parent.data.ndim:  # a bias was copied to each row:
                    g = g.sum(0)  # its gradient is the sum over the copies
                parent.grad = parent.grad if g is None else parent.grad + g


x = Tensor(2.0)
y = Tensor(3.0)
f = x * x + x * y + y * y
backward(f)
rows = []
names = {x: "x", y: "y"}
for t in topological(f):
    names.setdefault(t, f"t{len(names) - 1}")
    made = [t.operation.__name__, *(names[p] for p in t.parents)] if t.operation else []
    rows.append((names[t], " ".join(made), t.data.item(), t.grad.item()))
lesson.table(["tensor", "made by", "value", "gradient"], rows, "x x + x y + y y at x = 2, y = 3")
lesson.holds((x.grad, y.grad) == (7, 8), "the gradients of x x + x y + y y are 2x + y and x + 2y")

# %% [markdown]
# ## A net, and torch as judge
# 784 inputs (pictures of digits), 32 hidden units, 10 classes, ten steps of AdamW (Loshchilov &
# Hutter 2019). `net` runs on our tensors and on torch's: to both it is only `@`, `+` and `relu`.


# %%
def net(x, w):
    return (x @ w[0] + w[1]).relu() @ w[2] + w[3]


def adamw_step(p, g, m, v, t, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    m_hat = m / (1 - betas[0] ** t)
    v_hat = v / (1 - betas[1] ** t)
    return p * (1 - lr * weight_decay) - lr * m_hat / (np.sqrt(v_hat) + eps), m, v


def distance(ours, theirs) -> float:
    return max(np.abs(a - b.detach().numpy()).max() for a, b in zip(ours, theirs))


images, labels = lesson.digits(64, seed=0)
images = images.astype(float)
hot = np.eye(10)[labels]
rng = np.random.default_rng(0)
shapes = {(784, 32): 0.05, (32,): 0.0, (32, 10): 0.2, (10,): 0.0}
w = [Tensor(rng.normal(0, scale, shape)) for shape, scale in shapes.items()]
moments = [(0.0, 0.0)] * 4
twins = [torch.tensor(t.data, requires_grad=True) for t in w]
judge = torch.optim.AdamW(twins, lr=0.01)
rows = []
for step in range(1, 11):
    judge.zero_grad()
    theirs = net(torch.tensor(images), twins)
    torch.nn.functional.cross_entropy(theirs, torch.tensor(labels)).backward()
    loss = apply(CrossEntropy, net(Tensor(images), w), Tensor(hot))
    backward(loss)
    far = distance([t.grad for t in w], [t.grad for t in twins])
    judge.step()
    for i, t in enumerate(w):
        t.data, *moments[i] = adamw_step(t.data, t.grad, *moments[i], step, lr=0.01)
        t.grad = np.zeros_like(t.data)
    rows.append((step, loss.data.item(), far, distance([t.data for t in w], twins)))
columns = ["step", "loss", "gradients", "weights after it"]
lesson.table(columns, rows[::3], "784-32-10: largest distance to torch, of 25,450 numbers")
lesson.holds(max(max(row[2:]) for row in rows) < 1e-6, "gradients and ten AdamW steps are torch's")

# %% [markdown]
# ## Use two: run it later
# Numpy is *eager*: it runs each operation at once, and each has a result as long as the input. If
# operations are only written down (*lazy*), they can be run together when the result is wanted:
# take 4,096 numbers through all six operations, then the next 4,096. `tracemalloc` sees every array
# that numpy makes. (Lesson 22 lets a compiler do it, and asks what is saved beside memory.)


# %%
class Lazy:
    def __init__(self, data, operations):
        self.data = data
        self.operations = operations  # written down, not done

    def run(self, block=4096):
        out = np.empty_like(self.data)
        for i in range(0, len(out), block):
            out[i : i + block] = eager(self.data[i : i + block], self.operations)
        return out


def eager(x, operations):
    for operation in operations:
        x = operation(x)
    return x


def peak_bytes(f, *arguments):
    tracemalloc.start()
    result = f(*arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, peak


SIX = (np.sqrt, np.exp, np.tanh, np.square, np.negative, np.exp)
big = rng.random(4_000_000, np.float32)
now, eager_peak = peak_bytes(eager, big, SIX)
lazy, record_peak = peak_bytes(Lazy, big, SIX)
later, lazy_peak = peak_bytes(lazy.run)
rows = [("eager", eager_peak), ("lazy: write down", record_peak), ("lazy: run", lazy_peak)]
lesson.table(["way", "peak bytes"], rows, "six operations on 16 MB")
lesson.holds(eager_peak > 1.9 * big.nbytes, "eager, two arrays of 16 MB exist at a time")
lesson.holds(lazy_peak < 1.1 * big.nbytes, "run in blocks, only the result has the full length")
lesson.holds((now == later).all(), "eager and lazy give the same bits")

# %% [markdown]
# ## Where results lie
# Each result needs room. For a large one the C library gets pages from the system, which clears
# them, and gives them back when the array dies: again in every step. The source's library has an
# *arena*: one piece of memory, and a place in it that moves up with each result. At the end of a
# step it goes back to 0, and nothing has to be freed; one must know how much a step needs. On a GPU
# PyTorch keeps freed blocks in lists by size (its *caching allocator*). On a CPU, `_set_up_cpu` in
# machinery/ranks.py tells the C library to keep pages, which saves 12% of a step of `tiny`.


# %%
def new_pages(arena: np.ndarray | None = None) -> int:
    """Pages that the second of two steps fetches."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        x = big
        place = 0
        for operation in SIX:
            x = operation(x, out=None if arena is None else arena[place : place + x.size])
            place += x.size
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


fetched = new_pages()
kept = new_pages(np.empty(6 * big.size, np.float32))
print(f"new pages in the second step: {fetched:,} with numpy's arrays, {kept:,} in an arena")
lesson.holds(fetched > 10 + kept, "an arena's second step fetches no pages, numpy's arrays do")

# %%
fig = lesson.figure(6, 2.4)
ax = fig.subplots()
bars = ax.barh([row[0] for row in rows], [row[1] / 1e6 for row in rows], color="tab:blue")
ax.bar_label(bars, fmt=" %.1f MB"), ax.invert_yaxis()
ax.set(xlim=(0, 38), xlabel="MB at the peak", title="six operations on 16 MB")
lesson.save(fig, "03_autograd")

# %% [markdown]
# ## Trap
# Walk back in the order in which you meet the tensors, and one that is used twice passes its
# gradient on before the second part has arrived: right on every chain, wrong on the first residual
# connection, h + f(h). From the sum one meets h first, then f(h): h would pass on what it has, and
# only then get its share from f(h).


# %%
def parents_as_met(root: Tensor) -> list[Tensor]:
    met = [root]
    for t in met:
        met += [parent for parent in t.parents if parent not in met]
    return met[::-1]


def gradient(order) -> float:
    x = Tensor(3.0)
    h = x * Tensor(1.0)
    backward(h + h * h, order)
    return x.grad.item()


lesson.holds(gradient(topological) == 7, "at 3, sorted, h + h h has the gradient 1 + 2 h = 7")
lesson.holds(gradient(parents_as_met) == 1, "in the order met, h passes on 1, before the 6 arrive")

# %% [markdown]
# ## Exercise
# `exercises/ex03.py`: write `backward` for given nodes, for any shape and depth.
# `python course/check.py 3`
