"""Exercise 15: advantages, the loss of a policy gradient with a KL, and the loss of DPO.

    advantages(rewards) -> (Q, A)
    policy_loss(logp, logp_ref, mask, rewards, beta) -> a tensor of one number
    dpo_loss(logp, logp_ref, mask, beta) -> a tensor of one number

Q questions have A >= 2 answers each, drawn from the model; rewards (Q, A) are floats. logp and
logp_ref (Q, A, T) are the log probabilities of each token, under the model and under the reference;
mask (Q, A, T) is True for the tokens that belong to the answer. Where it is False there may be
anything, also NaN or infinity: it changes no number, and its gradient is 0. The log probability of
an answer is the *sum* over its tokens, however many they are. An answer has *moved* by its log
probability under the model less that under the reference.

1. advantages: the reward of an answer less the mean reward of the *other* answers to the same
   question. (With its own reward in that mean, an answer would be compared with itself, in part.)
2. policy_loss: the reward of an answer becomes its reward less beta times what it has moved. Of
   these come the advantages, which are constants: nothing is differentiated through them. The loss
   is minus the mean, over all Q * A answers, of the advantage times the log probability.
3. dpo_loss: here A = 2. The first answer is the chosen one, the second the rejected one. The mean
   over the questions of -log sigmoid(beta * (what the chosen one moved - what the rejected moved)).
   It is finite, and so is its gradient, however far they have moved.

logp_ref needs no gradient. Results keep the dtype of the input.
"""

from torch import Tensor


def advantages(rewards: Tensor) -> Tensor:
    raise NotImplementedError("write the three functions, then: python course/check.py 15")


def policy_loss(
    logp: Tensor, logp_ref: Tensor, mask: Tensor, rewards: Tensor, beta: float
) -> Tensor:
    raise NotImplementedError("write policy_loss too, then: python course/check.py 15")


def dpo_loss(logp: Tensor, logp_ref: Tensor, mask: Tensor, beta: float) -> Tensor:
    raise NotImplementedError("write dpo_loss too, then: python course/check.py 15")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math

    import torch

    torch.manual_seed(15)

    def judge(Q, A, T, beta, size):
        case = f"{Q} questions, {A} answers, {T} tokens, beta {beta}, log p of about {size}"
        logp, ref = size * torch.randn(2, Q, A, T, dtype=torch.float64)
        rewards = torch.randn(Q, A, dtype=torch.float64)
        mask = torch.rand(Q, A, T) < 0.7
        pairs = [(q, a) for q in range(Q) for a in range(A)]

        def total(x, at):
            return x[at][mask[at]].sum()

        def gain(given, q, a):
            return given[q, a] - sum(given[q, b] for b in range(A) if b != a) / (A - 1)

        def policy(x):
            left = rewards.clone()
            for at in pairs:
                left[at] -= beta * total(logp - ref, at)
            return -sum(gain(left, *at) * total(x, at) for at in pairs) / len(pairs)

        def dpo(x):
            margins = [total(x - ref, (q, 1)) - total(x - ref, (q, 0)) for q in range(Q)]
            return sum(torch.logaddexp(m * 0, beta * m) for m in margins) / Q

        def same(name, found, right):
            say = lambda said: f"{case}: {name}: {said}"
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12, msg=say)

        def check(name, slow, *more):
            leaf = logp.masked_fill(~mask, math.nan).requires_grad_()
            fixed = ref.masked_fill(~mask, -math.inf)
            exact = logp.clone().requires_grad_()
            found = getattr(answer, name)(leaf, fixed, mask, *more)
            right = slow(exact)
            same(name, found, right)
            found.backward()
            right.backward()
            same(f"gradient of {name}", leaf.grad, exact.grad)

        right = torch.stack([gain(rewards, *at) for at in pairs]).view(Q, A)
        same(f"advantages of {rewards.tolist()}", answer.advantages(rewards), right)
        check("policy_loss", policy, rewards, beta)
        if A == 2:
            check("dpo_loss", dpo, beta)

    judge(3, 4, 5, 0.3, 1)
    judge(4, 2, 6, 0.3, 1)
    judge(3, 2, 4, 2.0, 10_000)
