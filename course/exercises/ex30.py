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
1. Each device has a new list, with each F and each B exactly once.
2. All is over after (M + P - 1)(F + B) + 2 (P - 1) send: the last device never waits once it has
   begun, and the first and last micro-batch travel without delay.
3. Device d never keeps more than 1 + (P - 1 - d)(1 + k) activations, where k is 2 send / (F + B)
   rounded up: a forward pass adds one, its backward pass releases it.
"""


def one_f_one_b(P: int, M: int, F: int, B: int, send: int) -> list[list[str]]:
    raise NotImplementedError("write one_f_one_b, then: python course/check.py 30")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random
    from itertools import accumulate

    def check(P, M, F, B, send):
        orders = answer.one_f_one_b(P, M, F, B, send)
        lists = all(isinstance(order, list) for order in orders)
        assert lists, "rule 1: an order is no list"
        assert len({*map(id, orders)}) == P, "rule 1: not a list for each device"
        ops = sorted(f"{kind}{m}" for m in range(M) for kind in "FB")
        left = []  # of each device, the last first
        done = {}  # (micro-batch, step of 2 P): when; first the F of each device, then the B
        for d, order in enumerate(orders):
            once = sorted(order) == ops
            assert once, f"rule 1: device {d} must have each F and B once: {order[:12]}"
            kept = max(accumulate(1 if op[0] == "F" else -1 for op in order))
            room = 1 + (P - 1 - d) * (1 + -(-2 * send // (F + B)))
            assert kept <= room, f"rule 3: device {d} keeps {kept} activations, and may keep {room}"
            left.append([(op[1:], d if op[0] == "F" else 2 * P - 1 - d) for op in order[::-1]])
            done |= {(m, -1): -send for m, _ in left[0]}
        free = [0] * P
        while any(left):
            before = len(done)
            for d, steps in enumerate(left):
                while steps and (steps[-1][0], steps[-1][1] - 1) in done:
                    m, step = steps.pop()
                    ready = done[m, step - 1] + send * (step != P)
                    free[d] = done[m, step] = max(free[d], ready) + (F if step < P else B)
            assert len(done) > before, "deadlock: each device waits for another"
        end = max(free)
        best = (M + P - 1) * (F + B) + 2 * (P - 1) * send
        assert end == best, f"rule 2: all is over after {end}, not {best}: {orders[0][:12]}"

    rng = random.Random(29)
    for P, M in ((1, 3), (2, 1), (2, 3), (4, 8), (4, 2), (8, 16)):
        check(P, M, 1, 2, 0)
    check(4, 16, 9, 16, 1)  # a small part of a turn is a whole one more
    for send in (1, 9, 40):
        for F, B in ((1, 2), (1, 5), (2, 5)):
            check(3, 60, F, B, send)
    for _ in range(60):
        check(*(rng.randint(1, most) for most in (8, 20, 5, 8, 9)))
    check(16, 40, 2, 3, 4)
    check(300, 3, 1, 2, 1)
    check(3, 300, 1, 2, 98_304)  # k is 65,536
    check(1, 66_000, 1, 2, 0)
    check(2, 5, 10**17, 10**17, 10**17 + 1)
