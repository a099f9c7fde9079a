"""Exercise 36: take Megatron's fused matrix apart.

    split_qkv(w, n_head, n_kv_head, head_dim) -> q, k, v

w has (n_head + 2 n_kv_head) * head_dim rows, by group: the rows of the queries that share a key
(n_head / n_kv_head of them, one after another), then those of that key, then its value's; then the
next group. q gets n_head * head_dim rows, k and v get n_kv_head * head_dim each, heads in order.
w is a weight (rows, n_embd) or a bias (rows,): what comes out has the same number of dimensions.
"""

from torch import Tensor


def split_qkv(w: Tensor, n_head: int, n_kv_head: int, head_dim: int) -> tuple[Tensor, ...]:
    raise NotImplementedError("write split_qkv, then: python course/check.py 36")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""
    import torch

    def fused_attention(x, w, bias, H, G, D):
        """Attention as Megatron computes it: x (T, C) -> (T, H * D)."""
        parts = (x @ w.T + bias).view(len(x), G, H // G + 2, D)
        outs = []
        for head in range(H):
            group, place = divmod(head, H // G)
            q, k, v = parts[:, group, place], parts[:, group, -2], parts[:, group, -1]
            outs.append((q @ k.T / D**0.5).softmax(-1) @ v)
        return torch.cat(outs, 1)

    def split_attention(x, weights, biases, H, G, D):
        """The same from q, k and v apart, as a class of transformers computes it."""
        q, k, v = (x @ w.T + b for w, b in zip(weights, biases))
        outs = []
        for head in range(H):
            own, shared = (slice(i * D, (i + 1) * D) for i in (head, head // (H // G)))
            outs.append((q[:, own] @ k[:, shared].T / D**0.5).softmax(-1) @ v[:, shared])
        return torch.cat(outs, 1)

    generator = torch.Generator().manual_seed(19)
    for H, G, D in ((1, 1, 2), (4, 4, 3), (6, 1, 4), (8, 2, 2), (15, 5, 4), (9, 3, 1)):
        shape, C = f"{H} heads in {G} groups of {D} channels", 10
        w, bias, x = (
            torch.randn(size, generator=generator, dtype=torch.float64)
            for size in (((H + 2 * G) * D, C), ((H + 2 * G) * D,), (5, C))
        )
        before = w.clone()
        weights = answer.split_qkv(w, H, G, D)
        biases = answer.split_qkv(bias, H, G, D)
        assert torch.equal(w, before), f"{shape}: the matrix that was handed over has been changed"
        rows = H * D, G * D, G * D
        for what, given, tail in (("weights", weights, (C,)), ("biases", biases, ())):
            sizes = [tuple(part.shape) for part in given]
            want = [(n, *tail) for n in rows]
            assert sizes == want, f"{shape}: the {what} have the shapes {sizes}, not {want}"
        far = fused_attention(x, w, bias, H, G, D) - split_attention(x, weights, biases, H, G, D)
        by_head = far.abs().view(5, H, D).amax((0, 2))  # (H,)
        wrong = (by_head > 1e-9).nonzero().flatten().tolist()
        assert not wrong, f"{shape}: attention differs by {by_head.max():.2g}, in the heads {wrong}"
