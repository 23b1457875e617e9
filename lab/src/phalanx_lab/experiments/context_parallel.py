"""Attention over a sequence that is sharded over ranks: keys and values travel round a
ring, heads are exchanged for tokens, or a state is passed on."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Group, Work
from phalanx.comm.regions import exchange, gather_sum
from phalanx_lab.lab import Lab, gathered
from phalanx_lab.mlp import draw

HEADS = 4


def attend(
    lab: Lab,
    titles: tuple[str, str],
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    """Attention of this rank's tokens, forward and backward, and the claim that it is plain attention."""
    lab.size.part("width", 0, HEADS)  # refuses what does not divide
    # (heads, tokens, head_dim)
    shape = (
        HEADS,
        lab.size.batch,
        lab.size.width // HEADS,
    )
    q, k, v = whole = [draw(i, *shape).requires_grad_() for i in (1, 2, 3)]
    own = lab.part("batch")
    qkv = [x[:, own].detach().contiguous().requires_grad_() for x in whole]
    lab.step(titles[0], qkv=qkv)
    out = attention(*qkv)
    lab.after(out=out)
    part = out.square().sum() / out.numel() / lab.n
    lab.step(titles[1], own_part_of_the_loss=part)
    gradients = torch.autograd.grad(part, qkv)
    loss = part.detach()
    lab.group.all_reduce(loss)
    lab.after(gradients=gradients, loss=loss)

    scores = q @ k.mT / q.shape[-1] ** 0.5
    plain = masked(scores).softmax(-1) @ v
    mean = plain.square().mean()
    lab.claim("the loss is one process's", loss, mean)
    lab.claim("the output is that of its tokens", out, plain[:, own])
    for name, x, want in zip(
        "qkv", gradients, torch.autograd.grad(mean, whole), strict=True
    ):
        lab.claim(f"gradient of {name}", x, want[:, own])


def masked(s: Tensor, first: int = 0) -> Tensor:
    """Mask scores (heads, tokens, keys) of later keys; the first query is at position
    `first`."""
    later = torch.ones(s.shape[1:]).triu(1 + first).bool()
    return s.masked_fill(later, -torch.inf)


def block(
    x: Tensor,
    w: dict[str, Tensor],
    first: int = 0,
    collect: Callable[[Tensor], Tensor] = Tensor.clone,
) -> Tensor:
    """A block of a transformer on tokens x, the first of which is number `first`: (tokens, width).

    `collect` makes the keys and values of all tokens of those of x.
    """

    def heads(t: Tensor) -> Tensor:
        # (heads, tokens, head_dim)
        return t.view(len(t), HEADS, -1).transpose(0, 1)

    h = normed(x, w["norm"])
    q = heads(h @ w["q"])
    k = heads(collect(h @ w["k"]))
    v = heads(collect(h @ w["v"]))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    p = masked(scores, first).softmax(-1)
    x = x + (p @ v).transpose(0, 1).flatten(1) @ w["out"]
    return (
        x
        + torch.nn.functional.gelu(normed(x, w["norm of mlp"]) @ w["up"])
        @ w["down"]
    )


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of each token."""
    mean_square = x.square().mean(1, keepdim=True)
    return x * mean_square.add(1e-6).rsqrt() * weight


def context_parallel(lab: Lab) -> None:
    """Context parallel: each rank has a part of one sequence; norms, QKV and MLP need no other token,
    attention does, and every weight's gradient is a sum over ranks.

    With a sequence of 128k tokens one sample's activations do not fit on one device. So the sequence is
    cut: rank r has the r-th part of its tokens, through all layers, and a copy of all weights.
    """
    size, own, n = lab.size, lab.part("batch"), lab.n
    size.part("width", 0, HEADS)  # refuses what does not divide
    scale, square = size.width**-0.5, (size.width, size.width)
    names = "q", "k", "v", "out", "up", "down"
    plain = {
        name: scale * draw(70 + i, *square) for i, name in enumerate(names)
    }
    plain |= {
        name: 1 + 0.1 * draw(80 + len(name), size.width)
        for name in ("norm", "norm of mlp")
    }
    weights = {name: w.clone().requires_grad_() for name, w in plain.items()}
    tokens = draw(9, size.batch, size.width)

    # A norm looks at one token, and so do the products that make queries, keys and values, and the
    # MLP: on these a rank works as if its tokens were all there are. In attention its queries meet
    # the keys and values of earlier tokens, which other ranks have. Here all are gathered; a ring
    # passes them round.
    lab.step("forward: own tokens, keys and values of all", tokens=tokens[own])
    y = block(
        tokens[own], weights, own.start, lambda x: gather_sum(x, lab.group, 0)
    )
    loss = y.square().sum() / tokens.numel()
    lab.after(y=y, own_part_of_the_loss=loss)
    alone = {name: w.clone().requires_grad_() for name, w in plain.items()}
    whole = block(tokens, alone)
    lab.claim("the output is that of its tokens", y, whole[own])

    # Backward of the gather is a reduce-scatter: each rank has gradients for everyone's keys and
    # values, and a rank needs the sum for its own. After that backward, too, is a matter of own
    # tokens. What each rank has then is its tokens' part of every weight's gradient: of norms, QKV
    # and MLP alike.
    lab.step("backward: a part of each gradient", own_part_of_the_loss=loss)
    torch.autograd.backward(loss)
    gradients = {
        name: w.grad for name, w in weights.items() if w.grad is not None
    }
    lab.after(**{f"gradient of {name}": g for name, g in gradients.items()})
    torch.autograd.backward(whole.square().mean())
    parts = gradients["norm"].clone()

    # So all of them are summed over ranks, as in data parallel; whoever forgets one (a norm is
    # forgotten most often, having so few numbers) has copies that drift apart.
    lab.step("the sum over ranks", gradient_of_norm=parts)
    for g in gradients.values():
        lab.group.all_reduce(g)
    lab.after(**{f"gradient of {name}": g for name, g in gradients.items()})
    for name, w in alone.items():
        lab.claim(
            f"gradient of {name}: the sum is one process's",
            gradients[name],
            w.grad,
        )
    far = (parts - gradients["norm"]).abs().max()
    off = far > 1e-6 * gradients["norm"].abs().max()
    lab.claim("before the sum it was only a part", bool(off) or n == 1)
    numbers = sum(w.nbytes for w in plain.values())
    formula = (
        2 * (n - 1) / n * numbers
        + 4 * (n - 1) * 8 * size.width * size.batch / n
    )
    lab.claim(
        "it sent gradients as data parallel; keys, values and theirs",
        lab.sent(),
        formula,
    )


def ring_attention(lab: Lab) -> None:
    """Ring attention: queries stay, keys and values travel round the ring, softmax is combined on the
    way.

    Every rank has a part of the sequence. In each of n rounds it attends to the keys and values that
    it has at the moment and passes them on, while the next ones arrive (Liu et al. 2023).
    A causal mask makes some rounds empty: the first rank sees only its own keys, the last sees all, so
    equal parts are unequal work.
    """
    # Keys and values were passed n-1 times forward and n-1 times back, their gradients n times.
    title = "backward: once more round, gradients travel with keys and values"

    def attention(*qkv: Tensor) -> Tensor:
        return RingAttention.apply(*qkv, lab)  # type: ignore[no-untyped-call,no-any-return]

    attend(lab, ("forward: n rounds", title), attention)
    n, block = lab.n, 8 * lab.size.batch * lab.size.width / lab.n
    gradients = 2 * n if n > 1 else 0
    loss = 2 * (n - 1) / n * 8
    formula = (4 * (n - 1) + gradients) * block + loss
    lab.claim(
        "it sent keys and values twice, their gradients once",
        lab.sent(),
        formula,
    )


class RingAttention(torch.autograd.Function):
    """softmax needs the sum over all keys, so each rank keeps, for every query, the logarithm of the
    sum so far and the output so far, and rescales the output when a round adds to the sum. Backward
    goes round once more; keys and values travel with the gradient collected for them, and one last
    hop brings that home."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lab: Lab) -> Tensor:
        own, out = (q, k, v), torch.zeros_like(q)
        log_sum = q.new_full((*q.shape[:2], 1), -torch.inf)
        for hop in range(lab.n):
            source, last = (lab.rank - hop) % lab.n, hop == lab.n - 1
            arriving, works = (
                ([k, v], []) if last else pass_on(lab.group, k, v)
            )
            if source <= lab.rank:  # later ranks have only later keys
                with lab.doing(f"keys of {source}"):
                    s = scores(lab, q, k, source)
                    total = torch.logaddexp(
                        log_sum, s.logsumexp(-1, keepdim=True)
                    )
                    out = out * (log_sum - total).exp() + (s - total).exp() @ v
                    log_sum = total
            for work in works:
                work.wait()
            k, v = arriving
        lab.after(log_sum=log_sum)
        ctx.lab = lab
        ctx.save_for_backward(*own, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        lab, (q, k, v, out, log_sum), (g,) = (
            ctx.lab,
            ctx.saved_tensors,
            gradients,
        )
        gq, gk, gv = (torch.zeros_like(x) for x in (q, k, v))
        inner = (g * out).sum(-1, keepdim=True)
        for hop in range(lab.n):
            source = (lab.rank - hop) % lab.n
            if source <= lab.rank:
                with lab.doing(f"keys of {source}"):
                    p = (scores(lab, q, k, source) - log_sum).exp()
                    gs = p * (g @ v.mT - inner) / q.shape[-1] ** 0.5
                    gq += gs @ k
                    gk += gs.mT @ q
                    gv += p.mT @ g
            # Keys and values are not needed after the last round; their gradients must still get home.
            moving = (gk, gv) if hop == lab.n - 1 else (gk, gv, k, v)
            arriving, works = (
                pass_on(lab.group, *moving) if lab.n > 1 else (moving, [])
            )
            for work in works:
                work.wait()
            gk, gv, k, v = (*arriving, k, v)[:4]
        return gq, gk, gv, None


def scores(lab: Lab, q: Tensor, k: Tensor, source: int) -> Tensor:
    """Return q k' / sqrt(d) of this rank's queries and the keys of `source`: (heads,
    own tokens, its tokens)."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return masked(scores, (lab.rank - source) * q.shape[1])


def pass_on(
    group: Group, *tensors: Tensor
) -> tuple[Sequence[Tensor], list[Work]]:
    """Send to the next rank. Return the tensors arriving from the previous one, and the
    pending receives."""
    n, rank = group.size, group.rank
    arriving = [torch.empty_like(x) for x in tensors]
    for x in tensors:
        group.send(x, to=(rank + 1) % n)
    return arriving, [
        group.receive(x, source=(rank - 1) % n, wait=False) for x in arriving
    ]


def ulysses(lab: Lab) -> None:
    """Ulysses: an all-to-all before attention turns a split by tokens into one by heads, another turns
    it back.

    Each exchange moves (n-1)/n of a rank's numbers whatever n, where a ring passes everything n-1 times
    (Jacobs et al. 2023). Large runs combine the two: Ulysses inside a machine, the ring across.
    """
    n = lab.n

    # A head cannot be split, so there can be at most as many ranks as query heads; with more, or
    # where heads do not divide evenly, the ring takes over.
    if HEADS % n:
        lab.note(
            f"{n} ranks and {HEADS} heads: a head cannot be split, so the ring is used."
        )
        ring_attention(lab)
        return

    # A rank starts with all heads of some tokens. An all-to-all gives it all tokens of some heads,
    # plain attention runs as it always does, and another all-to-all returns. An exchange is a
    # transpose over ranks, so its gradient is the same exchange in reverse.
    def attention(*own: Tensor) -> Tensor:
        q, k, v = (exchange(x, lab.group, 0, 1) for x in own)
        lab.after(all_tokens_of_some_heads=q)
        with lab.doing("attention"):
            scores = q @ k.mT / q.shape[-1] ** 0.5
            out = masked(scores).softmax(-1) @ v
        return exchange(out, lab.group, 1, 0)

    # Three tensors went to heads and one came back, in forward and in backward: eight exchanges.
    title = "forward: to heads, attention, back to tokens"
    attend(lab, (title, "backward: the same exchanges in reverse"), attention)
    formula = (
        8 * (n - 1) / n * lab.size.batch * lab.size.width / n * 8
        + 2 * (n - 1) / n * 8
    )
    lab.claim(
        "it sent (n-1)/n of its numbers eight times", lab.sent(), formula
    )


def state_passing(lab: Lab) -> None:
    """State passing: linear attention keeps one matrix per head for all earlier tokens; ranks pass
    it on, or gather how each rank's tokens change it.

    The gated delta rule (Yang et al. 2024) keeps a state S for each head. A token with key k, value
    v, decay a and strength b updates it to a (I - b k k') S + b k v', and query q reads S' q. The
    state has the same size after a hundred tokens and after a million.
    """
    n, rank, own = lab.n, lab.rank, lab.part("batch")
    lab.size.part("width", 0, HEADS)  # refuses what does not divide
    whole = [x.requires_grad_() for x in rule_inputs(lab)]
    mine = [x[:, own].detach().contiguous().requires_grad_() for x in whole]
    # (heads, features of a key, features of a value)
    empty = torch.zeros(HEADS, *[lab.size.width // HEADS] * 2).double()

    # The first way is a chain. A rank waits for the state at its first token, goes through its
    # tokens, and sends the state at its end. So only one rank works at a time, unless there are
    # several sequences, or work that needs no state.
    lab.step("forward: the state comes from the rank before", keys=mine[1])
    state = empty.clone()
    if rank:
        lab.group.receive(state, rank - 1)
    state.requires_grad_()
    with lab.doing("tokens"):
        out, end = delta_rule(mine, state)
    if rank < n - 1:
        lab.group.send(end.detach(), rank + 1)
    part = out.square().sum() / out.numel() / n
    lab.after(out=out, state_at_the_end=end)

    # Backward is the same chain from the last rank to the first, with the gradient of the state.
    lab.step("backward: its gradient goes back", own_part_of_the_loss=part)
    into_end = empty.clone()
    if rank < n - 1:
        lab.group.receive(into_end, rank + 1)
    *gradients, into_state = torch.autograd.grad(
        [part, end], [*mine, state], [torch.ones_like(part), into_end]
    )
    if rank:
        lab.group.send(into_state, rank - 1)
    lab.after(gradients=gradients)
    plain, _ = delta_rule(whole, empty)
    lab.claim("the output is that of its tokens", out, plain[:, own])
    wanted = torch.autograd.grad(plain.square().mean(), whole)
    names = "queries", "keys", "values", "decay", "strength"
    for name, x, want in zip(names, gradients, wanted, strict=True):
        lab.claim(f"gradient of {name}", x, want[:, own])
    states = (rank < n - 1) + (rank > 0)
    lab.claim("it sent a state", lab.sent(), states * empty.nbytes)

    # The second way has no chain. A rank's tokens turn any state S into M S + N, where M and N
    # depend on these tokens alone. Starting from an empty state gives N. Starting from the
    # identity, with all values zero, gives M. All ranks compute M and N at once and gather them,
    # and each rank combines those of the ranks before it. phalanx does the same.
    lab.step("all ranks gather M and N", keys=mine[1])
    found = combined(lab, *change(mine, empty))
    lab.after(state=found)
    lab.claim("the state is the chain's", found, state)
    if rank == 0:
        count = own.stop - own.start
        lab.note(
            f"In the chain, the last rank finishes after {n} x {count} tokens, one after the"
            f" other. With the gather it finishes after 3 x {count}: {count} each for M, for N"
            " and for the reads."
        )
    compare_ways(lab, empty)


def rule_inputs(lab: Lab) -> list[Tensor]:
    """Queries, keys of length 1, and values (heads, tokens, features); decays and strengths."""
    shape = HEADS, lab.size.batch, lab.size.width // HEADS
    q, k, v = (draw(20 + i, *shape) for i in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    decay, strength = (draw(30 + i, *shape[:2]).sigmoid() for i in range(2))
    return [q, k, v, decay, strength]


def delta_rule(
    inputs: Sequence[Tensor], state: Tensor
) -> tuple[Tensor, Tensor]:
    """The reads of all tokens (heads, tokens, features), and the state behind the last one."""
    q, k, v, decay, strength = inputs
    reads = []
    for t in range(q.shape[1]):
        key = k[:, t, :, None]  # (heads, features, 1)
        a, b = decay[:, t, None, None], strength[:, t, None, None]
        state = a * (state - b * key @ (key.mT @ state))
        state = state + b * key @ v[:, t, None]
        reads.append(q[:, t, None] @ state)
    return torch.cat(reads, 1), state


def change(inputs: Sequence[Tensor], empty: Tensor) -> tuple[Tensor, Tensor]:
    """M and N: these tokens turn a state S into M S + N."""
    q, k, v, decay, strength = (x.detach() for x in inputs)
    _, adds = delta_rule((q, k, v, decay, strength), empty)
    identity = torch.eye(empty.shape[-1]).to(empty).expand_as(empty)
    nothing = torch.zeros_like(v)
    _, moves = delta_rule((q, k, nothing, decay, strength), identity)
    return moves, adds


def combined(lab: Lab, moves: Tensor, adds: Tensor) -> Tensor:
    """The state at this rank's first token, from M and N of the ranks before it."""
    every = gathered(lab.group, torch.stack((moves, adds))[None])
    state = torch.zeros_like(adds)
    for move, add in every[: lab.rank]:
        state = move @ state + add
    return state


def compare_ways(lab: Lab, state: Tensor) -> None:
    """Measure the messages of a forward: the chain, the gather, and a ring of keys and values."""

    def chain() -> None:
        if lab.rank:
            lab.group.receive(torch.empty_like(state), lab.rank - 1)
        if lab.rank < lab.n - 1:
            lab.group.send(state, lab.rank + 1)

    def gather() -> None:
        combined(lab, state, state)

    ways = [
        ("a state, rank to rank", "any", chain),
        ("M and N, gathered", "any", gather),
    ]
    for tokens in (lab.size.batch // lab.n * x for x in (1, 8, 64)):
        keys = draw(40, tokens, lab.size.width)

        def ring(x: Tensor = keys) -> None:
            for _ in range(lab.n - 1):
                for work in pass_on(lab.group, x, x)[1]:
                    work.wait()

        ways.append(("keys and values, round a ring", str(tokens), ring))
    rows = []
    for title, tokens_of_rank, way in ways:
        lab.step(
            f"only messages: {title}, {tokens_of_rank} tokens", state=state
        )
        before, start = lab.sent(), time.perf_counter()
        way()
        own = torch.tensor([lab.sent() - before, time.perf_counter() - start])
        lab.after(state=state)
        # The rank that sends most, and the one that waits longest.
        sent, seconds = lab.everyone(own.double()).amax(0).tolist()
        rows.append(
            (title, tokens_of_rank, f"{sent:,.0f}", f"{1e3 * seconds:.2f}")
        )
    header = "what travels", "tokens of a rank", "bytes sent", "ms"
    lab.table("messages of a forward, without computation", header, rows)
