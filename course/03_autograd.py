# %% [markdown]
# # 3. Autograd: what `backward` does
#
# **Afterwards** you know what `backward` does, line by line, and what a gradient costs.
#
# **Question.** Lesson 2 nudged three weights, one at a time, to find their slopes; then a single
# call of `backward` found all 65,536. How can a library find the slopes of any formula?
#
# Source: *NfNN*, "1.1.2 Definição de diferenciação automática", "3.3 Diferenciação automática".
# Core file: none, it is all here; torch judges. Before: lesson 2. Next: lesson 4. Takes 4 seconds
# on two cores.

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
# Nudge x by 0.001. Then a grows by y times that, 0.003. b grows by 0.004 (0.002 from each of its
# two factors, if we neglect 0.000001), so f grows by 0.007: the slope of f for x is 7. Nobody had
# to look at the whole formula. Each operation has a small rule of its own. Along a path from x to f
# you multiply the slopes; where there are several paths, you add up their products. This is the
# **chain rule**.
#
# Start at the end, because there is one f and there may be a million x. The slope of f for f is 1.
# Then each operation hands something back to each of its inputs: what it has received itself, times
# the slope of its result for this input:
#
#     f = a + b   received 1: hands 1 to a, and 1 to b
#     b = x * x   received 1: hands 1 * x = 2 to its first factor, and 1 * x = 2 to its second
#     a = x * y   received 1: hands 1 * y = 3 to x, and 1 * x = 2 to y
#
# x has received 2 + 2 + 3 = 7, and y has received 2. These are their slopes, and we visited each
# operation once. What a number has received is called its **gradient**. The gradient of an array is
# an array of the same shape: the slope of f for each of its numbers.
#
# ## A table of rules
# So a library needs one rule for each operation. `forward` computes the result. `backward` gets
# `g`, the gradient of the result, and returns the gradient of each input.
#
# The rule for the matrix product, a (N, D) times b (D, V), is the last part of exercise 2. Nudge
# a[i, d], and number j of row i of the result changes by b[d, j] times the nudge. So the gradient
# of a[i, d] is the sum over j of g[i, j] * b[d, j], which is g @ b.T; `.T` is the **transpose**,
# where rows become columns. The shapes allow nothing else: (N, V) @ (V, D) is (N, D), the shape of
# a.
#
# The loss is lesson 2's, with the natural logarithm. The field has its own words for them: the
# scores are **logits**, and the loss is the **cross-entropy**. Its unit is the **nat**: 1 nat is
# 1.44 bits. The bytes that came are given as rows with a single 1, so the rule of lesson 2, "its
# probability, minus 1 for the one that came", becomes `p - hot`.

# %%
products = []  # how many multiplications each matrix product takes


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
        return g * (p - hot) / len(a), 0 * hot  # nobody needs a gradient for the bytes that came


# %% [markdown]
# ## The record
# At the end, the library has to know which operations there were. So each result remembers the
# operation and the inputs it was made from. Python lets a class say what `+`, `*` and `@` mean for
# it (`__add__`, `__mul__`, `__matmul__`), so an ordinary formula writes the record as it runs.


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
# A result may hand something back only once it has received everything itself, from *every*
# operation that used it. So put the tensors in an order where each comes after those it was made
# from (a **topological** order), and walk through it from the end.
#
# One more thing. The model below adds a single row of numbers, a **bias**, to a matrix: numpy adds
# it to every row, as if you had copied it. This is called **broadcasting**:
#
#     [[1, 2, 3],   +   [10, 20, 30]   =   [[11, 22, 33],
#      [4, 5, 6]]                           [14, 25, 36]]
#
# Nudge the 10, and both 11 and 14 change. So the gradient of the bias is the sum over the rows.


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
    """Add the slope of root, a single number, to the grad of every tensor it was made from."""
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
lesson.table(["tensor", "made by", "value", "gradient"], rows, "f = x * y + x * x at x = 2, y = 3")
lesson.holds((x.grad, y.grad) == (7, 2), "the gradient of x is y + 2 * x = 7, that of y is x = 2")

# %% [markdown]
# ## A model, with torch as the judge
# The library is done, in about 70 lines. Give it a model: the two matrices of exercise 2, with a
# third one between them and a bias at the end. Each byte gets a vector h of 16 numbers; we add to h
# what a matrix makes of h, and a last matrix turns the sum into 256 scores. Note that h is used
# twice. `scores` runs on our tensors and on torch's: to both, it is only `@` and `+`. At each of 40
# steps of gradient descent, the gradient of every weight is compared with torch's.


# %%
def scores(x, w):
    h = x @ w[0]
    return (h + h @ w[1]) @ w[2] + w[3]


text = lesson.bytes_of_stdlib(513)
x = np.eye(256)[text[:-1]]  # (512, 256): each row has a 1, at the place of its byte
hot = np.eye(256)[text[1:]]  # (512, 256), the bytes that come next
rng = np.random.default_rng(0)
shapes = [(256, 16), (16, 16), (16, 256), (256,)]
w = [Tensor(rng.normal(0, 0.2, shape)) for shape in shapes]
twins = [
    torch.from_numpy(t.data).requires_grad_() for t in w
]  # the same numbers, in the same memory
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
        t.data -= RATE * t.grad  # and with them the twins: they share their memory
weights = sum(t.data.size for t in w)
lesson.table(
    ["step", "loss (nats)", "largest distance to torch"],
    rows[::13],
    f"gradients of {weights:,} weights",
)
lesson.holds(
    all(far < 1e-12 for _, _, far in rows), "every gradient is the same as torch's, within 1e-12"
)

# %% [markdown]
# ## What it costs
# Forward takes one matrix product for each `@`, and backward takes two of the same size. (Ours also
# works out a gradient for the text, which nobody needs; torch leaves it out.) That is all, however
# many weights there are: a step of training costs about three times as much as a prediction. If you
# nudged the weights instead, every single one would cost a forward.
#
# There is a price. The rule of a product needs both of its factors again, so each result is kept
# until backward has passed it. This is why training takes far more memory than predicting.

# %%
backward_work = sum(products) - forward_work
nudging = weights * forward_work
rows = [("forward", forward_work), ("backward", backward_work), ("nudging", nudging)]
lesson.table(["work", "multiplications"], rows, "what 512 bytes cost")
lesson.holds(
    backward_work == 2 * forward_work, "backward takes twice the multiplications of forward"
)

# %%
fig = lesson.figure(7, 3.4)
graph = fig.subplots()
places = {"x": (0, 1), "y": (0, 0), "a": (1, 0), "b": (1, 1), "f": (2, 0.5)}
handed = {"fa": "1", "fb": "1", "bx": "2 + 2", "ax": "3", "ay": "2"}  # as worked out above
for t in topological(f):
    said = f"{names[t]} = {t.data:g}\ngradient {t.grad:g}"
    graph.text(*places[names[t]], said, ha="center", va="center")
for (above, below), received in handed.items():
    arrow = dict(arrowstyle="->", color="crimson", shrinkA=38, shrinkB=38)
    graph.annotate("", places[below], places[above], arrowprops=arrow)
    middle = np.add(places[above], places[below]) / 2
    graph.text(*middle + (0, 0.06), received, color="crimson", ha="center")
graph.set(xlim=(-0.4, 2.4), ylim=(-0.3, 1.3), title="what f = x * y + x * x hands back (red)")
graph.set_axis_off()
lesson.save(fig, "03_autograd")

# %% [markdown]
# ## Trap
# Suppose you walk back in the order in which you meet the tensors. Then a tensor that is used twice
# hands on before it has received everything: right on every chain, wrong where branches join again,
# as in `h + h * h`. Walking back from the sum, you meet h first, then h * h. So h hands on the 1 it
# has received from the sum; the 2 * h that it receives from the product comes too late. No error is
# raised, and the loss may even fall.


# %%
def as_met(root: Tensor) -> list[Tensor]:
    met = [root]
    for t in met:  # `met` grows on the way, and the loop goes on through what is new
        met += [parent for parent in t.parents if parent not in met]
    return met[::-1]


def gradient(order) -> float:
    x = Tensor(3.0)
    h = x * Tensor(1.0)
    backward(h + h * h, order)
    return x.grad.item()


lesson.holds(
    gradient(topological) == 7, "in topological order, h + h * h at 3 has gradient 1 + 2 * h = 7"
)
lesson.holds(gradient(as_met) == 1, "in the order met, h hands on its 1 before the 6 arrives")

# %% [markdown]
# ## Exercise
# `exercises/ex03.py`: write `backward` for given nodes, of any shape, however many there are.
# `python course/check.py 3`
