"""Exercise 36: the reference, and answers that the oracle must refuse."""

from hashlib import blake2b

from edits import edits


class Shuffler:
    def __init__(self, read, n, size, seed, state=None):
        self.read = read
        self.n = n
        self.size = size
        self.seed = seed
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


edit = edits(__file__)
HELD = "[i for i, _ in self.held]]"
WRONG = {  # name -> what of the reference it replaces
    "loses the buffer": edit(HELD, "[]]"),
    "seeds the global generator": edit(
        "        digest = blake2b(",
        '        import random\n\n        random.seed(f"{self.seed}/{self.drawn}")\n'
        "        return random.randrange(count)\n        digest = blake2b(",
    ),
    "counts draws from 0 after a resume": edit("return [self.drawn,", "return [0,"),
    "a state that changes later": edit(
        HELD,
        "self.numbers]",
        "self.held = [(i, read(i)) for i in held]",
        "self.held, self.numbers = [(i, read(i)) for i in held], [*held]",
        "return self.held.pop()[1]",
        "row = self.held.pop()[1]\n"
        "        self.numbers[:] = [i for i, _ in self.held]\n        return row",
    ),
}

NUMBER = "another number for each draw, and as random"
EQUIVALENT = {
    "self.drawn += 1: `self.drawn += 1` -> `self.drawn -= 1`": NUMBER,
    "self.drawn += 1: `1` -> `2`": NUMBER,
    "self.drawn, self.place, held = state or (0, 0, []): `0` -> `1`": NUMBER,
    'digest = blake2b(f"{self.seed}/{self.drawn}".encode(), digest_size=8).digest(): '
    "`8` -> `9`": NUMBER,
}
