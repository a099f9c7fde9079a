"""Exercise 30: 1F1B (one forward, one backward, in turn) where messages take time.

    one_f_one_b(2, 3, F=1, B=2, send=0) -> [["F0", "F1", "B0", "F2", "B1", "B2"],
                                            ["F0", "B0", "F1", "B1", "F2", "B2"]]

There are P devices, each with one stage of the model, and M micro-batches. "F1" is the forward pass
of micro-batch 1 through the device's stage and takes a time F; "B1" is its backward pass and takes
B. All times are whole numbers. An operation runs as soon as its device has done everything before
it in its list, and its input is there. F needs the same F of the device before, `send` after that
has ended. B needs the F of its own device, and the B of the device after, `send` after that has
ended (the last device needs no other B). A device goes on computing while its messages travel.

In the lesson's order, devices would wait: once a device has sent a forward pass on, its backward
pass can come only after the round trip. With `send` above 0, the device needs more forward passes
to fill that time.
1. Each device gets a new list, with each F and each B exactly once.
2. Everything is over after (M + P - 1)(F + B) + 2 (P - 1) send: the last device never waits once it
   has begun, and the first and the last micro-batch travel without delay.
3. Device d never keeps more than 1 + (P - 1 - d)(1 + k) activations, where k is 2 send / (F + B)
   rounded up: a forward pass adds one, and its backward pass releases it.
"""


def one_f_one_b(P: int, M: int, F: int, B: int, send: int) -> list[list[str]]:
    raise NotImplementedError("write one_f_one_b, then: python course/check.py 30")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    from itertools import accumulate

    from subject import equal

    def check(P, M, F, B, send):
        orders = answer.one_f_one_b(P, M, F, B, send)
        equal(len(orders), P, "rule 1: the number of lists")
        every = sorted(f"{kind}{m}" for kind in "FB" for m in range(M))
        for d, order in enumerate(orders):
            equal(sorted(order), every, f"rule 1: the list of device {d}, sorted,")
            kept = max(accumulate(1 if op[0] == "F" else -1 for op in order))
            room = 1 + (P - 1 - d) * (1 + -(-2 * send // (F + B)))
            assert kept <= room, (
                f"rule 3: device {d} keeps {kept} activations, and should keep {room} at most"
            )

        # A micro-batch takes 2 P steps: F on each device, then B on each, the last device first.
        # Go through the lists until no step is found to end later than was known.
        best = (M + P - 1) * (F + B) + 2 * (P - 1) * send
        over = {}  # (micro-batch, step) -> when
        before = None
        while over != before:
            before = dict(over)
            for d, order in enumerate(orders):
                free = 0  # when the device has done what it has begun
                for op in order:
                    m = op[1:]
                    step = d if op[0] == "F" else 2 * P - 1 - d
                    there = over.get((m, step - 1), -send) + send * (step != P)
                    free = over[m, step] = max(free, there) + (F if step < P else B)
                    assert free <= best, (
                        f"rule 2: device {d} ends {op} at {free} or later, "
                        f"and all should be over at {best}"
                    )

    check(2, 3, 1, 2, 0)  # the text's example
    check(4, 2, 1, 2, 0)
    check(2, 5, 1, 1, 2)
    check(2, 5, 3, 4, 1)  # k is rounded up, however little is over
    check(8, 60, 5, 3, 4)
    check(1, 70_000, 1, 2, 1)
