"""Exercise 15: advantages, the loss of a policy gradient with a KL, and the loss of DPO.

    advantages(rewards) -> (Q, A)
    policy_loss(logp, logp_ref, mask, rewards, beta) -> a tensor of shape ()
    dpo_loss(logp, logp_ref, mask, beta) -> a tensor of shape ()

There are Q questions with A >= 2 answers each, drawn from the model. rewards (Q, A) are floats.
logp and logp_ref (Q, A, T) are the log probabilities of each token under the model and under the
reference. mask (Q, A, T) is True for the tokens that belong to the answer. Where it is False you
may find anything, NaN and infinity included: it changes no number, and the gradient there is 0. The
log probability of an answer is the *sum* over its tokens, however many there are. How far an answer
has *moved* is its log probability under the model minus that under the reference.

1. advantages: the reward of each answer minus the mean reward of the *other* answers to the same
   question, as in RLOO. (If its own reward were in that mean, an answer would be compared, in part,
   with itself.)
2. policy_loss: the reward of each answer becomes its reward minus beta times how far it has moved.
   The advantages are computed from these, and are constants: nothing is differentiated through
   them. The loss is minus the mean, over all Q * A answers, of advantage times log probability.
3. dpo_loss: here A = 2; the first answer is the chosen one, the second the rejected one. The loss
   is the mean over the questions of -log sigmoid(beta * (how far the chosen one moved - how far the
   rejected one moved)). It is finite, and so is its gradient, however far they have moved.

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
    import torch
    from subject import same

    torch.manual_seed(15)

    def judge(Q, A, T, beta, dtype=torch.float64, share=0.5):
        """share: of the tokens where mask is True; elsewhere logp is NaN."""
        near = torch.finfo(dtype).eps ** 0.5
        mask = torch.rand(Q, A, T) < share
        rewards = torch.randn(Q, A, dtype=dtype)
        logp, ref = torch.randn(2, Q, A, T, dtype=dtype)
        strange = ((logp, torch.nan), (ref, torch.inf))  # what stands where mask is False
        given = [torch.where(mask, x, y).requires_grad_() for x, y in strange]
        logp.requires_grad_()

        def less_others(x):
            others = [x[:, torch.arange(A) != a].mean(1) for a in range(A)]
            return x - torch.stack(others, 1)

        def check(rule, found, right):
            same(found, right, f"{rule}: the loss", near, near)
            assert found.requires_grad, f"{rule}: the loss has no gradient"
            (slope,) = torch.autograd.grad(found, given[0])
            (right,) = torch.autograd.grad(right, logp, retain_graph=True)
            same(slope, right, f"{rule}: the gradient of logp", near, near)

        said = (logp * mask).sum(2)
        moved = said - (ref * mask).sum(2)
        gains = less_others(rewards - beta * moved.detach())
        found = answer.advantages(rewards)
        same(found, less_others(rewards), "rule 1: the advantages", near, near)
        found = answer.policy_loss(*given, mask, rewards, beta)
        check("rule 2", found, -(gains * said).mean())
        if A == 2:
            margins = beta * (moved[:, 1] - moved[:, 0])
            found = answer.dpo_loss(*given, mask, beta)
            right = torch.logaddexp(0 * margins, margins)  # log(1 + e^m) = -log sigmoid(-m)
            check("rule 3", found, right.mean())

    judge(1, 2, 2, 0.3, share=1.0)
    judge(4, 5, 6, 0.3)
    judge(4, 2, 6, 20_000)
    judge(4, 2, 6, 0.3, torch.bfloat16)
