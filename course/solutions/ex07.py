"""Exercise 7: the reference, and answers that the oracle must refuse."""

from edits import edits


def train(weights, loss, batch, update, steps, micro):
    losses = []
    for step in range(steps):
        rows = batch(step)
        total = 0.0
        for w in weights:
            w.grad = None
        for part in rows.split(micro):
            share = loss(part) * (len(part) / len(rows))
            share.backward()
            total += share.item()
        update(step)
        losses.append(total)
    return losses


edit = edits(__file__)
CLEAR = "        for w in weights:\n            w.grad = None\n"
PASS = "            share.backward()\n            total += share.item()\n"
WRONG = {  # name -> what of the reference it replaces
    "never clears the gradients": edit(CLEAR, ""),
    "clears for each pass": edit(PASS, CLEAR.replace("      ", "          ", 2) + PASS),
    "every pass counts alike": edit("(len(part) / len(rows))", "(micro / len(rows))"),
    "leaves the last rows out": edit(
        "rows.split(micro)", "rows[: len(rows) // micro * micro].split(micro)"
    ),
    "updates after each pass": edit(
        "        update(step)\n", "", PASS, PASS + "            update(step)\n"
    ),
    "one backward for all passes": edit(
        PASS, "            total += share\n", "update(", "total.backward()\n        update("
    ),
    "no update after a bad loss": edit(
        "update(step)", "if total < float('inf'):\n            update(step)"
    ),
    "returns tensors": edit("share.item()", "share.detach()"),
    "the loss of the last pass": edit(
        "total += share.item()", "total = share.item() * len(rows) / len(part)"
    ),
    "asks twice for the rows": edit("total = 0.0", "total = 0.0 * len(batch(step))"),
}
