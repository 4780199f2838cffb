"""
Laplacian smoothing: the best any predictor can do on random Markov chains.

If kernels are drawn from Dirichlet(beta), the posterior predictive of the next token is the add-beta estimator:
count how often each symbol followed the current context, add beta to every count, normalise.

    P_beta(x_{t+1} = j | x_1..x_t) = (n_j + beta) / (n + S beta),   n = sum_j n_j        # Laplacian smoothing

Two reference losses, never to be mixed up:
    bayes   the loss of add-beta, the optimum for whoever must learn the kernel from the sequence: gap = loss - bayes
    oracle  the loss of the true kernel, which no predictor can know; lower on average

Glossary (code: paper, Section 3):
    x: (B, T) tokens      S: alphabet size (X)      k: order      c: context index (markov.py)
    n_j: count            of symbol j after earlier occurrences of the current context, inside x_1..x_t
    beta: prior           1 is Laplace's rule, 1/2 is Krichevsky-Trofimov
    p_switch              probability of the switch symbol S: counts start afresh at every switch

Run me:     python laplace.py
Change me:  another prior (markov.py) has another posterior: the last lines of `add_beta_loop`, then of `add_beta`.
"""

import math

import torch

from markov import context_index, order_of, sample_chain, sample_kernel


def add_beta_loop(x, S, k, beta=1.0):
    """The estimator as it is defined, one sequence x (a list of ints) at a time: the reference for `add_beta`."""
    x, probs, counts = [int(symbol) for symbol in x], [], {}
    for t in range(len(x)):
        if t + 1 < k:
            probs.append([1 / S] * S)
            continue
        context = tuple(x[t - k + 1 : t + 1])  # the last k tokens
        if t >= k:
            previous = tuple(x[t - k : t])
            counts.setdefault(previous, [0] * S)[x[t]] += 1
        n = counts.get(context, [0] * S)
        probs.append([(n[j] + beta) / (sum(n) + S * beta) for j in range(S)])
    return probs


def add_beta(x, S, k, beta=1.0, p_switch=None, dtype=torch.float32):
    """Laplacian smoothing for all positions at once: probs (B, T, V), row t being P(x_{t+1} = . | x_1..x_t).

    x: (B, T) tokens below S (below S + 1 if p_switch is given: then V = S + 1, otherwise V = S). Uniform over the S
    symbols while the current context is shorter than k. Memory grows with B T S, whatever S**k is.
    Raises ValueError for tokens outside the alphabet, k < 1, beta outside 1e-6 to 1e6 or p_switch outside [0, 1).
    """
    V = S if p_switch is None else S + 1
    if k < 1 or not 1e-6 <= beta <= 1e6:
        raise ValueError(f"need k >= 1 and beta between 1e-6 and 1e6, got k={k}, beta={beta}")
    if p_switch is not None and not 0 <= p_switch < 1:
        raise ValueError(f"p_switch must be in [0, 1), got {p_switch}")
    if x.numel() and int(x.max()) >= V:
        raise ValueError(f"tokens must be below {V}, got {int(x.max())}")
    counts = context_counts(x, S, k).to(dtype)  # (B, T, S)
    probs = (counts + beta) / (counts.sum(-1, keepdim=True) + S * beta)  # Laplacian smoothing
    if p_switch is None:
        return probs
    switch = torch.full_like(probs[..., :1], p_switch)
    return torch.cat([(1 - p_switch) * probs, switch], -1)


def context_counts(x, S, k):
    """n_j at every position of x (B, T), int64 (B, T, S); symbols >= S are switches, after which counts start afresh.

    Sorting positions by context (stably, so that time order stays) makes each context's history a contiguous run;
    inside a run the counts are a cumulative sum of one-hot successors.
    """
    c = context_index(x, S, k)  # (B, T)
    B, T = x.shape
    segment = (x >= S).long().cumsum(1)  # (B, T) switches so far: the same context in another segment is another one
    switches = int(segment.max()) if x.numel() else 0
    if (switches + 1) * S**k >= 2**62:
        raise ValueError(f"S**k = {S}**{k} contexts in each of {switches + 1} segments do not fit a 64-bit index")
    key = (segment * S**k + c).masked_fill(c < 0, -1)
    key, position = key.sort(dim=1, stable=True)  # (B, T) both

    after = torch.zeros(B, T, S, dtype=torch.long, device=x.device)  # one-hot of x_{t+1}; a switch is nobody's count
    after[:, :-1] = x[:, 1:, None] == torch.arange(S, device=x.device)
    after = after.gather(1, position[..., None].expand(-1, -1, S))  # (B, T, S), runs of one context after another
    before = after.cumsum(1) - after  # strictly earlier positions, all runs together

    t = torch.arange(T, device=x.device).expand(B, T)
    new_run = torch.ones_like(key, dtype=torch.bool)
    new_run[:, 1:] = key[:, 1:] != key[:, :-1]
    start = torch.where(new_run, t, 0).cummax(1).values  # (B, T) where the run of this context began
    counts = before - before.gather(1, start[..., None].expand(-1, -1, S))
    counts = counts.masked_fill((key < 0)[..., None], 0)
    return torch.empty_like(counts).scatter_(1, position[..., None].expand(-1, -1, S), counts)  # back to time order


def bayes_loss(x, S, k, beta=1.0, p_switch=None):
    """Loss of the optimum add-beta, in nats: (B, T-1), entry t being -log P_beta(x_{t+1} | x_1..x_t)."""
    probs = add_beta(x, S, k, beta, p_switch)[:, :-1]  # (B, T-1, V)
    return -probs.gather(-1, x[:, 1:, None].long()).squeeze(-1).log()


def oracle_loss(x, P):
    """Loss of the true kernels P (B, S**k, S) on their chains x (B, T): (B, T-1) nats; ln S for the first k tokens."""
    S, k = P.shape[-1], order_of(P)
    if len(P) != len(x):
        raise ValueError(f"need one kernel for each sequence, got {len(P)} for {len(x)}")
    if x.numel() and int(x.max()) >= S:
        raise ValueError(f"tokens must be below {S}, got {int(x.max())}: switches have no row in a kernel")
    c = context_index(x[:, :-1], S, k)  # (B, T-1)
    row = P.gather(1, c.clamp(min=0)[..., None].expand(-1, -1, S))  # (B, T-1, S)
    loss = -row.gather(-1, x[:, 1:, None].long()).squeeze(-1).log()
    return loss.masked_fill(c < 0, math.log(S))


if __name__ == "__main__":
    x = torch.tensor([[0, 1, 1, 0, 1, 0]])
    print("Counts turning into probabilities (order 1, beta = 1): what followed x_t before?\n")
    print("  t  x_t   n_0  n_1   P(1) = (n_1 + 1) / (n_0 + n_1 + 2)")
    counts = context_counts(x, 2, 1)[0]
    for t, (symbol, n, p) in enumerate(zip(x[0].tolist(), counts.tolist(), add_beta(x, 2, 1)[0, :, 1])):
        print(f"  {t + 1}   {symbol}     {n[0]}    {n[1]}    ({n[1]} + 1) / ({n[0]} + {n[1]} + 2) = {p:.3f}")
    g = torch.Generator().manual_seed(0)
    P = sample_kernel(4000, S=2, k=1, generator=g)
    x = sample_chain(P, 257, g)
    bayes, oracle = bayes_loss(x, 2, 1).mean(0), oracle_loss(x, P).mean(0)
    print("\nLoss in nats, mean of 4,000 chains; the difference is what add-1 does not know:\n")
    print("  predicting token    bayes   oracle   difference")
    for t in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        print(f"  {t + 1:16d}   {bayes[t - 1]:6.4f}   {oracle[t - 1]:6.4f}   {bayes[t - 1] - oracle[t - 1]:10.4f}")
    print(f"\n  mean of all 256   {bayes.mean():6.4f}   {oracle.mean():6.4f}   {(bayes - oracle).mean():10.4f}")
