"""Expert parallel: each rank has some experts, and tokens travel to those that a router
chooses."""

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx_lab.lab import Lab, gathered
from phalanx_lab.mlp import draw

OWN, CHOSEN, ROUNDS, STEP = 4, 2, 40, 0.02


def experts(lab: Lab) -> None:
    """Experts: a router sends each token to the ranks that have its two experts, and the results come
    back.

    A model with experts has many MLPs in each layer and uses two of them for each token: more weights
    for the same computing. Each rank has four experts and its own tokens.
    """
    width, n = lab.size.width, lab.n
    every = [draw(500 + e, width, width) / width**0.5 for e in range(OWN * n)]
    mine = every[OWN * lab.rank : OWN * (lab.rank + 1)]
    x = lab.rows(0)
    bias = torch.zeros(OWN * n, dtype=torch.float64)

    # A token's scores choose two of all experts. Tokens are sorted by expert, so that those for one
    # rank lie together; an all-to-all tells each rank how many come. How many is known only when
    # scores are: the host waits for these numbers. Nothing is dropped and nothing is padded.
    lab.step("the router: how many tokens go where", tokens=x, experts=mine)
    chosen, gates = routed(x, bias)
    order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
    counts = chosen.flatten().bincount(minlength=OWN * n)
    coming = torch.empty_like(counts)  # from each rank for each of my experts
    lab.group.all_to_all(coming, counts)
    sends, takes = (
        counts.view(n, OWN).sum(1).tolist(),
        coming.view(n, OWN).sum(1).tolist(),
    )
    lab.after(counts=counts, coming=coming)

    # A second all-to-all of uneven parts takes tokens to their experts (dispatch), a third one
    # brings the results back (combine), where each token adds its two, weighted by their scores.
    lab.step("dispatch, the experts, combine", tokens=x)
    came = x.new_empty(sum(takes), width)
    lab.group.all_to_all(came, x[order // CHOSEN], takes, sends)
    # which expert each is for
    of = torch.arange(OWN).repeat(n).repeat_interleave(coming)
    results = torch.empty_like(came)
    with lab.doing("F"):
        for e, w in enumerate(mine):
            results[of == e] = F.gelu(came[of == e] @ w)
    back = x.new_empty(len(order), width)
    lab.group.all_to_all(back, results, sends, takes)
    each = torch.empty_like(back)
    each[order] = back
    y = (each.view(*chosen.shape, width) * gates[..., None]).sum(1)
    lab.after(outputs=y)
    lab.claim("outputs are those of one process", y, alone(x, every))
    total = lab.everyone(counts).sum(0)
    all_ = CHOSEN * lab.size.batch
    lab.claim("every token goes through two experts", int(total.sum()), all_)
    lab.note(
        f"Of {all_} tokens, rank {lab.rank} sent {counts.tolist()} and computed {sum(takes)}."
    )

    # Tokens that are alike crowd at few experts, and the other ranks wait; so a bias is added to
    # the scores for the choice alone, and after each step it moves a little against who had more
    # than the mean (Wang et al. 2024). The weights of the results are without it.
    lab.step("balancing, without an auxiliary loss", bias=bias)
    most = int(total.max())
    for _ in range(ROUNDS):
        chosen = routed(x, bias)[0].flatten()
        counts = chosen.bincount(minlength=OWN * n).double()
        # over all tokens, or ranks would choose differently
        lab.group.all_reduce(counts)
        bias -= STEP * (counts - counts.mean()).sign()
    lab.after(bias=bias)
    lab.claim("the busiest expert has fewer tokens", bool(counts.max() < most))
    lab.claim("ranks have one bias", bias, gathered(lab.group, bias[None])[0])


def routed(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, and their weights, which add up to one: (rows,
    2) each."""
    router = draw(400, x.shape[1], len(bias)) / x.shape[1] ** 0.5
    skewed = x @ router + torch.linspace(1, -1, len(bias), dtype=x.dtype)
    scores = skewed.sigmoid()
    chosen = (scores + bias).topk(CHOSEN).indices
    gates = scores.gather(1, chosen)
    return chosen, gates / gates.sum(1, keepdim=True)


def alone(x: Tensor, every: list[Tensor]) -> Tensor:
    """Apply all experts to all rows, each weighted by its gate or by zero."""
    chosen, gates = routed(x, torch.zeros(len(every), dtype=x.dtype))
    weights = torch.zeros(len(x), len(every), dtype=x.dtype)
    weights = weights.scatter(1, chosen, gates)
    outputs = torch.stack([F.gelu(x @ w) for w in every], 1)
    return (outputs * weights[..., None]).sum(1)
