"""Exercise 36: the reference, and answers that the oracle must refuse."""


def split_qkv(w, n_head, n_kv_head, head_dim):
    groups = w.view(n_kv_head, -1, *w.shape[1:])
    queries = n_head // n_kv_head * head_dim
    return tuple(part.flatten(0, 1) for part in groups.split([queries, head_dim, head_dim], 1))


def thirds(w, n_head, n_kv_head, head_dim):
    """All queries, then all keys, then all values."""
    return w.split([n_head * head_dim, n_kv_head * head_dim, n_kv_head * head_dim])


def as_without_groups(w, n_head, n_kv_head, head_dim):
    """Query, key, value of every head in turn, as where each head has a key of its own."""
    size = w.shape[0] // 3 // head_dim
    heads = w[: 3 * size * head_dim].view(size, 3, head_dim, *w.shape[1:])
    q, k, v = (heads[:, i].flatten(0, 1) for i in range(3))
    missing = n_head * head_dim - len(q)
    q = q if missing <= 0 else w[: n_head * head_dim]
    return q[: n_head * head_dim], k[: n_kv_head * head_dim], v[: n_kv_head * head_dim]


def swapped(w, n_head, n_kv_head, head_dim):
    q, k, v = split_qkv(w, n_head, n_kv_head, head_dim)
    return q, v, k


def key_first(w, n_head, n_kv_head, head_dim):
    """The groups are found, but in each the key and the value are taken from the front."""
    groups = w.view(n_kv_head, -1, *w.shape[1:])
    sizes = [head_dim, head_dim, n_head // n_kv_head * head_dim]
    k, v, q = (part.flatten(0, 1) for part in groups.split(sizes, 1))
    return q, k, v


WRONG = {  # name -> what of the reference it replaces
    "thirds instead of groups": dict(split_qkv=thirds),
    "as if every head had its own key": dict(split_qkv=as_without_groups),
    "k and v swapped": dict(split_qkv=swapped),
    "the key first": dict(split_qkv=key_first),
}
