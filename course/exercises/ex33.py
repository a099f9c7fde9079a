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

    torch.manual_seed(33)

    # ------------------------------------------------------------------------------ habits
    for L, H, T, V in ((1, 1, 5, 2), (2, 3, 12, 4), (3, 2, 20, 30)):
        ids = torch.randint(V, (T,))
        ids[0] = ids[T - 1]  # something comes again
        scores = torch.randn(L, H, T, T, dtype=torch.float64) * 2
        shares = scores.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)
        back, copy = torch.zeros(2, L, H, dtype=torch.float64)
        places = {i: [j for j in range(1, i + 1) if ids[j - 1] == ids[i]] for i in range(T)}
        places = {i: js for i, js in places.items() if js}
        for layer, head in ((layer, head) for layer in range(L) for head in range(H)):
            p = shares[layer, head]
            back[layer, head] = sum(p[i, i - 1] for i in range(1, T)) / (T - 1)
            copy[layer, head] = sum(p[i, j] for i in places for j in places[i]) / len(places)
        given = [p.clone() for p in shares]
        said = answer.habits(given, ids.clone())
        assert all(map(torch.equal, given, shares)), "habits has changed the attention it was given"
        for name, right, found in zip(("back", "copy"), (back, copy), said):
            assert found.shape == (L, H), f"{name} has the shape {tuple(found.shape)}, not {(L, H)}"
            far = (found - right).abs()
            assert far.max() < 1e-9, (
                f"ids {ids.tolist()}: {name} is {found.flatten()[far.argmax()]:.4f} for a head, "
                f"and should be {right.flatten()[far.argmax()]:.4f}"
            )

    # ------------------------------------------------------------------------------ a model
    V = 12
    parts = {name: slice(i * V, (i + 1) * V) for i, name in enumerate(("now", "last", "out", "no"))}

    def build(layers: list[list[str]], loud: int):
        """A model whose heads have these trades. The residual stream has four parts: the token, the
        token before (once somebody has written it there), the logits, and one nobody reads. With a
        head that restores, the token `loud` is added everywhere until that head takes it away."""
        wide = 4 * V
        added = any("restore" in trades for trades in layers)

        def head(trade: str, x, T):
            """-> attention (T, T), output (T, wide)."""
            i = torch.arange(T)
            scores = torch.zeros(T, T, dtype=torch.float64)
            to = "no"
            gain = 1.0
            value = x[:, parts["now"]]
            if "previous" in trade:
                scores = 9.0 * (i[:, None] - i == 1)
                to = "last" if trade == "previous" else "no"
            elif "induction" in trade:
                gain = 1.0 if "faint" in trade else 4.0  # faint: the same, less sharply
                scores = 3.0 * gain * value @ x[:, parts["last"]].T
                to = "out"
            elif trade == "first":
                scores[:, 0] = 9.0
            else:  # "constant" takes back what the output adds to token 0, "restore" the loud one
                constants = {"constant": (0, -6.0, "out"), "restore": (loud, -3.0, "now")}
                token, amount, to = constants[trade]
                value = torch.zeros(T, V, dtype=torch.float64)
                value[:, token] = amount
            seen = torch.ones(T, T).tril().bool()
            p = scores.double().masked_fill(~seen, -torch.inf).softmax(-1)
            out = torch.zeros(T, wide, dtype=torch.float64)
            out[:, parts[to]] = gain * (p @ value)
            return p, out

        def run(ids, edit=None):
            T = len(ids)
            attention = []
            x = torch.zeros(T, wide, dtype=torch.float64)
            x[:, parts["now"]] = torch.nn.functional.one_hot(ids, V).double()
            x[:, loud] += 3.0 * added
            for layer, trades in enumerate(layers):
                p, z = map(torch.stack, zip(*(head(trade, x, T) for trade in trades)))
                if edit:
                    before = z.clone()
                    z = edit(layer, z)
                    assert z.shape == before.shape, f"edit returned {tuple(z.shape)}"
                attention.append(p)
                x = x + z.sum(0)
            logits = x[:, parts["out"]].clone()
            logits[:, 0] += 6.0
            return logits, attention

        return run

    def nats(logits, ids):
        return torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).item()

    def right_worth(run, ids, at, head):
        def edit(layer, z):
            z = z.clone()
            if layer == at:
                z[head] = z[head].mean(0)
            return z

        return nats(run(ids, edit)[0], ids) - nats(run(ids)[0], ids)

    models = [
        [["constant", "first"]],  # one layer: no circuit
        [["previous", "first"], ["induction", "constant"]],
        [["idle previous", "previous"], ["first", "constant"], ["first", "induction"]],
        [["constant", "first"], ["idle previous", "previous"], ["faint induction", "induction"]],
        [["previous", "constant"], ["idle previous", "induction"], ["idle previous", "first"]],
        [["previous", "restore"], ["first", "induction"]],
    ]
    for layers in models:
        once = torch.randperm(V)
        run = build(layers, loud=int(once[-1]))
        ids = torch.cat([once, once, once[: V // 2]])
        if "restore" in layers[0]:
            ids = torch.cat([once, once[:4]])  # the loud token comes once
        said = answer.worth(run, ids.clone())
        assert said.shape == (len(layers), len(layers[0])), f"worth: {tuple(said.shape)}"
        for layer, head in torch.ones_like(said).nonzero().tolist():
            right = right_worth(run, ids, layer, head)
            assert abs(said[layer, head] - right) < 1e-5, (
                f"heads {layers}: the {layers[layer][head]!r} head {layer, head} is worth "
                f"{right:.4f} nats, not {said[layer, head]:.4f}"
            )
        if len(layers) == 1:
            continue
        place = {trade: (i, j) for i, row in enumerate(layers) for j, trade in enumerate(row)}
        found = tuple(tuple(int(x) for x in part) for part in answer.circuit(run, ids.clone()))
        wanted = place["induction"], place["previous"]
        assert found == wanted, f"heads {layers}: the circuit is {wanted}, not {found}"
