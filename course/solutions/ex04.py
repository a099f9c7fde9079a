"""Exercise 4: the reference, and answers that the oracle must refuse."""

import numpy as np


def distribution(scores, temperature, top_p):
    scores = np.array(scores, dtype=np.float64)
    if temperature == 0:
        return np.eye(len(scores))[scores.argmax()]
    powers = np.exp((scores - scores.max()) / temperature)
    p = powers / powers.sum()
    order = np.argsort(-p, kind="stable")  # of equal ones, the smaller number first
    before = np.cumsum(p[order]) - p[order]
    if top_p < 1:
        p[order[before >= top_p]] = 0
    return p / p.sum()


def generate(model, prompt, n, length, temperature, top_p, rng):
    whole = list(prompt)
    for _ in range(n):
        scores = model(whole[-length:])[-1]
        p = np.asarray(distribution(scores, temperature, top_p))
        above = np.flatnonzero(np.cumsum(p) > rng.random())
        whole.append(int(above[0]) if len(above) else int(np.flatnonzero(p)[-1]))
    return whole[len(prompt) :]


# ------------------------------------------------------------------------------ wrong answers
def softmax(scores, temperature):
    powers = np.exp((np.array(scores) - np.max(scores)) / temperature)
    return powers / powers.sum()


def multiplies(scores, temperature, top_p):
    return honest(scores, temperature and 1 / temperature, top_p)


def overflows(scores, temperature, top_p):
    if temperature == 0:
        return honest(scores, temperature, top_p)
    with np.errstate(all="ignore"):
        powers = np.exp(np.array(scores) / temperature)
        return honest(np.log(powers / powers.sum()), 1.0, top_p)


def nearly_zero(scores, temperature, top_p):
    """Temperature 0 as a small one: ties are shared."""
    return honest(scores, max(temperature, 1e-4), top_p)


def last_of_equals(scores, temperature, top_p):
    """Sorts upwards and turns round: of equal ones, the larger number stays."""
    if temperature == 0:
        return honest(scores, 0, top_p)
    p = softmax(scores, temperature)
    order = np.argsort(p, kind="stable")[::-1]
    before = np.cumsum(p[order]) - p[order]
    if top_p < 1:
        p[order[before >= top_p]] = 0
    return p / p.sum()


def greedy_takes_the_last(scores, temperature, top_p):
    if temperature == 0:
        return np.eye(len(scores))[len(scores) - 1 - np.argmax(np.array(scores)[::-1])]
    return honest(scores, temperature, top_p)


def cuts_too_early(scores, temperature, top_p):
    """Keeps only as many as fit below top_p."""
    if temperature == 0 or top_p == 1:
        return honest(scores, temperature, top_p)
    p = softmax(scores, temperature)
    order = np.argsort(-p, kind="stable")
    beyond = np.cumsum(p[order]) > top_p
    beyond[0] = False
    p[order[beyond]] = 0
    return p / p.sum()


def cuts_by_height(scores, temperature, top_p):
    """Keeps what has at least (1 - top_p) of the largest probability."""
    if temperature == 0:
        return honest(scores, temperature, top_p)
    p = softmax(scores, temperature)
    p[p < (1 - top_p) * p.max()] = 0
    return p / p.sum()


def cuts_before_the_temperature(scores, temperature, top_p):
    kept = honest(scores, 1.0, top_p)
    with np.errstate(divide="ignore"):
        scores = np.where(kept > 0, np.array(scores, dtype=float), -np.inf)
    return honest(scores, temperature, 1.0)


def does_not_divide(scores, temperature, top_p):
    if temperature == 0:
        return honest(scores, temperature, top_p)
    p = honest(scores, temperature, top_p)
    return np.where(p > 0, softmax(scores, temperature), 0.0)


def changes_the_scores(scores, temperature, top_p):
    if isinstance(scores, np.ndarray) and temperature:
        scores -= scores.max()
    return honest(scores, temperature, top_p)


def generator(step):
    """generate with another step: (model, whole, length, temperature, top_p, rng) -> byte."""

    def generate(model, prompt, n, length, temperature, top_p, rng):
        whole = list(prompt)
        for _ in range(n):
            whole.append(step(model, whole, length, temperature, top_p, rng))
        return whole[len(prompt) :]

    return dict(generate=generate)


def draw(p, u):
    above = np.flatnonzero(np.cumsum(p) > u)
    return int(above[0]) if len(above) else int(np.flatnonzero(p)[-1])


def first_row(model, whole, length, temperature, top_p, rng):
    return draw(honest(model(whole[-length:])[0], temperature, top_p), rng.random())


def everything(model, whole, length, temperature, top_p, rng):
    return draw(honest(model(whole)[-1], temperature, top_p), rng.random())


def oldest(model, whole, length, temperature, top_p, rng):
    return draw(honest(model(whole[:length])[-1], temperature, top_p), rng.random())


def one_fewer(model, whole, length, temperature, top_p, rng):
    return draw(honest(model(whole[-max(1, length - 1) :])[-1], temperature, top_p), rng.random())


def greedy_draws_nothing(model, whole, length, temperature, top_p, rng):
    p = honest(model(whole[-length:])[-1], temperature, top_p)
    return int(p.argmax()) if temperature == 0 else draw(p, rng.random())


def at_least(model, whole, length, temperature, top_p, rng):
    p = honest(model(whole[-length:])[-1], temperature, top_p)
    return int(np.searchsorted(np.cumsum(p), rng.random(), side="left"))


def last_of_all(model, whole, length, temperature, top_p, rng):
    p = honest(model(whole[-length:])[-1], temperature, top_p)
    return min(int(np.searchsorted(np.cumsum(p), rng.random(), side="right")), len(p) - 1)


def sorted_first(model, whole, length, temperature, top_p, rng):
    p = honest(model(whole[-length:])[-1], temperature, top_p)
    order = np.argsort(-p, kind="stable")
    return int(order[draw(p[order], rng.random())])


def by_choices(model, whole, length, temperature, top_p, rng):
    p = honest(model(whole[-length:])[-1], temperature, top_p)
    return rng.choices(range(len(p)), p)[0] if rng.random() < 2 else 0


def with_the_prompt(model, prompt, n, length, temperature, top_p, rng):
    return [*prompt, *honest_generate(model, prompt, n, length, temperature, top_p, rng)]


def into_the_prompt(model, prompt, n, length, temperature, top_p, rng):
    new = honest_generate(model, prompt, n, length, temperature, top_p, rng)
    prompt += new
    return new


def prompt_step_by_step(model, prompt, n, length, temperature, top_p, rng):
    """Runs the model on each prefix of the prompt first."""
    for i in range(1, len(prompt)):
        model(prompt[:i][-length:])
    return honest_generate(model, prompt, n, length, temperature, top_p, rng)


honest, honest_generate = distribution, generate
WRONG = {  # name -> what of the reference it replaces
    "multiplies by the temperature": dict(distribution=multiplies),
    "overflows": dict(distribution=overflows),
    "a small temperature for 0": dict(distribution=nearly_zero),
    "of equal ones, keeps the larger number": dict(distribution=last_of_equals),
    "of the likeliest, takes the last": dict(distribution=greedy_takes_the_last),
    "cuts what exceeds top_p": dict(distribution=cuts_too_early),
    "cuts by height": dict(distribution=cuts_by_height),
    "cuts before the temperature": dict(distribution=cuts_before_the_temperature),
    "does not divide after the cut": dict(distribution=does_not_divide),
    "changes the scores": dict(distribution=changes_the_scores),
    "the first row of scores": generator(first_row),
    "shows the model everything": generator(everything),
    "shows the oldest bytes": generator(oldest),
    "shows one byte fewer": generator(one_fewer),
    "temperature 0 draws nothing": generator(greedy_draws_nothing),
    "at or above u": generator(at_least),
    "falls back to the last byte of all": generator(last_of_all),
    "sums in order of probability": generator(sorted_first),
    "draws in another way": generator(by_choices),
    "gives the prompt back too": dict(generate=with_the_prompt),
    "appends to the prompt": dict(generate=into_the_prompt),
    "runs through the prompt": dict(generate=prompt_step_by_step),
}
