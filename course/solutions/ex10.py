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


class CallsProgress(Ring):
    """No events: it makes the device go on by a method that a real one does not have."""

    def fill(self, load):
        self.events = [None] * self.n
        if self.launched + self.n > self.loaded >= self.n:
            self.device.progress(self.loaded - self.n + 1)
        return super().fill(load)


class ReadsTheQueue(Ring):
    """Looks into the device to see what has arrived."""

    def fill(self, load):
        self.events = [None] * self.n
        while self.loaded - len(self.device.received) > self.n:
            pass
        return super().fill(load)


class OneMoreBuffer(Ring):
    """Asks for another buffer, instead of waiting for one."""

    def fill(self, load):
        slot = self.loaded % self.n
        if self.events[slot] and self.loaded < self.launched + self.n:
            self.buffers[slot], self.events[slot] = self.device.buffer(), None
        return super().fill(load)


class LoadsAside(Ring):
    """Loads into a list of its own, and moves the number when it launches."""

    def __init__(self, device, n):
        super().__init__(device, n)
        self.aside = [[0] for _ in range(n)]

    def fill(self, load):
        slot = self.loaded % self.n
        done = super().fill(lambda buffer: load(self.aside[slot]))
        if done:
            self.buffers[slot][0] = self.aside[slot][0]
        return done


class NewestFirst(Ring):
    """Launches what was loaded last."""

    def copy_async(self):
        if self.launched == self.loaded:
            return False
        slot = (self.loaded - 1) % self.n
        self.events[slot] = self.device.copy(self.buffers[slot])
        self.launched += 1
        return True


WRONG = {  # name -> what of the reference it replaces
    "has no events": dict(Ring=NoEvent),
    "waits for all copies": dict(Ring=WaitsForAll),
    "waits on the wrong slot": dict(Ring=WaitsOnTheWrongSlot),
    "waits after the launch": dict(Ring=WaitsAfterTheLaunch),
    "loads n + 1 ahead": dict(Ring=RunsAhead),
    "no events, but the device's progress": dict(Ring=CallsProgress),
    "looks into the device": dict(Ring=ReadsTheQueue),
    "asks for one buffer more": dict(Ring=OneMoreBuffer),
    "loads into a list of its own": dict(Ring=LoadsAside),
    "launches the newest first": dict(Ring=NewestFirst),
}

EQUIVALENT = {
    "self.loaded = self.launched = 0: `0` -> `1`": "only their difference and their order count"
}
