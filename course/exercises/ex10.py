"""Exercise 10: a ring of pinned buffers between a loader and a device.

    ring = Ring(device, n)      asks for n buffers, each by device.buffer(), a list of one number
    ring.fill(load)             loads the next batch into a free buffer: load(buffer)
    ring.copy_async()           launches the copy of the oldest batch that was not launched yet

`event = device.copy(buffer)` only queues the copy: it happens some time later, after those queued
before it, and takes what the buffer holds *then*. `event.wait()` returns when that copy (so every
earlier one) has happened. Rules:
1. the device receives the batches in the order in which they were loaded, each unspoiled;
2. if all n buffers hold batches that were not launched, fill returns False and loads nothing (the
   loader is n ahead); else it returns True;
3. if no loaded batch is left to launch, copy_async returns False; else True;
4. fill waits for the one copy that it must wait for, and copy_async for none: the more copies are
   in flight while the host loads, the better.
"""


class Ring:
    def __init__(self, device, n: int) -> None:
        raise NotImplementedError("write Ring, then: python course/check.py 10")

    def fill(self, load) -> bool:
        raise NotImplementedError

    def copy_async(self) -> bool:
        raise NotImplementedError


class LazyDevice:
    """Copies as late as it may: when somebody waits. (With `eager`, now and then by itself.)"""

    def __init__(self) -> None:
        self.buffers, self.queued, self.received = [], [], []

    def buffer(self) -> list[int]:
        self.buffers.append([-1])
        return self.buffers[-1]

    def copy(self, buffer: list[int]) -> "Event":
        assert any(buffer is b for b in self.buffers), "a copy from a list that is no buffer"
        self.queued.append(buffer)
        return Event(self, len(self.queued))

    def progress(self, until: int) -> None:
        while len(self.received) < until:
            self.received.append(self.queued[len(self.received)][0])


class Event:
    def __init__(self, device: LazyDevice, count: int) -> None:
        self.device, self.count = device, count

    def wait(self) -> None:
        self.device.progress(self.count)


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""
    import random

    rng = random.Random(8)

    def judge(n: int, calls: str, eager: float) -> None:
        """calls: F for fill, C for copy_async."""
        device, loaded, launched = LazyDevice(), 0, 0
        ring = answer.Ring(device, n)
        assert len(device.buffers) == n, f"a ring of {n} made {len(device.buffers)} buffers"
        for i, call in enumerate(calls):
            done, here = len(device.received), f"{n} buffers, calls {calls[: i + 1]}"
            if call == "F":
                into: list = []

                def load(buffer, batch=loaded, into=into, here=here):
                    in_flight = device.queued[len(device.received) :]
                    assert not any(buffer is b for b in in_flight), (
                        f"batch {batch} is loaded into a buffer whose copy is in flight: {here}"
                    )
                    buffer[0] = batch
                    into.append(buffer)

                room = loaded - launched < n
                said = ring.fill(load)
                assert said is room and len(into) == room, (
                    f"{loaded - launched} of {n} buffers are full: fill should return {room} and "
                    f"load {int(room)} batch, it returns {said} and loads {len(into)}: {here}"
                )
                must = max(done, loaded - n + 1 if room else 0)
                assert len(device.received) <= must, (
                    f"fill waits for {len(device.received) - done} copies, {must - done} would do: "
                    f"{here}"
                )
                loaded += room
            else:
                some = launched < loaded
                said = ring.copy_async()
                assert said is some, f"copy_async should return {some}, it returns {said}: {here}"
                launched += some
                assert len(device.queued) == launched, (
                    f"{len(device.queued)} copies are launched, should be {launched}: {here}"
                )
                assert len(device.received) == done, f"copy_async waits: {here}"
            if rng.random() < eager:
                device.progress(rng.randint(len(device.received), len(device.queued)))
        device.progress(len(device.queued))
        assert device.received == list(range(launched)), (
            f"the device receives {device.received}, not 0 to {launched - 1}: {n} buffers, {calls}"
        )

    for n in (1, 2, 3, 4, 7):
        judge(n, "C" + "F" * (n + 1) + "C" * (n + 1) + "F" * (n + 1), 0.0)
        judge(n, "FC" * 20, 0.0)
        for eager in (0.0, 0.3, 1.0):
            for _ in range(20):
                judge(n, "".join(rng.choices("FC", k=60)), eager)
