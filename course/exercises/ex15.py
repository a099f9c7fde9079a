"""Exercise 15: advantages, the loss of a policy gradient with a KL, and the loss of DPO.

    advantages(rewards) -> (Q, A)
    policy_loss(logp, logp_ref, mask, rewards, beta) -> a tensor of shape ()
    dpo_loss(logp, logp_ref, mask, beta) -> a tensor of shape ()

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
    from subject import same

    torch.manual_seed(15)

    def draw(Q, A, T, beta, size=1, dtype=torch.float64):
        """logp, logp_ref, mask, rewards, beta; some answers have no tokens."""
        logp, ref = size * torch.randn(2, Q, A, T, dtype=dtype)
        return logp, ref, torch.rand(Q, A, T) < 0.5, torch.randn(Q, A, dtype=dtype), beta

    def judge(logp, ref, mask, rewards, beta):
        near = torch.finfo(logp.dtype).eps ** 0.5

        def total(x):
            return (x * mask).sum(2)  # here nothing is NaN

        def gains(given):
            A = given.shape[1]
            return given - given @ (1 - torch.eye(A)).to(given) / (A - 1)

        def check(found, right):
            same(found, right, "the loss", near, near)
            slopes = *torch.autograd.grad(found, leaf), *torch.autograd.grad(right, exact)
            same(*slopes, "its gradient", near, near)

        same(answer.advantages(rewards), gains(rewards), "the result", near, near)
        strange = torch.randn(mask.shape) * math.inf  # of both signs
        leaf = torch.where(mask, logp, strange.where(ref > 0, 7)).to(logp).requires_grad_()
        fixed = torch.where(mask, ref, torch.where(logp > 0, math.nan, 7)).to(ref)
        exact = logp.clone().requires_grad_()
        gain = gains(rewards - beta * total(logp - ref))
        check(answer.policy_loss(leaf, fixed, mask, rewards, beta), -(gain * total(exact)).mean())
        margins = beta * total(exact - ref)[:, :2].diff()  # of the first two answers
        found = answer.dpo_loss(leaf[:, :2], fixed[:, :2], mask[:, :2], beta)
        check(found, torch.logaddexp(0 * margins, margins).mean())

    first = draw(4, 2, 6, 0.3)
    for i, other in enumerate(draw(4, 2, 6, 0)):
        judge(*first)
        judge(*first[:i], other, *first[i + 1 :])  # one argument is another
    for case in (
        (3, 2, 4, 2, 10_000),
        (300, 2, 3, 0.5),
        (3, 300, 2, 0.5),
        (1, 2, 70_000, 0.01, 1, torch.float32),
        (3, 2, 5, 0.3, 1, torch.bfloat16),
    ):
        judge(*draw(*case))
