"""Exercise 15: the reference, and answers that the oracle must refuse."""

import torch
import torch.nn.functional as F

from edits import edits


def advantages(rewards):
    others = rewards.sum(1, keepdim=True) - rewards
    return rewards - others / (rewards.size(1) - 1)


def summed(x, mask):
    return torch.where(mask, x, 0.0).sum(-1)


def policy_loss(logp, logp_ref, mask, rewards, beta):
    moved = summed(logp - logp_ref, mask).detach()
    return -(advantages(rewards - beta * moved) * summed(logp, mask)).mean()


def dpo_loss(logp, logp_ref, mask, beta):
    chosen, rejected = summed(logp - logp_ref, mask).unbind(1)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "its own reward is in the mean": edit(
        "others / (rewards.size(1) - 1)", "rewards.mean(1, keepdim=True)"
    ),
    "pays for going far": edit("rewards - beta * moved", "rewards + beta * moved"),
    "multiplies by the mask": edit("torch.where(mask, x, 0.0).sum(-1)", "(x * mask).sum(-1)"),
    "the mean over tokens": edit(".sum(-1)", ".sum(-1) / mask.sum(-1).clamp(min=1)"),
    "differentiates the advantages": edit("mask).detach()", "mask)"),
    "the logarithm of a sigmoid": edit(
        "F.logsigmoid(beta * (chosen - rejected))", "(beta * (chosen - rejected)).sigmoid().log()"
    ),
}
