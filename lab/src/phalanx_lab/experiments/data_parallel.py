"""Each rank has different rows: data parallel, samplers, saving weights, and sharding
or swapping of weights, gradients and optimizer state."""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.comm import Work
from phalanx.comm.agree import broadcast_text
from phalanx_lab.catalogue import Size
from phalanx_lab.lab import Lab, gathered, scattered
from phalanx_lab.mlp import (
    Adam,
    batch,
    draw,
    gradients_of,
    loss_of,
    one_process,
    start,
    update,
)

# results of a step: the loss, and the gradients that this rank has
Result = tuple[Tensor, list[Tensor]]


def data_parallel(lab: Lab) -> None:
    """Data parallel: each rank has its own rows and loss; gradient and weights are the same everywhere.

    Every rank works on its rows with a copy of all weights. Each rank sends 2(n-1)/n of the gradients,
    whatever the batch.
    """
    n, own, forms = lab.n, list[Tensor](), ("", " overlapped")

    # The losses differ; the average of the gradients over ranks is the gradient of the whole batch,
    # so the copies stay equal. The gradient of the last layer is ready first. The second form
    # starts its all-reduce at once and continues with the layer below: each message travels while
    # the rest of backward computes.
    def train_step(
        weights: list[Tensor], overlapped: bool, step: int
    ) -> Result:
        works: list[Work] = []

        def ready(layer: int, gradient: Tensor) -> Tensor:
            if layer == 0:
                own.append(gradient.clone())
            if overlapped:
                works.append(
                    lab.group.all_reduce(gradient, "average", wait=False)
                )
            return gradient

        loss, gradients = lab.gradients(
            weights, lab.rows(step), gradient=ready
        )
        for work in works:
            work.wait()
        lab.average([] if overlapped else gradients)
        return loss, gradients

    # Both forms train, and must do what one process does with all rows.
    loss, want = gradients_of(start(lab.size), lab.rows(0))
    for how in forms:
        weights = start(lab.size)
        losses = lab.train(
            partial(train_step, weights, how != ""), weights, how=how
        )
        lab.claim(
            f"the first loss{how} is that of its own rows", losses[0], loss
        )
        lab.claim(
            f"its own gradient{how} is that of its rows",
            own[-lab.size.steps],
            want[0],
        )
        # (steps, ranks)
        others = lab.everyone(loss.new_tensor(losses)).T.tolist()
        lab.claim(
            f"every rank has another loss{how}",
            all(len(set(row)) == n for row in others),
        )
    formula = len(forms) * lab.size.steps * 2 * (n - 1) / n * lab.size.bytes
    lab.claim(
        "it sent 2(n-1)/n of the gradients in each step", lab.sent(), formula
    )


def threads_data_parallel(lab: Lab) -> None:
    """Data parallel inside one process, a thread for each device: how it works and why it is slower.

    This is the classic `nn.DataParallel`. The first device has the batch and the weights. In every
    step it scatters rows and copies *all* weights to every other device; a Python thread drives each
    device; outputs and gradients return to the first. There are three reasons to avoid it. The
    interpreter lock lets one thread at a time run Python, so launches of n devices queue up. Everything
    passes through the first device, while the others idle. And a replica is a whole model on one device,
    so it cannot be combined with splitting the model.
    """
    size, n = lab.size, lab.n
    alone = one_process(size)

    # One process drives n devices; the other ranks of this lab wait. Without several GPUs the
    # devices are the CPU under n names: copies are real, the devices are not.
    weights, copied, serial = start(size), 0, 0.0
    lab.step(
        "rank 0 drives all devices, the other ranks wait", weights=weights
    )
    begin = time.perf_counter()
    for step in range(size.steps) if lab.rank == 0 else ():
        loss, gradients, moved, idle = replicated(
            lab, weights, batch(size, step)
        )
        update(weights, gradients)
        copied, serial = copied + moved, serial + idle
        lab.claim("the loss is one process's", loss, alone.losses[step])
        if step == 0:
            lab.claim(
                "gradients are one process's", gradients, alone.gradients
            )
    threaded = time.perf_counter() - begin
    lab.after(weights=weights)
    want = start(size) if lab.rank else alone.weights
    lab.claim("only rank 0 trained, as one process does", weights, want)
    lab.group.barrier()

    # The same with a process for each device, which keeps its weights and sends only gradients.
    # Ranks as threads share one interpreter; `--backend gloo` gives this form its processes.
    by_rank = start(size)
    lab.step("the same with a rank for each device", weights=by_rank)
    for step in range(size.steps):
        gradients = gradients_of(by_rank, lab.rows(step))[1]
        lab.average(gradients)
        update(by_rank, gradients)
    lab.after(weights=by_rank)
    lab.claim("both ways train alike", by_rank, alone.weights)
    formula = size.steps * 2 * (n - 1) / n * size.bytes
    lab.claim(
        "it sent 2(n-1)/n of the weights in each step", lab.sent(), formula
    )

    # Why it is slower does not depend on the machine: the bytes through the busiest device, which
    # decide how long messages take, are more than n times as many; and while they are copied, and
    # gradients added, the n-1 others have nothing to do.
    if lab.rank == 0:
        rows = 8 * size.batch * size.width * (n - 1) // n
        formula = size.steps * (2 * (n - 1) * size.bytes + rows)
        lab.claim(
            "the first device moved 2(n-1) times the weights", copied, formula
        )
        lab.claim(
            "that is n times what one rank sends, or more",
            copied >= n * lab.sent(),
        )
        busiest = [
            ("a thread for each", copied),
            ("a rank for each", round(lab.sent())),
        ]
        table = [
            (how, f"{sent:,}", f"{sent / 50e6:,.2f}") for how, sent in busiest
        ]
        header = ("devices are driven by", "bytes", "ms at 50 GB/s")
        lab.table(
            f"through the busiest of {n} devices, {size.steps} steps",
            header,
            table,
        )
        share = f"{serial / threaded:.0%}"
        lab.note(
            f"{share} of the time went into copying and adding, with {n - 1} devices idle."
        )


def replicated(
    lab: Lab, weights: list[Tensor], x: Tensor
) -> tuple[float, list[Tensor], int, float]:
    """Return loss, gradients, bytes moved to or from the first device, and the seconds
    that it worked alone."""
    gpus, begin = torch.cuda.device_count(), time.perf_counter()
    devices = [
        torch.device("cuda", i % gpus) if gpus > 1 else "cpu"
        for i in range(lab.n)
    ]
    with lab.doing("copy the weights"):
        # rank 0's part ends where the next begins
        rows = torch.split(x, lab.part("batch").stop)
        parts = [part.to(at) for part, at in zip(rows, devices, strict=True)]
        # A copy even where source and device are one memory: a replica is a replica.
        replicas = [
            [w.to(at, copy=True) for w in weights] for at in devices[1:]
        ]
    copied = time.perf_counter()
    with lab.doing("all devices"), ThreadPoolExecutor(lab.n) as threads:
        found = threads.map(gradients_of, [weights, *replicas], parts)
        losses, of_devices = zip(*found, strict=True)
    computed = time.perf_counter()
    with lab.doing("add the gradients"):
        each = (
            [g.to(x.device) for g in of_layer]
            for of_layer in zip(*of_devices, strict=True)
        )
        gradients = [torch.stack(of_layer).mean(0) for of_layer in each]
    alone = copied - begin + time.perf_counter() - computed
    went = sum(w.nbytes for replica in replicas for w in replica)
    came = sum(g.nbytes for gradients in of_devices[1:] for g in gradients)
    moved = went + sum(x.nbytes for x in parts[1:]) + came
    return sum(loss.item() for loss in losses) / lab.n, gradients, moved, alone


EPOCHS = 2


def sampler(lab: Lab) -> None:
    """The distributed sampler: a new order every epoch, each sample once, the loss averaged over
    samples.

    All ranks shuffle alike, from the seed and the epoch, and take every n-th sample: no message is
    needed, and no sample occurs twice in an epoch. Without the epoch in the seed every epoch has the
    same order.
    """
    size, n = lab.size, lab.n
    # (samples, width)
    data = draw(20_000, 2 * size.batch + size.batch // 2 + 1, size.width)
    weights, alone = start(size), start(size)
    used = torch.zeros(EPOCHS, len(data))

    # The last batch is smaller, and some ranks get fewer rows of it: the mean of the ranks' means
    # is then not the mean over samples. So sums and counts are all-reduced, and divided afterwards.
    for epoch in range(EPOCHS):
        for number, chosen in enumerate(batches(size, epoch)):
            rows = chosen[lab.rank :: n]
            used[epoch, rows] += 1
            title = f"epoch {epoch}, batch {number} of {len(chosen)} samples"
            lab.step(title, samples=rows, weights=weights)
            loss, gradients = (
                torch.zeros(()).double(),
                [torch.zeros_like(w) for w in weights],
            )
            if len(rows):
                loss, gradients = gradients_of(weights, data[rows])
            count = torch.tensor(float(len(rows)))
            total = torch.stack([loss * len(rows), count])
            lab.group.all_reduce(total)
            mean = loss.clone()
            lab.group.all_reduce(mean, "average")
            for g in gradients:
                # From a mean over own rows to this rank's part of the mean over all.
                g *= len(rows) / total[1]
                lab.group.all_reduce(g)
            update(weights, gradients)
            lab.after(
                own_loss=loss.item(),
                loss=total[0] / total[1],
                mean_of_means=mean,
            )

            want, wanted = gradients_of(alone, data[chosen])
            update(alone, wanted)
            lab.claim(
                "the loss is that over all samples", total[0] / total[1], want
            )
            lab.claim(
                "gradients are those over all samples", gradients, wanted
            )
            even = len(chosen) % n == 0
            right = abs(float(mean - want)) < 1e-9
            lab.claim(
                "the mean of means is right only where rows are even",
                right,
                even,
            )
    # Over an epoch every sample was used once, by one of the ranks.
    lab.claim("weights at the end are those of one process", weights, alone)
    together = lab.everyone(used).sum(0)
    lab.claim(
        "every sample was used once in an epoch",
        together,
        torch.ones_like(used),
    )
    orders = [torch.cat(batches(size, epoch)) for epoch in range(EPOCHS)]
    lab.claim("the epochs differ in order", not torch.equal(*orders))


def batches(size: Size, epoch: int) -> tuple[Tensor, ...]:
    """Return the samples of two batches and a smaller one, shuffled for this epoch."""
    generator = torch.Generator().manual_seed(7 + epoch)
    order = torch.randperm(
        2 * size.batch + size.batch // 2 + 1, generator=generator
    )
    return torch.split(order, size.batch)


EACH = 2  # microbatches of a rank


def orders_of_sums(lab: Lab) -> None:
    """Orders of sums: why layouts round differently, and one tree that gives all of them the same bits.

    A sum of floating-point numbers is rounded after every addition, so it depends on the order. A
    layout decides the order: a rank adds its own microbatches, and a collective adds what the ranks
    have. Two layouts therefore differ in the last bits. A comparison of them needs a tolerance, and a
    small mistake can hide below it. If every layout adds in one order, nothing can.
    """
    group, rank, n, size = lab.group, lab.rank, lab.n, lab.size
    lab.part("width")  # every rank adds as many rows of the gradient
    count = EACH * n

    # Half of the last bit of 1 is lost when it is added to 1. Two halves that were added to each
    # other before are not.
    half = 2.0**-53
    one_by_one = ((1.0 + half) + half) + half
    in_pairs = (1.0 + half) + (half + half)
    lab.step("the same four numbers in two orders", half=half)
    lab.after(one_by_one=one_by_one, in_pairs=in_pairs)
    lab.claim("one by one, all halves are lost", one_by_one, 1.0, within=0.0)
    more = 1.0 + 2 * half
    lab.claim("in pairs, two are not", in_pairs, more, within=0.0)

    # A microbatch has the same rows in every layout, and so the same gradient to the bit. One process
    # adds the gradients one by one. Ranks add their own ones first.
    alone = [microbatch_gradient(size, i, count) for i in range(count)]
    first = EACH * rank
    own = [
        microbatch_gradient(size, number, count)
        for number in range(first, first + EACH)
    ]
    running = alone[0].clone()
    for gradient in alone[1:]:
        running += gradient
    lab.step("the ordinary way: own microbatches, then an all-reduce", own=own)
    ordinary = own[0] + own[1]
    group.all_reduce(ordinary)
    lab.after(sum=ordinary)
    lab.claim("the sums agree up to rounding", ordinary, running)
    other = int((ordinary != running).sum())
    lab.note(
        f"{other:,} of {running.numel():,} numbers have other bits than one process's sum."
    )

    # The tree adds neighbours, then neighbouring sums, until one is left. A rank's microbatches are
    # neighbours, so what it adds is a part of the tree. It sends each rank a part of its sum; every
    # rank adds the parts of all ranks, in the same tree, and the results are gathered.
    lab.step("one tree: own microbatches, an all-to-all, the parts", own=own)
    begun = lab.sent()
    subtree = added_in_tree(own)
    arrived = torch.empty_like(subtree)
    group.all_to_all(arrived, subtree)
    part = added_in_tree([*arrived.chunk(n)])
    whole = gathered(group, part)
    lab.after(part=part, sum=whole)
    bits = "every bit is that of one process, which adds all in the tree"
    lab.claim(bits, whole, added_in_tree(alone), within=0.0)
    lab.claim(
        "it sent 2(n-1)/n of the gradient, as an all-reduce does",
        lab.sent() - begun,
        2 * (n - 1) / n * whole.nbytes,
    )


def microbatch_gradient(size: Size, number: int, count: int) -> Tensor:
    """Return the first layer's gradient from one of `count` microbatches."""
    rows = batch(size, 0)[size.part("batch", number, count)]
    return gradients_of(start(size), rows)[1][0]


def added_in_tree(terms: list[Tensor]) -> Tensor:
    """Return the sum of terms by adding neighbours; one without a neighbour waits."""
    while len(terms) > 1:
        waiting = terms[len(terms) // 2 * 2 :]
        pairs = zip(terms[0::2], terms[1::2], strict=False)
        terms = [left + right for left, right in pairs] + waiting
    return terms[0]


def save_and_barrier(lab: Lab) -> None:
    """One rank saves, everyone waits, all load: the barrier ensures that the file is complete.

    The weights are the same on all ranks, so one copy is enough. The file is safetensors: opening it
    runs no code.
    """
    size, weights, half = lab.size, start(lab.size), lab.size.steps // 2

    def train_step(step: int) -> Result:
        if step == half:
            save_and_load()
        loss, gradients = gradients_of(weights, lab.rows(step))
        lab.average(gradients)
        return loss, gradients

    # Rank 0 writes under another name and renames, so that a crash leaves the old file or the new
    # one, never a part of one. Without the barrier a rank might open the file before it exists, or
    # when half of it is written. A second barrier stands before the file is removed.
    def save_and_load() -> None:
        lab.step("rank 0 saves, barrier, all load", weights=weights)
        saved = torch.zeros(1, dtype=torch.int64)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(
                broadcast_text(
                    lab.group, str(Path(folder, "weights.safetensors"))
                )
            )
            if lab.rank == 0:
                with lab.doing("save"):
                    save_file(
                        {str(i): w for i, w in enumerate(weights)},
                        f"{path}.new",
                    )
                    os.replace(f"{path}.new", path)
                    saved[0] = path.stat().st_size
            lab.group.barrier()  # nobody opens the file before it is complete
            with lab.doing("load"):
                file = load_file(path)
            lab.group.barrier()  # the folder is removed when everyone has read
        lab.group.broadcast(saved, root=0)
        weights[:] = [file[str(i)].clone() for i in range(len(weights))]
        lab.after(weights=weights, bytes_of_the_file=int(saved))
        before = (
            Size(size.batch, size.width, size.layers, half) if half else None
        )
        want = one_process(before).weights if before else start(size)
        lab.claim("it loaded what was saved", weights, want)
        header = int(saved) - size.bytes
        says = f"the file is the weights and a header of {header} bytes"
        lab.claim(
            says, 8 < header < 200 * size.layers + 64 and header % 8 == 0
        )
        lab.step("training continues from the file")

    # In the middle of training all is saved, forgotten and loaded; the end must be that of one
    # process.
    lab.train(train_step, weights)


def zero_1(lab: Lab) -> None:
    """ZeRO-1: every rank has all weights and all gradients; the optimizer's state is sharded over n
    ranks.

    Adam keeps two numbers for every weight, and each rank of data parallel keeps the same ones. Here
    each has 1/n of them (Rajbhandari et al. 2020).
    """
    size, rank, n = lab.size, lab.rank, lab.n

    # All weights lie in one flat vector, of which each rank updates an equal slice, with its own
    # part of Adam's state.
    flat = padded(start(size), n)
    count = size.layers * size.width**2
    # Views.
    weights = list(flat[:count].view(size.layers, size.width, size.width))
    mine = flat.view(n, -1)[rank]
    adam = Adam([mine])

    # Gradients are reduce-scattered, so that a rank gets the sum for its slice only; it updates
    # that slice, and an all-gather makes the weights whole again. An all-reduce is those two
    # messages, so ZeRO-1 sends exactly what data parallel sends.
    def train_step(step: int) -> Result:
        loss, gradients = lab.gradients(weights, lab.rows(step))
        return loss, [scattered(lab.group, padded(gradients, n), "average")]

    def update_slice(weights: list[Tensor], summed: list[Tensor]) -> None:
        part = mine.clone()
        adam.update([part], summed)
        lab.group.all_gather(flat, part)

    def slice_of(layers: list[Tensor]) -> list[Tensor]:
        return [padded(layers, n).view(n, -1)[rank]]

    # The values below: all weights on every rank, the gradient of its slice, the state of its
    # slice.
    state = [*adam.m, *adam.v]
    lab.train(
        train_step,
        weights,
        slice_of,
        update=update_slice,
        of_weights=list,
        adam=True,
        state=state,
    )
    kept, total = sum(x.numel() for x in state), count + -count % n
    lab.claim(
        "it has 2/n numbers of state for each weight", kept, 2 * total / n
    )
    formula = size.steps * 2 * (n - 1) / n * flat.nbytes
    lab.claim(
        "it sent 2(n-1)/n of the weights in each step", lab.sent(), formula
    )


def padded(parts: list[Tensor], n: int) -> Tensor:
    """Join all elements in one vector whose length is a multiple of n."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    return torch.nn.functional.pad(flat, (0, -len(flat) % n))


def owned(lab: Lab) -> tuple[list[int], list[int]]:
    """Return the owner of each layer, in ranges as equal as possible, and the layers of
    this rank."""
    owners = [
        layer * lab.n // lab.size.layers for layer in range(lab.size.layers)
    ]
    return owners, [
        layer for layer, rank in enumerate(owners) if rank == lab.rank
    ]


def zero_2(lab: Lab) -> None:
    """ZeRO-2: gradients too. Each layer has an owner; its gradient is reduced to the owner and freed
    elsewhere.

    Whole layers as shards keep the code short; they balance only if the layers divide by the ranks.
    """
    size, n, weights = lab.size, lab.n, start(lab.size)
    owners, mine = owned(lab)
    adam = Adam([weights[layer] for layer in mine])

    # As soon as backward has a layer's gradient, it is reduced to the layer's owner, who keeps the
    # sum; the others free theirs. After backward a rank has the gradients of its own layers only,
    # and that is all its optimizer needs.
    def reduced(layer: int, gradient: Tensor) -> Tensor | None:
        lab.group.reduce(gradient, owners[layer], "average")
        return gradient if layer in mine else None

    # Owners update and broadcast their weights.
    def update_own(weights: list[Tensor], gradients: list[Tensor]) -> None:
        adam.update([weights[layer] for layer in mine], gradients)
        for layer, w in enumerate(weights):
            lab.group.broadcast(w, owners[layer])

    # The gradients below are those of its own layers only; of weights it has all.
    lab.train(
        lambda step: lab.gradients(weights, lab.rows(step), gradient=reduced),
        weights,
        lambda layers: [layers[i] for i in mine],
        update=update_own,
        of_weights=list,
        adam=True,
    )
    # The gradients of the others' layers once, its own weights to everyone.
    messages = size.layers - len(mine) + len(mine) * (n - 1)
    formula = messages * size.steps * 8 * size.width**2
    lab.claim(
        "it sent others' gradients and its own weights", lab.sent(), formula
    )


def zero_3(lab: Lab) -> None:
    """ZeRO-3: weights too. The owner broadcasts a layer when it is needed, the others free it after use.

    While it is not used, a layer exists once among all ranks. Weights travel twice and gradients once:
    3(n-1)/n of the weights for each rank, against 2(n-1)/n before. FSDP is this, with every layer cut
    into n equal parts.
    """
    size, n, last = lab.size, lab.n, lab.size.layers - 1
    owners, mine = owned(lab)
    # Its own layers, and the others' from `fetch` until they have been used.
    here = {layer: w for layer, w in enumerate(start(size)) if layer in mine}
    coming: dict[int, Work] = {}
    most = 0

    # While one layer computes, the next is already on its way, so a rank has two at a time and the
    # message is hidden.
    def fetch(layer: int) -> None:
        nonlocal most
        if 0 <= layer < size.layers:
            if layer not in here:
                here[layer] = torch.empty(size.width, size.width).double()
            coming[layer] = lab.group.broadcast(
                here[layer], owners[layer], wait=False
            )
            most = max(most, len(here))

    def use(layer: int, way: int) -> Tensor:
        if layer == 0 and way == 1:
            fetch(layer)
        fetch(layer + way)  # on its way while this one computes
        if layer in coming:
            coming.pop(layer).wait()
        return here[layer]

    # After its forward a layer is freed, but the last: backward needs the layers again, last first,
    # and would fetch it at once. Gradients are reduced to the owner as in ZeRO-2.
    def free(layer: int, output: Tensor) -> Tensor:
        if layer not in (last, *mine):
            del here[layer]
        return output

    def reduced(layer: int, gradient: Tensor) -> Tensor | None:
        if layer not in mine:
            del here[layer]
        lab.group.reduce(gradient, owners[layer], "average")
        return gradient if layer in mine else None

    # Between two steps a rank has its own layers and nothing else: those are the weights below.
    lab.train(
        lambda step: lab.gradients(
            use, lab.rows(step), output=free, gradient=reduced
        ),
        list(here.values()),
        lambda layers: [layers[i] for i in mine],
        update=Adam(list(here.values())).update,
        adam=True,
    )
    sent, received = lab.sent(), lab.received
    lab.claim("it has only its own layers again", list(here), mine)
    lab.claim(
        "it had its own layers and at most two others", most <= len(mine) + 2
    )

    # Every layer is broadcast once in forward and once in backward, the last layer only once.
    unit = size.steps * 8 * size.width**2
    broadcasts = 2 * len(mine) - (last in mine)
    others = 2 * size.layers - 1 - broadcasts
    formula = (broadcasts * (n - 1) + size.layers - len(mine)) * unit
    lab.claim("it sent its own layers twice, gradients once", sent, formula)
    formula = (others + len(mine) * (n - 1)) * unit
    lab.claim("it received weights twice, gradients once", received, formula)
    total = lab.everyone(torch.tensor(sent, dtype=torch.float64)).sum()
    says = "together: 3(n-1)/n of the weights a rank, less the last layer"
    lab.claim(says, total, (3 * size.layers - 1) * (n - 1) * unit)


def hybrid_sharding(lab: Lab) -> None:
    """Hybrid sharding: K ranks share the weights, M such groups are copies; what each group sends.

    Inside a machine links are fast, between machines slow. So weights are sharded only inside, and
    what leaves the machine is small: that is the point of the scheme.
    """
    # K x M ranks form a grid: K inside and M across, as square as n allows, the inside larger.
    size, upwards = lab.size, range(1, int(lab.n**0.5) + 1)
    m = max(count for count in upwards if lab.n % count == 0)
    k = lab.n // m
    neighbours = [range(i * k, (i + 1) * k) for i in range(m)]
    inside = lab.split("inside", neighbours)
    copies = [range(i, lab.n, k) for i in range(k)]
    across = lab.split("across", copies)
    rows = size.part("width", inside.rank, k)
    shards = [w[rows].clone() for w in start(size)]

    # Inside a group of K (one machine, fast links) each rank has 1/K of every layer, gathers it
    # before forward and again before backward, and reduce-scatters the gradient. Across the M
    # groups (slow links) only the 1/K of a rank's own shard is summed.
    def whole(layer: int, way: int) -> Tensor:
        return gathered(inside, shards[layer])

    def reduced(layer: int, gradient: Tensor) -> Tensor:
        part = scattered(inside, gradient, "average")
        across.all_reduce(part, "average")
        return part

    lab.train(
        lambda step: lab.gradients(whole, lab.rows(step), gradient=reduced),
        shards,
        lambda layers: [w[rows] for w in layers],
    )

    # For weights of W bytes each rank sends 3W(K-1)/K inside and 2(M-1)/M x W/K across. People say "3 times
    # the weights inside, once across": the first is close for large K, the second too much by at least K/2.
    sent = [lab.sent("inside") / size.steps, lab.sent("across") / size.steps]
    formula = [3 * size.bytes * (k - 1) / k, 2 * (m - 1) / m * size.bytes / k]
    lab.claim(
        "it sent 3W(K-1)/K inside and 2(M-1)/M x W/K across in each step",
        sent,
        formula,
    )
    title = f"bytes that rank 0 sends in a step; K = {k}, M = {m}, W = {size.bytes:,}"
    columns = zip(sent, formula, (3 * size.bytes, size.bytes), strict=True)
    inside_, across_ = (
        [f"{number:,.0f}" for number in numbers] for numbers in columns
    )
    rows_ = [("inside", *inside_), ("across", *across_)]
    lab.table(title, ("group", "measured", "formula", "rule of thumb"), rows_)


def swap(lab: Lab) -> None:
    """Swapping: the model is in the host's memory, and only the layers in use are on the device.

    The device has two layers however many there are; each step copies every layer in twice, except the
    last, and every gradient out once. It pays where computing a layer takes longer than copying one:
    with many rows. On a GPU the copies use a stream of their own and pinned memory; without one, the
    device is a second copy in the host's memory.
    """
    size, host, last = lab.size, start(lab.size), lab.size.layers - 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here: dict[int, Tensor] = {}
    most = copied_in = copied_out = 0

    # Forward copies a layer in, and the next one after it, and frees the one before. Backward comes
    # the other way; the last layer is still there.
    def use(layer: int, way: int) -> Tensor:
        nonlocal most, copied_in
        for i in (layer, layer + way):
            if 0 <= i <= last and i not in here:
                here[i] = host[i].to(device, copy=True)
                copied_in += host[i].nbytes
                most = max(most, len(here))
        return here[layer]

    def free(layer: int, output: Tensor) -> Tensor:
        if layer != last:
            del here[layer]
        return output

    def loss(y: Tensor) -> tuple[Tensor, Tensor]:
        lab.shows(
            "between forward and backward", on_the_device=list(here.values())
        )
        return loss_of(y)

    # Gradients are copied to the host as soon as they are made, and the update happens there.
    def to_host(layer: int, gradient: Tensor) -> Tensor:
        nonlocal copied_out
        del here[layer]
        copied_out += gradient.nbytes
        return gradient.to("cpu", copy=True)

    def train_step(step: int) -> Result:
        x = lab.rows(step).to(device)
        mean, gradients = lab.gradients(
            use, x, output=free, loss=loss, gradient=to_host
        )
        lab.average(gradients)
        return mean, gradients

    lab.train(train_step, host)
    lab.claim("the device had two layers", most, min(2, size.layers))
    layer = size.steps * 8 * size.width**2
    formula = [(2 * size.layers - 1) * layer, size.layers * layer]
    lab.claim("bytes in and out", [copied_in, copied_out], formula)
