"""
Single-index targets in context: the gate lets one layer find their subspace ("Mamba Can Learn Low-Dimensional Targets
In-Context via Test-Time Feature Learning", arXiv 2510.12026).

Targets see x through one direction beta, drawn anew for every prompt from r coordinates that are always the same:

    y = g(<beta, x>) +- tau,  beta uniform on the unit sphere of span(e_i, i in I), |I| = r      # Single-index prompt
    G_j = (1 - a_j) a_{j+1} ... a_{N+1},  a_j = exp(-A softplus(y_j / rho + bias))               # Gate
    M = sum_j G_j y_j <phi(x_j), gamma * phi(x_q)>: the scan with b = gamma * phi, c = phi       # Readout
    gamma <- mean of y_q [s_0(x_q) > 0] phi(x_q) * (1/N) sum_j G_j y_j phi(x_j)                  # Stage I
    prediction = <u, relu(s / (3.5 std s) + a)>, s = +-M / N or +-M / |state|, u by ridge        # Stage II

Stage I is one gradient step on gamma from next to 0. It can find I because y sigmoid(y / rho) has a linear part in z,
which he3 itself has not: without the gate the gradient is pure noise. The recurrence is discretised exactly (1 - a_j,
not softplus): only so is the gate a sigmoid at A = 1. Below both stages stands a layer whose parts are trained at once.

Glossary (code: paper):
    d: width of x    support: I    N: pairs (N_pt)    n: 1 + d + d(d+1)/2 features phi, Hermite, degree 2, orthonormal
    gamma: (n,) diagonal of the readout    rho, bias: of the gate, < 0 turns it to negative labels    rate: A
    s: readouts of Q queries, (B, Q, W) for W ReLUs, (B, Q, 2H) from H heads on D = 1 + d features (1, x) of the layer
    mask: where s_0 looks, pure squares: then only odd terms (even links: degree 2) survive the mean over queries

Run me:     python single_index.py
Change me:  a new link is a line in LINKS; another way to weigh the context is an `if` in `OneLayer.read`.
"""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from markov import stream
from regression import LinearData

LINKS = {"he1": lambda z: z, "he2": lambda z: (z**2 - 1) / math.sqrt(2), "he3": lambda z: (z**3 - 3 * z) / math.sqrt(6),
         "he4": lambda z: (z**4 - 6 * z**2 + 3) / math.sqrt(24)}  # Hermite polynomials, E g(z)^2 = 1


def single_index_prompts(B, N, d, support, link="he3", noise=0.1, queries=1, generator=None):
    """B prompts: x (B, N, d), y (B, N), queries xq (B, Q, d), their labels yq (B, Q) and z_q = <beta, x_q> (B, Q).

    support: indices below d, or r for 0..r-1; link: a name of LINKS or a function of z; noise: tau, every label is
    g(z) + tau or g(z) - tau. Raises ValueError for sizes below 1, another support, an unknown link, a negative noise.
    """
    support = list(range(support)) if isinstance(support, int) else list(support)
    if min(B, N, d, queries) < 1 or not 0 <= noise < math.inf:
        raise ValueError(f"need B, N, d, queries at least 1 and noise at least 0, got B={B}, N={N}, d={d}, "
                         f"queries={queries}, noise={noise}")
    if not support or len(set(support)) < len(support) or not 0 <= min(support) <= max(support) < d:
        raise ValueError(f"support must be 1 to d = {d} different indices below d, got {support}")
    if isinstance(link, str) and link not in LINKS:
        raise ValueError(f"link must be one of {', '.join(LINKS)}, got {link}")
    g, draw = LINKS.get(link, link), dict(generator=generator, device=generator.device if generator else "cpu")
    beta = torch.zeros(B, d, device=draw["device"])
    beta[:, support] = F.normalize(torch.randn(B, len(support), **draw), dim=-1)
    x = torch.randn(B, N + queries, d, **draw)
    z = (x @ beta[..., None])[..., 0]  # (B, N+Q)
    y = g(z) + noise * (2 * torch.randint(2, z.shape, **draw) - 1)  # Single-index prompt
    return x[:, :N], y[:, :N], x[:, N:], y[:, N:], z[:, N:]


def hermite_features(x):
    """phi(x), x (..., d) -> (..., n): [1 | x_i | (x_i^2 - 1) / sqrt 2 | x_i x_j, i < j], orthonormal for Gaussian x."""
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], 1, device=x.device)
    return torch.cat([torch.ones_like(x[..., :1]), x, (x**2 - 1) / math.sqrt(2), x[..., i] * x[..., j]], -1)


def hermite_sum(w, x):
    """sum_j w_j phi(x_j), w (B, N), x (B, N, d) -> (B, n), from moments of x: no token's features are in memory."""
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], 1, device=x.device)
    wx, total = w[..., None] * x, w.sum(1, keepdim=True)
    second = wx.mT @ x  # (B, d, d)
    squares = (second.diagonal(dim1=1, dim2=2) - total) / math.sqrt(2)
    return torch.cat([total, wx.sum(1), squares, second[:, i, j]], -1)


def gate_weights(y, rho, bias, rate=1.0):
    """G_j (B, N) of the labels y (B, N): what the scan leaves of token j after the query, whose label is 0."""
    log_a = -rate * F.softplus(F.pad(y, (0, 1)) / rho + bias)  # (B, N+1)
    from_end = log_a.sum(-1, keepdim=True) - log_a.cumsum(-1)
    return (-torch.expm1(log_a) * from_end.exp())[:, :-1]  # Gate


def squares_mask(d):
    """1 at the pure squares of the n features."""
    return F.pad(torch.ones(d), (1 + d, d * (d - 1) // 2))


def gamma_step(weights, x, y, xq, yq, mask):
    """The gradient step on gamma (n,) for a batch of prompts; weights G (B, N). Stage I in closed form."""
    h = hermite_sum(weights * y, x) / y.shape[1]  # (B, n)
    phi = hermite_features(xq)  # (B, Q, n)
    active = phi @ (mask * h)[..., None] > 0  # (B, Q, 1), where the ReLU of the head passes
    return ((yq[..., None] * active * phi).mean(1) * h).mean(0)  # Stage I


def stage_one(d, support, N, tasks, gate=True, rho=0.5, bias=None, rate=1.0, link="he3", noise=0.1, queries=32,
              mask=None, generator=None):
    """gamma (n,) after one gradient step on `tasks` prompts, for one head; bias None: -2 log d. PAPER: Stage I.

    Queries come in pairs x, -x: the even part of an odd link's gradient, all noise, cancels. Without the gate G = 1.
    """
    bias, mask = -2 * math.log(d) if bias is None else bias, squares_mask(d) if mask is None else mask
    gamma, g = 0.0, LINKS[link]
    for start in range(0, tasks, 500):
        B = min(500, tasks - start)
        x, y, xq, _, zq = single_index_prompts(B, N, d, support, link, noise, queries // 2, generator)
        xq, zq = torch.cat([xq, -xq], 1), torch.cat([zq, -zq], 1)
        weights = gate_weights(y, rho, bias, rate) if gate else torch.ones_like(y)
        gamma = gamma + gamma_step(weights, x, y, xq, g(zq), mask) * B / tasks  # noise of y_q would average out
    return gamma


def head_states(x, y, heads, rate=1.0):
    """gamma * sum_j G_j y_j phi(x_j) of heads [(gamma, rhos, bias), ...]: (B, H, n). Gates of several rho add up, which
    for rho and -rho only Stage II may do: in Stage I their gradients cancel."""
    return torch.stack([gamma * hermite_sum(sum(gate_weights(y, rho, bias, rate) for rho in rhos) * y, x)
                        for gamma, rhos, bias in heads], 1)


def readout(x, y, xq, heads, v, rate=1.0, normalise=True):
    """s (B, Q, W): queries against W mixtures v (H, W) of the states, M / N or M over the norm of the mixture."""
    mixed = v.T @ head_states(x, y, heads, rate)  # (B, W, n)
    return hermite_features(xq) @ (F.normalize(mixed, dim=-1) if normalise else mixed / x.shape[1]).mT  # Readout


def stage_two(d, support, N, heads, rate=1.0, normalise=True, link="he3", noise=0.1, contexts=6000, queries=8,
              width=256, ridge=1e-5, generator=None):
    """Ridge regression on `width` ReLUs of readouts; returns predict(x, y, xq) -> (B, Q). PAPER: Stage II.

    heads: [(gamma, rhos, bias), ...]; each ReLU sees a random mixture of their states, its sign if there is one head.
    """
    heads = [(gamma / gamma.abs().max(), rhos, bias) for gamma, rhos, bias in heads]
    v = F.normalize(torch.randn(len(heads), width, generator=generator), dim=0)
    a = 2 * torch.rand(width, generator=generator) - 1
    s, labels = [], []
    for _ in range(0, contexts, 500):
        x, y, xq, yq, _ = single_index_prompts(500, N, d, support, link, noise, queries, generator)
        s.append(readout(x, y, xq, heads, v, rate, normalise).flatten(0, 1))
        labels.append(yq.flatten())
    s, labels = torch.cat(s), torch.cat(labels).double()
    scale = 3.5 * s.std()  # the kinks of the ReLUs must cover the range of s
    A = F.relu(s / scale + a).double()  # (contexts Q, width)
    u = torch.linalg.solve(A.T @ A / len(A) + ridge * torch.eye(width).double(), A.T @ labels / len(A)).float()

    def predict(x, y, xq):  # few prompts at a time: each has `width` mixtures of n numbers
        return torch.cat([F.relu(readout(*part, heads, v, rate, normalise) / scale + a) @ u  # Stage II
                          for part in zip(x.split(100), y.split(100), xq.split(100))])

    return predict


def kernel_ridge(x, y, xq, length, ridge):
    """k(x_q)^T (K + ridge I)^-1 y with K = exp(-|x - x'|^2 / (2 length^2)), each prompt by itself: (B, Q)."""
    if len(x) > 32:  # N^2 numbers a prompt
        parts = zip(x.split(32), y.split(32), xq.split(32))
        return torch.cat([kernel_ridge(*part, length, ridge) for part in parts])
    kernel = lambda u, v: torch.exp(torch.cdist(u, v) ** 2 / (-2 * length**2))
    K = kernel(x, x) + ridge * torch.eye(x.shape[1]).to(x)  # (B, N, N)
    return (kernel(xq, x) @ torch.linalg.solve(K, y[..., None]))[..., 0]


def best_kernel_ridge(x, y, xq, yq, lengths=(1, 2, 4, 6, 9), ridges=(1e-5, 1e-3, 0.1, 1)):
    """kernel_ridge in float64 with the length and the ridge that are best on these very queries, which favours it."""
    doubles = [v.double() for v in (x, y, xq)]
    guesses = (kernel_ridge(*doubles, *setting).to(y.dtype) for setting in itertools.product(lengths, ridges))
    return min(guesses, key=lambda guess: (guess - yq).square().mean().item())


# ----------------------------------------------------------------------------------------------------------------------
# One layer, all parts trained at once, and the task of train.py --data single-index


@dataclass
class OneLayerConfig:
    """Sizes and switches of --model s6 on single-index prompts."""

    vocab: int = 1  # numbers predicted
    inputs: int = 17  # d + 1, set by the data
    heads: int = 8  # H, each with a gate of its own
    hidden: int = 64  # width of the head's two hidden layers
    mixer: str = "mamba"  # what weighs the context: "mamba", "linear" (no gate), "softmax" attention
    norm: bool = True  # readouts divided by the norm of their state

    def __post_init__(self):
        if min(self.heads, self.hidden) < 1 or self.inputs < 2:
            raise ValueError(f"heads and hidden must be at least 1, got {self.heads} and {self.hidden}")
        if self.mixer not in ("mamba", "linear", "softmax"):
            raise ValueError(f"mixer must be one of mamba, linear, softmax, got {self.mixer}")


class OneLayer(nn.Module):
    """H gated heads on phi = (1, x) with values y and 1, then an MLP: tokens (B, N+1, d+1) -> prediction (B,)."""

    def __init__(self, config):
        super().__init__()
        self.config, H, D = config, config.heads, config.inputs
        size = torch.linspace(0.5, 1.5, H) if H > 1 else torch.ones(1)
        self.w = nn.Parameter(2 * size * (-1.0) ** torch.arange(H))  # gates open for labels of either sign
        self.bias, self.log_rate = nn.Parameter(torch.linspace(-2, -5, H)), nn.Parameter(torch.zeros(H))
        self.gamma = nn.Parameter(torch.ones(2 * H, D) if config.mixer != "softmax" else torch.full((H, D), D**-0.5))
        self.mlp = nn.Sequential(nn.Linear(len(self.gamma), config.hidden), nn.GELU(),
                                 nn.Linear(config.hidden, config.hidden), nn.GELU(), nn.Linear(config.hidden, 1))

    def read(self, x, y, xq):
        """x (B, N, d), y (B, N), xq (B, Q, d) -> predictions (B, Q)."""
        phi, phi_q = F.pad(x, (1, 0), value=1.0), F.pad(xq, (1, 0), value=1.0)  # (B, N, D), (B, Q, D)
        if self.config.mixer == "softmax":
            scores = torch.einsum("bqd,hd,bnd->bqhn", phi_q, self.gamma, phi) + self.w[:, None] * y[:, None, None]
            s = (scores.softmax(-1) * y[:, None, None]).sum(-1)  # (B, Q, H)
        else:
            log_a = -self.log_rate.exp() * F.softplus(self.w * y[..., None] + self.bias)  # (B, N, H)
            G = -torch.expm1(log_a) * (log_a.sum(1, keepdim=True) - log_a.cumsum(1)).exp()  # Gate
            if self.config.mixer == "linear":
                G = torch.full_like(G, 1 / x.shape[1])
            values = torch.cat([G * y[..., None], G], -1)  # (B, N, 2H)
            state = self.gamma * (values.mT @ phi)  # (B, 2H, D), the scan's last
            s = phi_q @ (F.normalize(state, dim=-1) if self.config.norm else state).mT  # (B, Q, 2H)  Readout
        return self.mlp(s)[..., 0]

    def forward(self, tokens):
        return self.read(tokens[:, :-1, :-1], tokens[:, :-1, -1], tokens[:, -1:, :-1])[:, 0]


class SingleIndexData(LinearData):
    """Single-index prompts beside kernel ridge regression; the gap counts from the one that is given the subspace."""

    models = {"s6": (OneLayer, OneLayerConfig, {})}
    defaults = dict(model="s6", length=64, dim=16, noise=0.1, batch=256, steps=3000, lr=5e-3, clip=1.0)
    held_out = 2048  # prompts in the evaluation set

    def sample(self, B, generator, link=None):
        """B prompts: tokens (B, N+1, d+1), target (B,)."""
        a = self.args
        x, y, xq, yq, _ = single_index_prompts(B, a.length, a.dim, a.support, link or a.link, a.noise, 1, generator)
        return torch.cat([torch.cat([x, y[..., None]], -1), F.pad(xq, (0, 1))], 1), yq[:, 0]

    def batch(self, index):
        """Training batch number `index`; with a curriculum, the link first turns from he1 to the one wanted."""
        a, link = self.args, None
        t = index / max(1e-9, a.curriculum * a.steps * a.accumulate)
        if t < 1:
            link = lambda z: math.cos(t * math.pi / 2) * z + math.sin(t * math.pi / 2) * LINKS[a.link](z)
        return self.sample(a.batch, stream(a.seed, "data", index, self.device), link)

    def references(self, tokens, target):
        """name -> prediction (B,)"""
        x, y, xq = tokens[:, :-1, :-1], tokens[:, :-1, -1], tokens[:, -1:, :-1]
        r, yq = self.args.support, target[:, None]
        return {"zero": torch.zeros_like(target), "kernel ridge": best_kernel_ridge(x, y, xq, yq)[:, 0],
                "... in subspace": best_kernel_ridge(x[..., :r], y, xq[..., :r], yq)[:, 0]}

    def explain(self, model):
        """One line on what a trained layer does."""
        if self.one_layer:
            size, r = model.gamma.detach().abs()[:, 1:], self.args.support  # (rows, d)
            ratio = (size[:, :r].mean(1) / size[:, r:].mean(1)).median() if r < self.args.dim else math.inf
            yield f"one layer: |gamma| inside the subspace is {ratio:.1f} times that outside, in the median row"


if __name__ == "__main__":
    d, r, N = 16, 4, 64
    print(f"One step on gamma: he3, d = {d}, N = {N}, 5,000 prompts; subspace: first {r} of x.")
    print("Mean |gamma| of the linear features, largest = 1:\n")
    print("  gate  inside   outside   ratio   the support read off: above half the maximum")
    for gate in (True, False):
        size = stage_one(d, r, N, 5000, gate, generator=stream(0, "stage one")).abs()
        found = [i for i in range(len(size)) if size[i] > size.max() / 2]
        size = size / size.max()
        inside, outside = size[1 : 1 + r].mean(), size[1 + r : 1 + d].mean()
        bars = " ".join(f"{v:.2f}" for v in size[1 : 1 + d])
        print(f"  {'yes' if gate else 'no':4s} {inside:7.3f} {outside:9.4f} {inside / outside:7.1f}   "
              f"{'exact' if found == list(range(1, 1 + r)) else 'wrong'}: {len(found)} of {len(size)} features")
        print(f" {bars}")
    gamma = stage_one(d, r, N, 5000, rho=0.2, rate=0.05, generator=stream(1, "one"))
    one = [(gamma, (0.2, -0.2), -2 * math.log(d))]  # forgets slowly, opens for large labels of either sign
    four = [(gamma, (0.1, -0.1), -t / 0.1) for t in (0.5, 0.9, 1.3, 2)]  # beyond |y| = 0.5, 0.9, 1.3 and 2
    fit = lambda heads, rate: stage_two(d, r, 256, heads, rate, contexts=2000, generator=stream(0, "two"))
    x, y, xq, yq, _ = single_index_prompts(200, 256, d, r, queries=16, generator=stream(0, "test"))
    tuned = lambda c: best_kernel_ridge(x[..., :c], y, xq[..., :c], yq, (2, 6), (1e-5, 0.1))
    print("\n  mean squared error on fresh prompts of 256 pairs, floor 0.01\n")
    for name, guess in [
        ("zero", 0 * yq), ("kernel ridge", tuned(d)),
        ("one two-sided gate, ridge on its readout", fit(one, 0.05)(x, y, xq)),
        ("four thresholds, ridge on mixtures", fit(four, 0.003)(x, y, xq)),
        ("kernel ridge that is given the subspace", tuned(r)),
    ]:
        print(f"  {name:40s} {(guess - yq).square().mean():7.3f}")
    print("\nWith the gate one step finds the subspace, without it nothing;\nwho then learns in it needs fewer pairs.")
