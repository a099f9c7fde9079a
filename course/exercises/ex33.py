"""Exercise 33: find the circuit that copies, in a model that you can run but not read.

    run(ids, edit=None) -> logits (T, V), attention: a list with a tensor (H, T, T) for each layer

runs a small model of attention layers on the ids (T,). attention[layer][head, i, j] is the share
that position i gives to position j. If edit is given, edit(layer, z) is called in each layer with
the outputs of its heads, z (H, T, D), and what it returns (of the same shape) is used instead.

    habits(attention, ids) -> back, copy        two tensors (L, H)

back: the mean over the positions 1, 2, ... of the share on the position before. copy: the mean,
    over the positions whose token has come before, of the share on what followed those earlier
    copies: position i looks at j with ids[j - 1] == ids[i], 1 <= j <= i. (Shares on several such
    places are added up. j = i counts too: in "a a", the second a follows the first.)

    worth(run, ids) -> tensor (L, H)

How many nats the mean loss grows when one head's output is replaced with its own mean over the
    positions of this text. (With the mean and not with zero, since a head may add a constant that
    the others count on.) The loss is that of predicting ids[1:] from the positions before.

    circuit(run, ids) -> ((layer, head), (layer, head))

The head with the largest copy share; and of the heads in earlier layers the one that it needs: that
    whose replacement (as in worth) lowers the first one's copy share most.
"""

from torch import Tensor


def habits(attention: list[Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("write the three functions, then: python course/check.py 33")


def worth(run, ids: Tensor) -> Tensor:
    raise NotImplementedError("write worth too, then: python course/check.py 33")


def circuit(run, ids: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    raise NotImplementedError("write circuit too, then: python course/check.py 33")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import torch
    from subject import same

    # ------------------------------------------------------------------------------ habits
    draw = torch.Generator().manual_seed(33)
    shapes = [(1, 1, 2, 1), (1, 1, 5, 2), (2, 3, 12, 4), (2, 3, 12, 4), (1, 2, 300, 200)]
    for L, H, T, V in shapes:
        ids = torch.randint(V, (T,), generator=draw) * 65_536
        ids[0] = ids[-1]  # something comes again
        scores = torch.randn(L, H, T, T, generator=draw).double() * 2
        shares = (scores - torch.full((T, T), torch.inf).triu(1)).softmax(-1)
        found = answer.habits([*shares], ids)
        text = ids.tolist()
        places = [[j for j in range(1, i + 1) if text[j - 1] == text[i]] for i in range(T)]
        copies = [shares[..., i, js].sum(-1) for i, js in enumerate(places) if js]
        same(found[0], sum(shares[..., i, i - 1] for i in range(1, T)) / (T - 1), "back")
        same(found[1], sum(copies) / len(copies), "copy")

    # ------------------------------------------------------------------------------ a model
    V = 12
    tokens = torch.eye(V).double()
    trades = {  # what a head writes: into which part of the stream, how loudly
        "previous": (1, 1.0),
        "unread": (1, 0.0),  # looks back as well
        "idle": (0, 0.0),
        "induction": (2, 4.0),
        "faint": (2, 1.0),  # the same, less sharply
        "constant": (2, -6.0),  # takes back what the output adds to token 0
        "restore": (0, -3.0),  # takes back what was added to token 11
    }

    def head(trade: str, x):
        """-> attention (T, T), output (T, 3 V)."""
        to, loudly = trades[trade]
        value, before, _ = x.chunk(3, 1)
        scores = torch.zeros_like(x @ x.T)
        if trade in ("previous", "unread"):
            scores.diagonal(-1).fill_(9.0)
        elif trade in ("induction", "faint"):
            scores = 3.0 * loudly * value @ before.T
        else:
            value = tokens[[0 if trade == "constant" else 11] * len(x)]
        p = (scores - torch.full_like(scores, torch.inf).triu(1)).softmax(-1)
        out = torch.zeros_like(x)
        out.chunk(3, 1)[to].copy_(loudly * (p @ value))
        return p, out

    def build(layers: list[list[str]]):
        """A model whose heads have these trades. The residual stream has three parts: the token,
        the token before (once somebody has written it there), and the logits. With a head that
        restores, token 11 is added everywhere until that head takes it away."""

        def run(ids, edit=None):
            attention = []
            x = torch.zeros(len(ids), 3 * V).double()
            x[:, :V] = tokens[ids] + 3.0 * ("restore" in layers[0]) * tokens[11]
            for layer, row in enumerate(layers):
                p, z = map(torch.stack, zip(*(head(trade, x) for trade in row)))
                attention.append(p)
                edited = edit(layer, z.clone()) if edit else z
                assert edited.shape == z.shape, f"edit returned {tuple(edited.shape)}"
                x = x + edited.sum(0)
            return x[:, 2 * V :] + 6.0 * tokens[0], attention

        return run

    def nats(run, ids, at=None, head=0):
        """The mean loss, with the mean in place of the output of a head in layer `at`."""

        def edit(layer, z):
            if layer == at:
                z[head] = z[head].mean(0)
            return z

        return torch.nn.functional.cross_entropy(run(ids, edit)[0][:-1], ids[1:]).item()

    def made(shares, losses):
        """Two layers of two heads; (head replaced) -> copy shares of the second layer, loss."""

        def run(ids, edit=None):
            T = len(ids)
            which = None
            for layer in (0, 1):
                z = torch.arange(2.0 * T).view(2, T, 1)
                changed = edit(layer, z.clone()) != z if edit else z < 0
                for head in changed.sum((1, 2)).nonzero().flatten().tolist():
                    which = layer, head
            maps = torch.zeros(2, 2, T, T)
            maps[..., 0] = 1
            for head, share in enumerate(shares.get(which, shares[None])):
                for i in range(3, T):
                    maps[1, head, i, 0] = 1 - share
                    maps[1, head, i, i - 2] += share
            logits = torch.zeros(T, 3)
            logits[:, 0] = losses.get(which, 0.0)
            return logits, [*maps]

        return run

    ids = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    for shares in (
        {None: (0.9, 0.8), (0, 0): (0.1, 0.8), (0, 1): (0.6, 0.1)},
        {None: (0.5, 0.1), (0, 0): (0.4, 0.1), (0, 1): (0.95, 0.1)},
    ):
        found = answer.circuit(made(shares, {(0, 1): 3.0}), ids)
        wanted = (1, 0), (0, 0)
        assert tuple(map(tuple, found)) == wanted, f"of {shares} it is {found}, not {wanted}"
    once = 7 * torch.arange(V) % V
    for T, model in (
        (30, "constant idle"),  # one layer: no circuit
        (30, "previous idle, induction constant"),
        (30, "unread previous, idle constant, idle induction"),
        (30, "constant idle, unread previous, faint induction"),
        (30, "previous constant, unread induction, unread idle"),
        (16, "previous restore, idle induction"),  # token 11 comes once
        (264, "idle previous, induction idle"),
    ):
        layers = [row.split() for row in model.split(", ")]
        run = build(layers)
        place = {trade: (i, j) for i, row in enumerate(layers) for j, trade in enumerate(row)}
        text = once.repeat(22)[:T]
        for ids in (text, text.flip(0)):
            right = [[nats(run, ids, i, j) for j in range(2)] for i in range(len(layers))]
            right = torch.tensor(right) - nats(run, ids)
            same(answer.worth(run, ids).float(), right, f"heads {model}: worth", 0, 1e-5)
            if "induction" in place:
                found = [tuple(map(int, part)) for part in answer.circuit(run, ids)]
                wanted = [place["induction"], place["previous"]]
                assert found == wanted, f"heads {model}: it is {found}, not {wanted}"
