"""SOAP on one process, written line by line from the paper (arXiv 2409.11321).

Algorithms 3 and 4. The variables have the paper's names. It shares no line with the
engine's: bases are made orthogonal by Gram-Schmidt, and all matrices are whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..parallel import Model
from ..training.soap import FLOOR, Soap
from .plain_optimizers import BesideAdamW, Weights


@dataclass
class _State:
    """The state of one layer: the paper's L, R, Q_L, Q_R, M and V."""

    left: Tensor
    right: Tensor
    left_basis: Tensor
    right_basis: Tensor
    m: Tensor
    v: Tensor


class PlainSoap(BesideAdamW):
    """SOAP for each matrix, and torch's AdamW for all other weights."""

    def __init__(
        self, optimizer: Soap, weights: Weights, lr: float, model: Model
    ) -> None:
        super().__init__(optimizer, weights, lr, model)
        self.soap, self.t = optimizer, 0
        self.states: list[_State] = []

    @torch.no_grad()
    def step_matrices(self, lr: float) -> None:
        adam, eta = self.soap.others, lr
        for number, (_, _, w) in enumerate(self.matrices):
            g = torch.zeros_like(w) if w.grad is None else w.grad
            w.sub_(eta * adam.decay * w)
            # The first batch makes the bases, and no update.
            if self.t == 0:
                left = (1 - adam.beta2) * g @ g.T
                right = (1 - adam.beta2) * g.T @ g
                zeros = torch.zeros_like(g)
                bases = _eigenvectors(left), _eigenvectors(right)
                state = _State(left, right, *bases, zeros, zeros)
                self.states.append(state)
                continue
            s = self.states[number]
            rotated = s.left_basis.T @ g @ s.right_basis  # line 3
            s.m = adam.beta1 * s.m + (1 - adam.beta1) * g
            m_rotated = s.left_basis.T @ s.m @ s.right_basis
            s.v = adam.beta2 * s.v + (1 - adam.beta2) * rotated**2
            # Adam with its bias corrections; the paper leaves them out for brevity.
            m_hat = m_rotated / (1 - adam.beta1**self.t)
            v_hat = s.v / (1 - adam.beta2**self.t)
            n_rotated = m_hat / (v_hat**0.5 + adam.eps)
            n = s.left_basis @ n_rotated @ s.right_basis.T
            w.sub_(eta * n)
            s.left = adam.beta2 * s.left + (1 - adam.beta2) * g @ g.T
            s.right = adam.beta2 * s.right + (1 - adam.beta2) * g.T @ g
            if self.t % self.soap.refresh_every == 0:
                s.left_basis = _refreshed(s.left, s.left_basis)
                s.right_basis = _refreshed(s.right, s.right_basis)
        self.t += 1


def _eigenvectors(p: Tensor) -> Tensor:
    """Eigenvectors above the floor, the largest first, and unit vectors for the rest.

    Unit vectors of rows without a gradient come before the others.
    """
    values, vectors = torch.linalg.eigh(p)
    above = [
        vectors[:, n]
        for n in reversed(range(len(p)))
        if values[n] > FLOOR * p.trace() / len(p)
    ]
    units = torch.eye(len(p), dtype=p.dtype)
    without = [units[n] for n in range(len(p)) if p[n, n] == 0]
    others = [units[n] for n in range(len(p)) if p[n, n] != 0]
    return _gram_schmidt([*above, *without, *others], len(p))


def _refreshed(p: Tensor, q: Tensor) -> Tensor:
    """Algorithm 4: power iteration and QR, of P shifted by the floor.

    The basis of a matrix without any gradient stays as it is.
    """
    shift = FLOOR * p.trace() / len(p)
    if shift == 0:
        return q
    shifted = p + shift * torch.eye(len(p), dtype=p.dtype)
    return _gram_schmidt([*(shifted @ q).T], len(p))


def _gram_schmidt(vectors: list[Tensor], count: int) -> Tensor:
    """The first `count` linearly independent vectors made orthonormal, as columns."""
    basis: list[Tensor] = []
    for vector in vectors:
        if len(basis) == count:
            break
        # A dependent vector leaves a rounding residue below this, in float32 too. A
        # unit vector that is almost dependent may leave as little as 1e-4.
        least = 100 * torch.finfo(vector.dtype).eps * vector.norm()
        # Twice, so that rounding leaves no component along earlier vectors.
        for _ in range(2):
            for each in basis:
                vector = vector - (each @ vector) * each
        if vector.norm() > least:
            basis.append(vector / vector.norm())
    return torch.stack(basis, dim=1)
