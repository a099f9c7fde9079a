"""Exercise 37: the reference, and answers that the oracle must refuse."""

from edits import edits


class Ring:
    def __init__(self, device, n):
        self.device = device
        self.n = n
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


edit = edits(__file__)
COPY = "self.events[slot] = self.device.copy(self.buffers[slot])"
WAIT = "        if self.events[slot]:\n            self.events[slot].wait()\n"
WRONG = {  # name -> what of the reference it replaces
    "has no events": edit("self.events[slot] = self.device", "self.device"),
    "waits for all copies": edit(
        WAIT, "        for event in filter(None, self.events):\n            event.wait()\n"
    ),
    "counts in a byte": edit(
        "        self.launched += 1\n",
        "        self.launched += 1\n        if self.loaded == self.launched == 256:\n"
        "            self.loaded = self.launched = 0\n",
    ),
    "keeps all events": edit(
        COPY, COPY + "\n        self.all = [*getattr(self, 'all', []), self.events[slot]]"
    ),
}

EQUIVALENT = {
    "self.loaded = self.launched = 0: `0` -> `1`": "only their difference and their order count"
}
