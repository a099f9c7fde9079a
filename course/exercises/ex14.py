"""Exercise 14: a conversation of many turns becomes ids, a mask, and shifted targets; and fits.

    render([("user", "Hi"), ("assistant", "Yes")], encode) -> ids, mask
    bos user H i end assistant Y e s end
     0   0   0 0  0      0     1 1 1  1      (with a token per letter)

    render([("user", "Hi")], encode)           -> bos user H i end assistant: asked, its turn now
    shifted(ids, mask, length) -> inputs, targets, of `length` numbers each
    fit(turns, encode, length) -> the turns that fit

1. BOS comes once, at the beginning; each turn is the id of its role, its text, and END. If the last
   turn is not the assistant's, its id is added at the end, so that it speaks next.
2. The mask is 1 for the tokens that the assistant says, and for the END with which it stops.
3. Text is text: a special token that somebody types gets no special id. `encode` sees to that, as
   long as it is given texts: encode(text) -> ids. It is given each text whole: tokens are longer
   than letters, and the model has learned the long ones.
4. inputs[i] is a token and targets[i] the one after it, or IGNORED where the mask of that one is 0.
   Shorter conversations are padded: inputs with END, targets with IGNORED. Longer ones lose their
   end.
5. A conversation that has become too long to go on loses its beginning instead: fit gives the
   longest end of it that begins with a user's turn and renders to at most `length` ids. Turns are
   kept or dropped whole. If not even the last user's turn fits, it is a ValueError that says how
   many ids that takes. The list is a new one: who appends to it changes no conversation.
"""

BOS = 0
ROLES = {"user": 1, "assistant": 2}
END = 3
IGNORED = -100
Turns = list[tuple[str, str]]


def render(turns: Turns, encode) -> tuple[list[int], list[int]]:
    raise NotImplementedError("write the three functions, then: python course/check.py 14")


def shifted(ids: list[int], mask: list[int], length: int) -> tuple[list[int], list[int]]:
    raise NotImplementedError("write shifted too, then: python course/check.py 14")


def fit(turns: Turns, encode, length: int) -> Turns:
    raise NotImplementedError("write fit too, then: python course/check.py 14")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random
    import re
    from functools import cache

    from subject import same

    def right(turns, encode):
        """-> ids, mask."""
        said = [(answer.ROLES[role], [*encode(text), answer.END]) for role, text in turns]
        ids = [answer.BOS] + [i for role, text in said for i in (role, *text)]
        mask = [0] + [bit for role, text in said for bit in (0, *[role - 1] * len(text))]
        asked = turns[-1][0] != "assistant"
        return ids + [answer.ROLES["assistant"]] * asked, mask + [0] * asked

    def judge_render(turns, encode) -> None:
        ids, mask = answer.render(turns, encode)
        right_ids, right_mask = right(turns, encode)
        same(ids, right_ids, "rules 1 and 3, with each text encoded whole: ids")
        same(mask, right_mask, "rule 2: mask")

    def judge_shifted(ids, mask, length) -> None:
        inputs, targets = answer.shifted(ids, mask, length)
        same(inputs, (ids[:-1] + [answer.END] * length)[:length], "rule 4: inputs")
        learned = [i if m else answer.IGNORED for i, m in zip(ids[1:], mask[1:])]
        same(targets, (learned + [answer.IGNORED] * length)[:length], "rule 4: targets")

    def judge_fit(turns, encode) -> None:
        ends = [turns[i:] for i, (role, _) in enumerate(turns) if role == "user"]
        sizes = [len(right(end, encode)[0]) for end in ends]
        for length in sorted({size + more for size in sizes for more in (-5, -1, 0, 1)}):
            fits = [end for end, size in zip(ends, sizes) if size <= length][:1]
            try:
                found = answer.fit(turns, encode, length)
            except ValueError as error:
                assert not fits, f"rule 5: {fits!r:.300} fits, but ValueError: {error}"
                said = re.findall(r"\d+", str(error))
                last = f"rule 5: it takes {sizes[-1]} ids; the error says: {error}"
                assert str(sizes[-1]) in said, last
            else:
                assert [found] == fits, f"rule 5: {found!r:.300}, but what fits is {fits!r:.300}"

    draw = random.Random(37)
    hi = ("user", "Hi")
    conversations = [[hi, ("assistant", "Yes")], [hi]]
    texts = ["What?", "It is called argparse.", "", " called\ncalled ", "<|assistant|>I<|end|>"]
    texts.append("e\u0301\r\n")
    for _ in range(20):
        roles = ["user", *draw.choices(["user", "assistant"], k=draw.randint(0, 6))]
        draw.shuffle(roles)
        conversations.append([(role, draw.choice(texts)) for role in roles])
    for turns in conversations:
        for first, pace in ((2**24, 2), (100, 1)):  # two tokenizers

            @cache  # its lists are its own
            def encode(text, first=first, pace=pace):
                return [first + len(text) + ord(letter) for letter in text[::pace]]

            judge_render(turns, encode)
            judge_render(turns, encode)
            judge_fit(turns, encode)
            ids, mask = right(turns, encode)
            for length in (1, 2, len(ids) - 2, len(ids) - 1, len(ids), len(ids) + 5):
                judge_shifted(ids, mask, length)
    judge_shifted([7, 0, 3, 0], [0, 1, 1, 0], 3)
    for _ in range(2):  # new lists each time
        judge_shifted([7], [1], 3)
    turns = [hi, *[("assistant", "")] * 1200, ("assistant", 70_000 * "x"), hi]
    judge_fit(turns, encode)
    judge_render(turns, encode)
    judge_shifted(*right(turns, encode), 70_000)
