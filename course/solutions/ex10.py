"""Exercise 10: the reference, and answers that the oracle must refuse."""


class Ring:
    def __init__(self, device, n):
        self.device, self.n = device, n
        self.buffers = [device.buffer() for _ in range(n)]
        self.events = [None] * n  # of each buffer: its last copy
        self.loaded = self.launched = 0

    def fill(self, load):
        if self.loaded == self.launched + self.n:
            return False
        slot = self.loaded % self.n
        if self.events[slot]:
            self.events[slot].wait()
        load(self.buffers[slot])
        self.loaded += 1
        return True

    def copy_async(self):
        if self.launched == self.loaded:
            return False
        slot = self.launched % self.n
        self.events[slot] = self.device.copy(self.buffers[slot])
        self.launched += 1
        return True


class NoEvent(Ring):
    """Loads at once: right whenever the device happens to be fast."""

    def copy_async(self):
        done = super().copy_async()
        self.events = [None] * self.n
        return done


class WaitsForAll(Ring):
    """Right batches, but nothing is in flight while the host loads."""

    def fill(self, load):
        for event in filter(None, self.events):
            event.wait()
        return super().fill(load)


class CountsInBytes(Ring):
    """Counters of 8 bits: with 3 buffers, batch 256 goes to the buffer just used."""

    def fill(self, load):
        done = super().fill(load)
        if self.loaded == self.launched == 256:
            self.loaded = self.launched = 0
        return done

    def copy_async(self):
        done = super().copy_async()
        if self.loaded == self.launched == 256:
            self.loaded = self.launched = 0
        return done


class KeepsEvents(Ring):
    """Every event that ever was is in a list."""

    def copy_async(self):
        done = super().copy_async()
        self.all = [*getattr(self, "all", []), *self.events]
        return done


WRONG = {  # name -> what of the reference it replaces
    "has no events": dict(Ring=NoEvent),
    "waits for all copies": dict(Ring=WaitsForAll),
    "counts in a byte": dict(Ring=CountsInBytes),
    "keeps all events": dict(Ring=KeepsEvents),
}

EQUIVALENT = {
    "self.loaded = self.launched = 0: `0` -> `1`": "only their difference and their order count"
}
