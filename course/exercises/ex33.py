"""Exercise 33: find the circuit that copies, in a model that you can run but not read.

    run(ids, edit=None) -> logits (T, V), attention: a list with a tensor (H, T, T) for each layer

runs a small model of attention layers on the ids (T,). attention[layer][head, i, j] is the share
that position i gives to position j. If you pass an edit, each layer calls edit(layer, z) with the
outputs of its heads, z (H, T, D), and goes on with what it returns (of the same shape). z is the
model's own: return another tensor, and don't change this one.

    habits(attention, ids) -> back, copy        two tensors (L, H)

back: the mean, over the positions 1, 2, ..., of the share on the position before. copy: the mean,
    over the positions whose token has come before, of the share on what followed those earlier
    copies: position i looks at j with ids[j - 1] == ids[i], 1 <= j <= i. (Add up the shares if
    there are several such places. j = i counts too: in "a a", the second a follows the first.)

    worth(run, ids) -> tensor (L, H)

How many nats the mean loss grows when you replace one head's output with its own mean over the
    positions of this text. (The mean and not zero, because a head may add a constant that the
    others count on.) The loss is that of predicting ids[1:] from the positions before.

    circuit(run, ids) -> ((layer, head), (layer, head))

The head with the largest copy share; and, among the heads in earlier layers, the one that it needs:
    the one whose replacement (as in worth) lowers the first head's copy share most.
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
    from subject import equal, same

    # ------------------------------------------------------------------------------ habits
    draw = torch.Generator().manual_seed(33)
    for L, H, text in ((1, 1, [0, 0]), (1, 1, [0, 1, 0]), (2, 3, [2, 0, 1, 2, 2, 0, 3, 1, 0])):
        T = len(text)
        scores = 2 * torch.randn(L, H, T, T, generator=draw)
        shares = (scores - torch.full((T, T), torch.inf).triu(1)).softmax(-1)
        back, copy = answer.habits([*shares], torch.tensor(text))
        right = shares[:, :, range(1, T), range(T - 1)].mean(-1)
        same(back.float(), right, "back", 1e-5)
        places = [[j for j in range(1, i + 1) if text[j - 1] == text[i]] for i in range(T)]
        copied = [shares[:, :, i, js].sum(-1) for i, js in enumerate(places) if js]
        same(copy.float(), sum(copied) / len(copied), "copy", 1e-5)

    # --------------------------------------------------- a model whose results stand in tables
    L = 4
    H = 3
    ids = torch.tensor([0, 1, 2] * 4)
    T = len(ids)
    outputs = torch.randn(L, H, T, 5, generator=draw)
    losses = torch.linspace(0.5, 1.6, L * H).view(L, H)  # when a head is replaced; else 1
    copies = {(2, 1): 0.6, (3, 0): 0.5}  # the copy shares that are not 0
    after = {  # and those that differ when a head is replaced
        (0, 0): {(2, 1): 0.95},
        (0, 1): {(2, 1): 0.4},
        (0, 2): {(3, 0): 0.1},
        (1, 0): {(2, 1): 0.5},
    }

    def run(ids, edit=None):
        new = torch.stack([edit(layer, z) if edit else z for layer, z in enumerate(outputs)])
        replaced = [*map(tuple, (new != outputs).any(-1).any(-1).nonzero().tolist())]
        assert len(replaced) < 2, f"one edit replaced the heads {replaced}, and should replace one"
        attention = torch.zeros(L, H, T, T)
        attention[..., 0] = 1
        nats = torch.linspace(0.5, 1.5, T - 1)
        shares = copies
        for head in replaced:
            mean = outputs[head].mean(0).expand(T, 5)
            what = f"in layer {head[0]} edit returned a z whose z[{head[1]}]"
            same(new[head], mean, what, 1e-4, 1e-4)
            shares = copies | after.get(head, {})
            nats = nats * losses[head]
        for head, share in shares.items():
            attention[head][3:, 0] -= share
            attention[head].diagonal(-2)[1:] += share
        logits = torch.zeros(T, 3)
        logits[range(T - 1), ids[1:]] = torch.log(2 / nats.expm1())
        return logits, [*attention]

    run = answer.lent(run)
    same(answer.worth(run, ids).float(), losses - 1, "from a loss of 1, worth", 0, 1e-5)
    found = [tuple(map(int, head)) for head in answer.circuit(run, ids)]
    equal(found, [(2, 1), (0, 1)], f"copy shares {copies}, with a head replaced {after}: circuit")
