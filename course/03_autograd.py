# %% [markdown]
# # 3. Autograd: what `backward` does
#
# **Afterwards** you can write `backward` yourself, and say what a gradient costs.
#
# **Question.** Lesson 2 nudged a weight to find its slope; then one call of `backward` found all
# 65,536. How can a library find the slopes of any formula?
#
# Source: *NfNN*, "1.1.2 Definição de diferenciação automática", "3.3 Diferenciação automática".
# Core file: none, all of it is here; torch judges. Before: lesson 2. Next: lesson 4.
# Takes 4 seconds on two cores.

# %%
import lesson
import numpy as np
import torch
import torch.nn.functional as F

RATE = 2.0
lesson.begin(3, "autograd")

# %% [markdown]
# ## The chain rule, with numbers
# Take f = x * y + x * x at x = 2, y = 3. A program computes it in three operations:
#
#     a = x * y = 6        b = x * x = 4        f = a + b = 10
#
# Nudge x by 0.001. Then a grows by y times that, 0.003. b grows by 0.004 (0.002 by each of its two
# factors, if we neglect the 0.000001), and so f grows by 0.007: the slope of f for x is 7. Nobody
# had to look at the whole formula. Each operation has a small rule of its own; along a path from x
# to f the slopes are multiplied, and if there are several paths, the products are summed: this is
# the **chain rule**.
#
# Start at the end, since there is one f and there may be a million x. The slope of f for f is 1.
# Then each operation hands back, to each of its inputs, what it has received itself, times the
# slope of its result for this input:
#
#     f = a + b   received 1: hands 1 to a, and 1 to b
#     b = x * x   received 1: hands 1 * x = 2 to its first factor, and 1 * x = 2 to its second
#     a = x * y   received 1: hands 1 * y = 3 to x, and 1 * x = 2 to y
#
# x has received 2 + 2 + 3 = 7, and y 2. These are their slopes, and each operation was visited
# once. What a number has received is called its **gradient**; that of an array is an array of the
# same shape, with the slope of f for each of its numbers.
#
# ## A table of rules
# So a library needs one rule for each operation. `forward` computes the result. `backward` gets
# `g`, the gradient of the result, and returns the gradient of each input.
#
# The rule of the matrix product, a (N, D) times b (D, V), is the last part of exercise 2. A nudge
# of a[i, d] changes the number j of row i of the result by b[d, j] times the nudge. So the gradient
# of a[i, d] is the sum over j of g[i, j] * b[d, j], which is g @ b.T; `.T` is the **transpose**,
# where rows become columns. The shapes leave no other choice: (N, V) @ (V, D) is (N, D), as a is.
#
# The loss is lesson 2's, with the natural logarithm; in its jargon, the scores are **logits** and
# the loss is the **cross-entropy**. The bytes that came are given as rows with a single 1, so the
# rule of lesson 2, "its probability, minus 1 for the one that came", is `p - hot`.

# %%
products = []  # of each matrix product, how many multiplications it takes


def product(a, b):
    products.append(a.shape[0] * a.shape[1] * b.shape[1])
    return a @ b


class Add:
    def forward(a, b):
        return a + b

    def backward(g, a, b):
        return g, g


class Multiply:
    def forward(a, b):
        return a * b

    def backward(g, a, b):
        return g * b, g * a


class MatMul:
    def forward(a, b):
        return product(a, b)

    def backward(g, a, b):
        return product(g, b.T), product(a.T, g)


class CrossEntropy:  # logits and rows with a single 1, both (N, V) -> the mean of -ln(p)
    def forward(a, hot):
        return np.mean(np.log(np.exp(a).sum(1)) - (hot * a).sum(1))

    def backward(g, a, hot):
        p = np.exp(a)
        p /= p.sum(1, keepdims=True)
        return g * (p - hot) / len(a), 0 * hot  # nobody wants a gradient of the bytes that came


# %% [markdown]
# ## The record
# The library has to know, at the end, which operations there were. So each result remembers the
# operation and the inputs that it was made from. Python lets a class say what `+`, `*` and `@` mean
# for it (`__add__`, `__mul__`, `__matmul__`), so an ordinary formula writes the record as it runs.


# %%
class Tensor:
    def __init__(self, data, operation=None, parents=()):
        self.data = np.asarray(data, dtype=float)
        self.operation = operation
        self.parents = parents  # the inputs
        self.grad = np.zeros_like(self.data)

    def __add__(self, other):
        return apply(Add, self, other)

    def __mul__(self, other):
        return apply(Multiply, self, other)

    def __matmul__(self, other):
        return apply(MatMul, self, other)


def apply(operation, *inputs: Tensor) -> Tensor:
    return Tensor(operation.forward(*(t.data for t in inputs)), operation, inputs)


# %% [markdown]
# ## Backward
# An operation may hand back only when it has received everything, from *all* results that were made
# from its own. So put the tensors in an order where each comes after those that it was made from (a
# **topological** order), and go through it from the end.
#
# One more thing. The model below adds a single row of numbers, a **bias**, to a matrix: numpy adds
# it to each row, as if it were copied. This is called **broadcasting**:
#
#     [[1, 2, 3],   +   [10, 20, 30]   =   [[11, 22, 33],
#      [4, 5, 6]]                           [14, 25, 36]]
#
# A nudge of the 10 changes both 11 and 14. So the gradient of the bias is the sum over the rows.


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
    """Add the slope of root, a single number, to the grad of every tensor that it was made from."""
    root.grad = np.ones(())
    for t in reversed(order(root)):
        if t.operation:
            handed = t.operation.backward(t.grad, *(parent.data for parent in t.parents))
            for parent, g in zip(t.parents, handed):
                if g.ndim > parent.data.ndim:  # it was copied to each row
                    g = g.sum(0)
                parent.grad = parent.grad + g


x = Tensor(2.0)
y = Tensor(3.0)
a = x * y
b = x * x
f = a + b
backward(f)
names = {x: "x", y: "y", a: "a", b: "b", f: "f"}
rows = []
for t in topological(f):
    made = [t.operation.__name__, *(names[p] for p in t.parents)] if t.operation else ["given"]
    rows.append((names[t], " ".join(made), t.data.item(), t.grad.item()))
lesson.table(["tensor", "made by", "value", "gradient"], rows, "f = x y + x x at x = 2, y = 3")
lesson.holds((x.grad, y.grad) == (7, 2), "x has the gradient y + 2 x = 7, y has x = 2")

# %% [markdown]
# ## A model, and torch as judge
# The library is done; it was about 70 lines. Give it a model: the two matrices of exercise 2, with
# a third between them and a bias. Each byte gets a vector h of 16 numbers; h and what a matrix
# makes of h are added up, and a last matrix turns the sum into 256 scores. Note that h is used
# twice. `scores` runs on our tensors and on torch's: to both it is only `@` and `+`. The gradient
# of each weight is compared with torch's, at each of 40 steps of gradient descent.


# %%
def scores(x, w):
    h = x @ w[0]
    return (h + h @ w[1]) @ w[2] + w[3]


text = lesson.bytes_of_stdlib(513)
x = np.eye(256)[text[:-1]]  # (512, 256): in each row a 1, at the place of its byte
hot = np.eye(256)[text[1:]]  # (512, 256), the bytes that come next
rng = np.random.default_rng(0)
shapes = [(256, 16), (16, 16), (16, 256), (256,)]
w = [Tensor(rng.normal(0, 0.2, shape)) for shape in shapes]
twins = [torch.from_numpy(t.data).requires_grad_() for t in w]  # the same numbers in memory
rows = []
for step in range(40):
    for t in w:
        t.grad = np.zeros_like(t.data)  # else backward adds to the gradient of the step before
    products.clear()
    loss = apply(CrossEntropy, scores(Tensor(x), w), Tensor(hot))
    forward_work = sum(products)
    backward(loss)
    theirs = F.cross_entropy(scores(torch.from_numpy(x), twins), torch.from_numpy(text[1:]))
    gradients = torch.autograd.grad(theirs, twins)
    far = max(np.abs(t.grad - g.numpy()).max() for t, g in zip(w, gradients))
    rows.append((step, loss.data.item(), far))
    for t in w:
        t.data -= RATE * t.grad  # the twins' too: it is the same memory
weights = sum(t.data.size for t in w)
columns = ["step", "loss (nats)", "largest distance to torch"]
lesson.table(columns, rows[::13], f"gradients of {weights:,} weights")
lesson.holds(all(far < 1e-12 for _, _, far in rows), "each gradient is torch's, within 1e-12")
lesson.holds(rows[-1][1] < rows[0][1] - 2, "40 steps with them lower the loss by over 2 nats")

# %% [markdown]
# (A **nat** is the unit of a loss with the natural logarithm: 1 nat is 1.44 bits.)
#
# ## What it costs
# Forward takes one matrix product for each `@`, and backward two of the same size. (Ours works out
# a gradient for the text too, which nobody needs; torch leaves it out.) This is all, however many
# weights there are, and so a step of training costs about three times as much as a prediction. To
# nudge each weight would cost a forward for every one of them.
#
# There is a price. The rule of a product needs both factors again, so each result is kept until
# backward has passed it: this is why training takes far more memory than predicting.

# %%
backward_work = sum(products) - forward_work
nudging = weights * forward_work
rows = [("forward", forward_work), ("backward", backward_work), ("nudging", nudging)]
lesson.table(["way", "multiplications"], rows, "work for 512 bytes")
lesson.holds(backward_work == 2 * forward_work, "backward takes twice the products of forward")

# %%
fig = lesson.figure(9, 3.4)
left, right = fig.subplots(1, 2, width_ratios=[3, 2])
places = {"x": (0, 1), "y": (0, 0), "a": (1, 0), "b": (1, 1), "f": (2, 0.5)}
handed = {}
for t in topological(f):
    said = f"{names[t]} = {t.data:g}\ngradient {t.grad:g}"
    left.text(*places[names[t]], said, ha="center", va="center")
    if t.operation:
        for p, g in zip(t.parents, t.operation.backward(t.grad, *(p.data for p in t.parents))):
            handed.setdefault((names[t], names[p]), []).append(f"{g:g}")
for (above, below), received in handed.items():
    arrow = dict(arrowstyle="->", color="crimson", shrinkA=38, shrinkB=38)
    left.annotate("", places[below], places[above], arrowprops=arrow)
    middle = np.add(places[above], places[below]) / 2
    left.text(*middle + (0, 0.06), " + ".join(received), color="crimson", ha="center")
left.set(xlim=(-0.4, 2.4), ylim=(-0.3, 1.3), title="what is handed back for f = x y + x x")
left.set_axis_off()
bars = right.bar(*zip(*rows), color=["silver", "crimson", "silver"])
right.set(yscale="log", ylim=(1e6, 1e11), title="multiplications, for 512 bytes")
lesson.save(fig, "03_autograd")

# %% [markdown]
# ## Trap
# Walk back in the order in which you meet the tensors, and one that is used twice hands on before
# it has received everything: right on every chain, wrong where a branch joins again, as in h + h h.
# From the sum one meets h first, then h h: h hands on the 1 that it has, and receives its 2 h from
# the product too late. No error is raised, and the loss may even fall.


# %%
def as_met(root: Tensor) -> list[Tensor]:
    met = [root]
    for t in met:
        met += [parent for parent in t.parents if parent not in met]
    return met[::-1]


def gradient(order) -> float:
    x = Tensor(3.0)
    h = x * Tensor(1.0)
    backward(h + h * h, order)
    return x.grad.item()


lesson.holds(gradient(topological) == 7, "sorted, h + h h at 3 has the gradient 1 + 2 h = 7")
lesson.holds(gradient(as_met) == 1, "in the order met, h hands on 1, before the 6 arrive")

# %% [markdown]
# ## Exercise
# `exercises/ex03.py`: write `backward` for given nodes, of any shape, however many there are.
# `python course/check.py 3`
