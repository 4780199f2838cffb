"""
Random Markov chains: the data of "From Markov to Laplace".

Every sequence is drawn from its own random kernel, so a model that reads it can only predict well by
estimating that kernel from what it has seen so far: in-context learning with a known optimum (laplace.py).

    P[c] ~ Dirichlet(beta * 1)          one row for each context c, independent     # Kernel
    x_1, ..., x_k ~ Uniform             the first k tokens                          # Order-k chain
    x_{t+1} ~ P[x_{t-k+1}, ..., x_t]    every later token                           # Order-k chain

Glossary (code: paper, Section 2):
    B: sequences            T: tokens in each         S: alphabet size (X)      k: order
    P: (B, S^k, S)          transition kernels, one per sequence
    c: context index        the last k tokens read as a base-S number, newest token least significant
    beta: concentration     small = nearly deterministic rows, 1 = uniform on the simplex, large = fair dice

Run me:     python markov.py
Change me:  another prior is another `sample_kernel`; another process is another way to say, for every
            token, which kernel rules it and whether it is free of it: see `sample_switching`.
"""

import math
import random

import torch


def stream(seed, name, index=0, device="cpu"):
    """A torch.Generator for one random stream, seeded by (seed, name, index) and nothing else."""
    return torch.Generator(device).manual_seed(random.Random(f"{seed}/{name}/{index}").getrandbits(63))


def log_gamma_variates(alpha, shape, generator=None, device="cpu"):
    """log of Gamma(alpha, 1) variates, exact where the variates themselves underflow float32.

    Marsaglia & Tsang (2000) at alpha + 1, then Gamma(alpha) = Gamma(alpha + 1) * U^(1/alpha) in log space:
    at alpha = 1e-3 most variates lie below 1e-38, but their logarithms are ordinary numbers.
    """
    d = alpha + 1 - 1 / 3
    n = math.prod(shape)
    logs = torch.empty(n, device=device)
    left = torch.arange(n, device=device)  # entries not yet accepted; about 5% are left after each round
    while len(left):
        z = torch.randn(len(left), generator=generator, device=device)
        u = 1 - torch.rand(len(left), generator=generator, device=device)  # (0, 1], so that its log is finite
        log_v = 3 * torch.log((1 + z / math.sqrt(9 * d)).clamp(min=1e-30))
        ok = torch.log(u) < z**2 / 2 + d * (1 - log_v.exp() + log_v)
        logs[left[ok]] = math.log(d) + log_v[ok]
        left = left[~ok]
    u = 1 - torch.rand(n, generator=generator, device=device)
    return (logs + torch.log(u) / alpha).view(shape)


def sample_kernel(B, S, k, beta=1.0, generator=None, device="cpu", low=0.0, high=1.0):
    """B random kernels P (B, S**k, S): rows i.i.d. Dirichlet(beta), each summing to 1. PAPER: Section 2.

    beta: 1e-6 to 1e6, tested from 1e-3 to 1e3. low, high: P(1 | context) ~ U[low, high] instead, for S = 2 and beta = 1
    (Table 2 trains on [0, 1/2] and tests on [1/2, 1]). Raises ValueError for sizes or values outside these.
    """
    if B < 1 or S < 2 or k < 0:
        raise ValueError(f"need B >= 1, S >= 2, k >= 0; got B={B}, S={S}, k={k}")
    if not 1e-6 <= beta <= 1e6:
        raise ValueError(f"beta must be between 1e-6 and 1e6, got {beta}")
    _check_generator(generator, device)
    if (low, high) == (0.0, 1.0):
        logs = log_gamma_variates(beta, (B, S**k, S), generator, device)
        return logs.softmax(-1)  # Kernel: normalised gamma variates are a Dirichlet draw
    if S != 2 or beta != 1 or not 0 <= low < high <= 1:
        raise ValueError(f"a prior on [low, high] needs S=2, beta=1, 0 <= low < high <= 1; "
                         f"got S={S}, beta={beta}, low={low}, high={high}")
    p = low + (high - low) * torch.rand(B, 2**k, generator=generator, device=device)
    return torch.stack([1 - p, p], -1)


def sample_chain(P, T, generator=None):
    """One chain x (B, T) int64 from each kernel of P (B, S**k, S); S and k are read off P, T may be below k.

    All T tokens are sampled: the first k uniformly (there is no stationary start), the others from P.
    Raises ValueError if P has no such shape or lives on another device than the generator.
    """
    B, k = len(P), order_of(P)
    _check_generator(generator, P.device)
    u = torch.rand(T, B, generator=generator, device=P.device)  # (T, B): time first, a step of the walk is contiguous
    first_row = (torch.arange(B, device=P.device) * P.shape[1]).expand(T, B)
    free = (torch.arange(T, device=P.device) < k)[:, None]  # (T, 1)
    return _walk(P, first_row, free, u)


def sample_switching(B, T, S, k, beta=1.0, p_switch=0.01, generator=None, device="cpu"):
    """Switching process x (B, T) int64 on S + 1 symbols; symbol S is the switch. PAPER: Section 5.

    At each position, the switch with probability p_switch (then a fresh kernel), otherwise an ordinary token: uniform
    until k of them have been seen since the last switch, from the current kernel afterwards.
    """
    if not 0 <= p_switch < 1:
        raise ValueError(f"p_switch must be in [0, 1), got {p_switch}")
    if B < 1 or T < 1:
        raise ValueError(f"need B >= 1 and T >= 1, got B={B}, T={T}")
    _check_generator(generator, device)
    switch = torch.rand(T, B, generator=generator, device=device) < p_switch
    # Which of one long list of kernels rules each token: the next one at every switch and every new sequence.
    moves = switch.long()  # (T, B)
    moves[0] += 1
    kernel = moves.T.reshape(-1).cumsum(0).view(B, T).T - 1  # (T, B)
    P = sample_kernel(int(kernel.max()) + 1, S, k, beta, generator, device)
    t = torch.arange(T, device=device)[:, None]  # (T, 1)
    last = torch.where(switch, t, -1).cummax(0).values  # (T, B) when the last switch was
    u = torch.rand(T, B, generator=generator, device=device)
    x = _walk(P, kernel * S**k, t - last <= k, u)  # (B, T)
    return x.masked_fill_(switch.T, S)  # Switching process


def _walk(P, first_row, free, u):
    """x (B, T): token t of sequence b is uniform where free (T, B or 1), else from its kernel given the last k tokens.

    Inverse of the cumulative distribution at u (T, B): the token is the number of edges at or below u. Kernels P and
    contexts are one flat table of rows, so a step is one gather for the whole batch; first_row (T, B) is where the
    kernel that rules a token begins.
    """
    (R, C, S), (T, B) = P.shape, u.shape
    edges = P.cumsum(-1)
    edges = (edges / edges[..., -1:])[..., :-1].reshape(R * C, S - 1)  # a symbol of probability 0 is an empty interval
    edges = edges[:, 0] if S == 2 else edges
    oldest_out = torch.arange(C, device=P.device) * S % C  # a table, since integer division is the slowest step here
    x = torch.empty(T, B, dtype=torch.long, device=P.device)
    c = torch.zeros(B, dtype=torch.long, device=P.device)  # context index of each sequence
    for t, share in enumerate(free.float().mean(1).tolist()):
        if share < 1:  # Order-k chain
            edge = edges.index_select(0, first_row[t] + c)  # (B, S-1), or (B,) for two symbols
            x[t] = u[t] >= edge if S == 2 else (u[t, :, None] >= edge).sum(-1)
        if share > 0:
            x[t] = torch.where(free[t], (u[t] * S).long(), x[t])
        c = x[t] if C == S else oldest_out.index_select(0, c) + x[t] if C > 1 else c
    return x.T.contiguous()


def context_index(x, S, k):
    """Index (B, T) int64 of the length-k context ending at each position of x (B, T); newest token least significant.

    -1 where there is no such context: before k tokens, or where the last k include a switch (a symbol >= S).
    Raises ValueError unless x holds integers of at least 0, k >= 0 and S**k fits an int64.
    """
    if x.dim() != 2 or x.is_floating_point() or k < 0:
        raise ValueError(f"need integer tokens (B, T) and k >= 0, got {x.dtype} {tuple(x.shape)} and k={k}")
    if k * math.log2(S) >= 62:
        raise ValueError(f"S**k = {S}**{k} contexts do not fit a 64-bit index")
    if x.numel() and int(x.min()) < 0:
        raise ValueError(f"tokens must be 0 or more, got {int(x.min())}")
    x, T = x.long(), x.shape[1]
    index = torch.zeros_like(x)
    ordinary = torch.ones_like(x, dtype=torch.bool)
    for j in range(min(k, T)):
        index[:, j:] += x[:, : T - j] * S**j  # the token j steps back
        ordinary[:, j:] &= x[:, : T - j] < S
    ordinary[:, : max(k - 1, 0)] = False
    return index.masked_fill(~ordinary, -1)


def order_of(P):
    """The order k of a kernel tensor, from its number of contexts S**k."""
    S = P.shape[-1] if P.dim() == 3 else 0
    k = round(math.log(P.shape[1], S)) if S >= 2 and P.shape[1] else -1
    if k < 0 or S**k != P.shape[1]:
        raise ValueError(f"P must have shape (B, S**k, S), got {tuple(P.shape)}")
    return k


def _check_generator(generator, device):
    if generator is not None and generator.device.type != torch.device(device).type:
        raise ValueError(f"the generator is on {generator.device} but the data is on {device}: use one device for both")


if __name__ == "__main__":
    g = torch.Generator().manual_seed(0)
    print("Two kernels of order 1 on two symbols, a row of P for each context, and a chain:")
    P = sample_kernel(2, S=2, k=1, generator=g)
    for rows, x in zip(P, sample_chain(P, T=200, generator=g)):
        print("\n   next:   0     1")
        for c, p in enumerate(rows):
            print(f"  after {c}: {p[0]:.2f}  {p[1]:.2f}")
        print("  chain:  ", " ".join(map(str, x[:32].tolist())), "...")
        after = x[:-1] == 0
        print(f"  seen:    after 0 came 1 in {x[1:][after].float().mean():.2f} of {int(after.sum())} cases,"
              f" the kernel says {rows[0, 1]:.2f}")
    x = sample_switching(1, 40, S=2, k=1, p_switch=0.1, generator=g)[0]
    print("\nSwitching process (| = a new kernel):\n  ", "".join("01|"[j] for j in x))
    print("\nSmall beta: nearly deterministic rows; large beta: fair coins. P(1), four rows:")
    for beta in (1e-3, 1.0, 1e3):
        row = ", ".join(f"{p:.3g}" for p in sample_kernel(4, 2, 0, beta, g)[:, 0, 1])
        print(f"  beta = {beta:<7g} {row}")
