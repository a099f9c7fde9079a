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


class WaitsOnTheWrongSlot(Ring):
    """Waits for the buffer that was filled last, the one next to the free one."""

    def fill(self, load):
        self.events.insert(0, self.events.pop())
        done = super().fill(load)
        self.events.append(self.events.pop(0))
        return done


class WaitsAfterTheLaunch(Ring):
    """A copy that is waited for at once is not asynchronous."""

    def copy_async(self):
        done = super().copy_async()
        for event in filter(None, self.events):
            event.wait()
        return done


class RunsAhead(Ring):
    """Forgets that a loaded batch that nobody has launched is also in its buffer."""

    def fill(self, load):
        if self.loaded > self.launched + self.n:
            return False
        slot = self.loaded % self.n
        if self.events[slot]:
            self.events[slot].wait()
        load(self.buffers[slot])
        self.loaded += 1
        return True


WRONG = {  # name -> what of the reference it replaces
    "has no events": dict(Ring=NoEvent),
    "waits for all copies": dict(Ring=WaitsForAll),
    "waits on the wrong slot": dict(Ring=WaitsOnTheWrongSlot),
    "waits after the launch": dict(Ring=WaitsAfterTheLaunch),
    "loads n + 1 ahead": dict(Ring=RunsAhead),
}
