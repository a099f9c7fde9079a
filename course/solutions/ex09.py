"""Exercise 9: the reference, and answers that the oracle must refuse."""

import random
from hashlib import blake2b


class Shuffler:
    def __init__(self, read, n, size, seed, state=None):
        self.read, self.n, self.size, self.seed = read, n, size, seed
        # draws so far, the next row to read, those that are held
        self.drawn, self.place, held = state or (0, 0, [])
        self.held = [(i, read(i)) for i in held]

    def next(self):
        while len(self.held) < self.size and self.place < self.n:
            self.held.append((self.place, self.read(self.place)))
            self.place += 1
        if not self.held:
            return None
        i = self.draw(len(self.held))
        self.drawn += 1
        self.held[i], self.held[-1] = self.held[-1], self.held[i]
        return self.held.pop()[1]

    def draw(self, count):
        """Which of those held: a function of the seed and the draw, so it has no state."""
        digest = blake2b(f"{self.seed}/{self.drawn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % count

    def state(self):
        return [self.drawn, self.place, [i for i, _ in self.held]]


class LosesTheBuffer(Shuffler):
    """Saves the place in the stream only: what was held never comes."""

    def state(self):
        return [self.drawn, self.place, []]


class ChangesItsState(Shuffler):
    """The state is the buffer's own list."""

    def __init__(self, read, n, size, seed, state=None):
        super().__init__(read, n, size, seed, state)
        self.numbers = [i for i, _ in self.held]

    def next(self):
        row = super().next()
        self.numbers[:] = [i for i, _ in self.held]
        return row

    def state(self):
        return [self.drawn, self.place, self.numbers]


class GlobalRandom(Shuffler):
    """Seeds the generator that everybody uses."""

    def draw(self, count):
        random.seed(f"{self.seed}/{self.drawn}")
        return random.randrange(count)


class ForgetsTheDraws(Shuffler):
    """The draws begin with number 0 again after a resume."""

    def state(self):
        return [0, *super().state()[1:]]


WRONG = {  # name -> what of the reference it replaces
    "loses the buffer": dict(Shuffler=LosesTheBuffer),
    "seeds the global generator": dict(Shuffler=GlobalRandom),
    "counts draws from 0 after a resume": dict(Shuffler=ForgetsTheDraws),
    "a state that changes later": dict(Shuffler=ChangesItsState),
}

NUMBER = "another number for each draw, and as random"
EQUIVALENT = {
    "self.drawn += 1: `self.drawn += 1` -> `self.drawn -= 1`": NUMBER,
    "self.drawn += 1: `1` -> `2`": NUMBER,
    "self.drawn, self.place, held = state or (0, 0, []): `0` -> `1`": NUMBER,
    'digest = blake2b(f"{self.seed}/{self.drawn}".encode(), digest_size=8).digest(): '
    "`8` -> `9`": NUMBER,
}
