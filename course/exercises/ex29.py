"""Exercise 29: the order of 1F1B (one forward, one backward, in turns).

    one_f_one_b(2, 3) -> [["F0", "F1", "B0", "F2", "B1", "B2"],
                          ["F0", "B0", "F1", "B1", "F2", "B2"]]

P devices, one stage of the model on each, and M micro-batches; "F1" is the forward pass of
micro-batch 1 through the device's stage, "B1" its backward pass. An operation runs as soon as its
device has done everything before it in its list, and its input is there: F needs the same F of the
device before; B needs the F of its own device, and the B of the device after (the last has none).
Rules:
1. each device runs each F and each B exactly once;
2. all is over after (M + P - 1)(t_F + t_B), the times of one forward and one backward pass;
3. device d never keeps more than P - d activations: a forward pass adds one, its backward pass
   releases it.
"""


def one_f_one_b(P: int, M: int) -> list[list[str]]:
    raise NotImplementedError("write one_f_one_b, then: python course/check.py 29")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""

    def run(orders: list[list[str]], cost: dict) -> float:
        done, free, left = {}, [0] * len(orders), [list(order) for order in orders]
        while any(left):
            waiting = {d: order[0] for d, order in enumerate(left) if order}
            before = len(done)
            for d in waiting:
                while left[d]:
                    kind, m = left[d][0][0], left[d][0][1:]
                    needs = [("F", m, d - 1)] if kind == "F" and d else []
                    if kind == "B":
                        needs = [("F", m, d)] + [("B", m, d + 1)] * (d + 1 < len(orders))
                    if not all(op in done for op in needs):
                        break
                    free[d] = max([free[d], *(done[op] for op in needs)]) + cost[kind]
                    done[kind, m, d] = free[d]
                    left[d].pop(0)
            assert len(done) > before, f"deadlock, device: operation that waits forever {waiting}"
        return max(free)

    for P, M in ((1, 3), (2, 1), (2, 3), (3, 3), (4, 8), (4, 2), (5, 7), (8, 16)):
        orders = [list(order) for order in answer.one_f_one_b(P, M)]
        assert len(orders) == P, f"P = {P}, M = {M}: {len(orders)} devices have a list"
        all_ops = sorted(f"{kind}{m}" for m in range(M) for kind in "FB")
        for d, order in enumerate(orders):
            case = f"P = {P}, M = {M}, device {d}"
            assert sorted(order) == all_ops, f"{case} must run each F and B once: {order}"
            kept = 0
            for i, op in enumerate(order):
                kept += 1 if op[0] == "F" else -1
                keeps = f"keeps {kept} activations, may keep {P - d}, after {order[: i + 1]}"
                assert kept <= P - d, f"rule 3: {case} {keeps}"
        for cost in (dict(F=1, B=2), dict(F=1, B=1), dict(F=3, B=4)):
            end, best = run(orders, cost), (M + P - 1) * sum(cost.values())
            times = f"P = {P}, M = {M}, times {cost}: ends at {end}, 1F1B at {best}"
            assert end == best, f"rule 2: {times}: {orders}"
