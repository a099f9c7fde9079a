"""Exercise 30: 1F1B (one forward, one backward, in turns) where messages take time.

    one_f_one_b(2, 3, F=1, B=2, send=0) -> [["F0", "F1", "B0", "F2", "B1", "B2"],
                                            ["F0", "B0", "F1", "B1", "F2", "B2"]]

P devices, one stage of the model on each, and M micro-batches; "F1" is the forward pass of
micro-batch 1 through the device's stage and takes a time F, "B1" its backward pass and takes B.
All times are whole numbers. An operation runs as soon as its device has done everything before it
in its list, and its input is there: F needs the same F of the device before, `send` after that has
ended; B needs the F of its own device, and the B of the device after, `send` after that has ended
(the last device has none). A device computes while its messages travel.

The order of the lesson waits: a device that has sent a forward pass on has a backward pass to do
only after the round trip. With `send` above 0 it needs more forward passes to fill that time.
1. Each device runs each F and each B exactly once.
2. All is over after (M + P - 1)(F + B) + 2 (P - 1) send: the last device never waits once it has
   begun, and the first and last micro-batch travel without delay.
3. Device d never keeps more than 1 + (P - 1 - d)(1 + k) activations, where k is 2 send / (F + B)
   rounded up: a forward pass adds one, its backward pass releases it.
"""


def one_f_one_b(P: int, M: int, F: int, B: int, send: int) -> list[list[str]]:
    raise NotImplementedError("write one_f_one_b, then: python course/check.py 30")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random

    def run(orders: list[list[str]], cost: dict, send: int, case: str) -> int:
        done = {}
        free = [0] * len(orders)
        left = [list(order) for order in orders]
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
                    ready = [done[op] + send * (op[2] != d) for op in needs]
                    free[d] = done[kind, m, d] = max([free[d], *ready]) + cost[kind]
                    left[d].pop(0)
            assert len(done) > before, (
                f"{case}: deadlock; each device waits forever before {waiting}"
            )
        return max(free)

    rng = random.Random(29)
    cases = [(P, M, 1, 2, 0) for P, M in ((1, 3), (2, 1), (2, 3), (4, 8), (4, 2), (8, 16))]
    cases += [(1, 4, 1, 2, 5), (4, 3, 1, 2, 9), (4, 17, 2, 5, 4)]
    cases += [(16, 40, 2, 3, 4), (3, 200, 1, 2, 1), (4, 60, 1, 2, 40)]
    cases += [(4, 16, 9, 16, 1)]  # a small part of a turn is a whole one more
    for _ in range(60):
        F = rng.randint(1, 5)
        B = rng.randint(1, 8)
        send = rng.randint(0, 9)
        cases.append((rng.randint(1, 8), rng.randint(1, 20), F, B, send))
    for P, M, F, B, send in cases:
        case = f"P = {P}, M = {M}, F = {F}, B = {B}, send = {send}"
        orders = [list(order) for order in answer.one_f_one_b(P, M, F, B, send)]
        assert len(orders) == P, f"{case}: {len(orders)} devices have a list"
        all_ops = sorted(f"{kind}{m}" for m in range(M) for kind in "FB")
        for d, order in enumerate(orders):
            assert sorted(order) == all_ops, (
                f"rule 1: {case}: device {d} must run each F and B once: {order[:20]}"
            )
        end = run(orders, dict(F=F, B=B), send, case)
        best = (M + P - 1) * (F + B) + 2 * (P - 1) * send
        assert end == best, (
            f"rule 2: {case}: all is over after {end}, not {best}; the first device's list begins "
            f"{orders[0][:12]}"
        )
        for d, order in enumerate(orders):
            kept = 0
            room = 1 + (P - 1 - d) * (1 + -(-2 * send // (F + B)))
            for i, op in enumerate(order):
                kept += 1 if op[0] == "F" else -1
                assert kept <= room, (
                    f"rule 3: {case}: device {d} keeps {kept} activations after its operation {i}, "
                    f"{op}, and may keep {room}"
                )
