"""Exercise 37: a ring of pinned buffers between a loader and a device.

    ring = Ring(device, n)      asks for n buffers, each by device.buffer(), a list of one number
    ring.fill(load)             loads the next batch into a free buffer: load(buffer)
    ring.copy_async()           launches the copy of the oldest batch that was not launched yet

`event = device.copy(buffer)` only queues the copy: it happens some time later, after those queued
before it, and takes what the buffer holds *then*. `event.wait()` returns when that copy (so every
earlier one) has happened. The device has no other methods, and an event none but wait. Rules:
1. the device receives the batches in the order in which they were loaded, each unspoiled;
2. if all n buffers hold batches that were not launched, fill returns False and loads nothing (the
   loader is n ahead); else it returns True;
3. if no loaded batch is left to launch, copy_async returns False; else True;
4. fill waits for the one copy that it must wait for, and copy_async for none: the more copies are
   in flight while the host loads, the better;
5. a run may have a million steps: no more than 2 n events are kept.
"""

from types import SimpleNamespace


class Ring:
    def __init__(self, device, n: int) -> None:
        raise NotImplementedError("write Ring, then: python course/check.py 37")

    def fill(self, load) -> bool:
        raise NotImplementedError

    def copy_async(self) -> bool:
        raise NotImplementedError


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random

    rng = random.Random(8)

    def judge(n: int, calls: str, eager: float) -> None:
        """calls: F for fill, C for copy_async. eager: how often the device copies by itself."""
        device, known = _device(n)
        loaded = 0
        launched = 0
        ring = answer.Ring(device, n)
        for i, call in enumerate(calls):
            done = len(known.received)
            here = f"{n} buffers, calls {calls[max(0, i - 60) : i + 1]}"
            made = len(known.buffers)
            assert made == n, f"a ring of {n} has asked for {made} buffers: {calls[:i]}"
            if call == "F":
                into: list = []

                def load(buffer, batch=loaded, into=into, here=here):
                    own = any(buffer is b for b in known.buffers)
                    assert own, f"batch {batch} is loaded into a list that is no buffer: {here}"
                    in_flight = known.queued[len(known.received) :]
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
                assert len(known.received) <= must, (
                    f"fill waits for {len(known.received) - done} copies, {must - done} would do: "
                    f"{here}"
                )
                loaded += room
            else:
                some = launched < loaded
                said = ring.copy_async()
                assert said is some, f"copy_async should return {some}, it returns {said}: {here}"
                launched += some
                assert len(known.queued) == launched, (
                    f"{len(known.queued)} copies are launched, should be {launched}: {here}"
                )
                assert len(known.received) == done, f"copy_async waits: {here}"
            kept = len(known.events)
            assert kept <= 2 * n, f"{kept} events are kept, of {n} buffers, after {i + 1} calls"
            if rng.random() < eager:
                known.progress(rng.randint(len(known.received), len(known.queued)))
        known.progress(len(known.queued))
        assert known.received == list(range(launched)), (
            f"the device receives {known.received}, not 0 to {launched - 1}: {n} buffers, {calls}"
        )

    for n in (1, 2, 3, 4, 7):
        judge(n, "C" + "F" * (n + 1) + "C" * (n + 1) + "F" * (n + 1), 0.0)
        judge(n, "FC" * (300 if n == 3 else 20), 0.0)  # more than a byte counts
        for eager in (0.0, 0.3, 1.0):
            for _ in range(20):
                judge(n, "".join(rng.choices("FC", k=60)), eager)


def _device(n: int):
    """-> a device, and what only the judge knows of it: buffers, copies queued, numbers received.

    It copies as late as it may: when somebody waits for an event."""
    import weakref

    known = SimpleNamespace(buffers=[], queued=[], received=[], events=weakref.WeakSet())

    def progress(until: int) -> None:
        while len(known.received) < until:
            known.received.append(known.queued[len(known.received)][0])

    class Face:
        def __getattr__(self, name: str):
            raise AssertionError(f"a {type(self).__name__} has nothing like .{name}")

    class Event(Face):
        def __init__(self, count: int) -> None:
            self.wait = lambda: progress(count)
            known.events.add(self)

    class Device(Face):
        def buffer(self) -> list[int]:
            known.buffers.append([-1])
            return known.buffers[-1]

        def copy(self, buffer: list[int]) -> Event:
            own = any(buffer is b for b in known.buffers)
            assert own, "a copy from a list that is no buffer of the device"
            known.queued.append(buffer)
            return Event(len(known.queued))

    known.progress = progress
    return Device(), known
