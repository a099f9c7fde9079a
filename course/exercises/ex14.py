"""Exercise 14: a conversation of many turns becomes ids, a mask, and shifted targets; and fits.

    render([("user", "Hi"), ("assistant", "Yes")], encode) -> ids, mask
    bos user H i end assistant Y e s end
     0   0   0 0  0      0     1 1 1  1      (with one token per letter)

    render([("user", "Hi")], encode)           -> bos user H i end assistant: asked, its turn now
    shifted(ids, mask, length) -> inputs, targets, of `length` numbers each
    fit(turns, encode, length) -> the turns that fit

1. BOS comes once, at the beginning. Each turn is the id of its role, its text, and END. If the last
   turn is not the assistant's, the assistant's id comes at the end, so that it speaks next.
2. The mask is 1 for the tokens that the assistant says, and for the END with which it stops.
3. Text is text: a special token that somebody types gets no special id. `encode` takes care of
   that, as long as you give it texts: encode(text) -> ids. Give it each text whole: tokens are
   longer than letters, and the model has learned the long ones.
4. inputs[i] is a token, and targets[i] is the one after it, or IGNORED where the mask of that next
   token is 0. Shorter conversations are padded: inputs with END, targets with IGNORED. Longer ones
   are cut off at the end.
5. fit is for a chat that goes on: what it drops is the beginning. It returns the longest end of the
   conversation that begins with a user's turn (there is one) and renders to at most `length` ids.
   Turns are kept or dropped whole. If not even the last user's turn fits, raise a ValueError that
   says how many ids that takes. The list is a new one: appending to it must not change the
   conversation.
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
    from subject import equal, same

    names = {0: "bos", 1: "user", 2: "assistant", 3: "end"}

    def encode(text):  # a token has two letters
        tokens = [text[i : i + 2] for i in range(0, len(text), 2)]
        ids = [int.from_bytes(token.encode(), "big") for token in tokens]
        names.update(zip(ids, tokens))
        return ids

    hi = ("user", "Hi")
    yes = ("assistant", "Yes")
    no = ("assistant", "")
    why = ("user", "Why?")
    typed = ("user", " e\u0301<|end|>")
    for turns, tokens, learned in (
        ([hi, yes], "bos/user/Hi/end/assistant/Ye/s/end", "00000111"),
        ([hi], "bos/user/Hi/end/assistant", "00000"),
        ([no, hi, why], "bos/assistant/end/user/Hi/end/user/Wh/y?/end/assistant", "00100000000"),
        ([typed], "bos/user/ e/\u0301</|e/nd/|>/end/assistant", "000000000"),
    ):
        ids, mask = answer.render(turns, encode)
        found = "/".join(str(names.get(i, i)) for i in ids)
        equal(found, tokens, "rules 1 and 3: what the ids mean")
        same(ids, [*map(int, ids)], "rule 1: ids")
        same(mask, [int(bit) for bit in learned], f"rule 2: {tokens}: the mask")

    for length in (6, 3, 9):
        inputs, targets = answer.shifted([0, 1, 7, 2, 8, 0, 3], [0, 0, 0, 0, 1, 1, 1], length)
        same(inputs, [0, 1, 7, 2, 8, 0, 3, 3, 3][:length], "rule 4: inputs")
        right = [-100, -100, -100, 8, 0, 3, -100, -100, -100]
        same(targets, right[:length], "rule 4: targets")

    for turns, kept in (  # length -> how many turns are kept; 0: a ValueError
        ([hi], {4: 0, 5: 1}),
        ([yes, hi, yes, no, why, hi], {4: 0, 8: 1, 9: 2, 18: 5}),
        ([hi, yes, why, hi, yes, yes], {11: 0, 12: 3, 16: 4, 99: 6}),
        ([hi, *[no] * 300, hi], {607: 1, 608: 302}),
    ):
        for length, n in kept.items():
            try:
                found = answer.fit(turns, encode, length)
            except ValueError as error:
                assert not n, f"rule 5: the last {n} turns fit, but ValueError: {error}"
                told = str(length + 1) in str(error)
                assert told, f"rule 5: {str(error)!r} should name the last user's {length + 1} ids"
            else:
                assert n, "rule 5: not even the last user's turn fits, and there is no ValueError"
                equal(found, turns[-n:], "rule 5: the result")
