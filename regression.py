"""
In-context linear regression: one selective layer is online gradient descent (Jiang et al. 2025, arXiv 2509.23779).

A prompt is N pairs and a query, tokens e_i = (x_i, y_i) and e_q = (x_q, 0), from a target w of its own:

    y_i = <w, x_i> + sqrt(s2) noise,  w, x_i, x_q ~ N(0, I),  wanted: <w, x_q>                  # Linear prompt
    h_t = a_t h_{t-1} + (1 - a_t) y_t b_t,  prediction = <h_q, c_q>                             # S6 layer
    a_t = 1 - sigmoid(<w_D, e_t> + b_D),  b_t = W_B e_t + b_B,  c_q = W_C e_q + b_C             # S6 layer
    w_l = (1 - decay) w_{l-1} + eta y_l x_l,  prediction = <w_N, x_q>                           # Online GD
    loss(g) = d [1 - 2 <g, r> + g^T R g + (d + 1 + s2) |g|^2],  r_i = rho^(N+1-i), R_ij = rho^|i-j|,
              for the prediction <x_q, sum_i g_i y_i x_i>;  rho = 1: w stands still             # Loss of weights

With weights set by hand h_l IS w_l. That is gradient descent on |w - beta y_l x_l|^2, where the identity stands for
x_l x_l^T: decayed, and not LMS, which would need a matrix for a_t. The class has an optimum that no gate gets below.

Glossary (code: paper):
    tokens (B, N+1, d+1)    S: width of the state h, since N counts pairs    gate: w_D, b_D
    drift: rho, w_t = rho w_{t-1} + sqrt(1 - rho^2) xi_t, the query wants w_{N+1}
    noise: s2, the variance of label noise in the context; targets, and so all losses, are free of it
    decay: 1 - a, what a step forgets       F = C^T B, f = C^T b: all that W_B = [B | b] and W_C = [C | .] do
    gap: distance to the best F and f under a gate, in half-losses E(prediction - target)^2 / 2, the paper's

Run me:     python regression.py
Change me:  another prompt is another `linear_prompts`; a new reference is a function and a name in LinearData.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn

from markov import stream
from ssm import scan


def linear_prompts(B, N, d, noise=0.0, drift=None, generator=None):
    """B prompts of N pairs: tokens (B, N+1, d+1), the last one the query with label 0, and its target (B,).

    noise: variance of the labels, not of the target; drift: rho in [0, 1], None = a fixed w. Else a ValueError.
    """
    if min(B, N, d) < 1 or not 0 <= noise < math.inf or not (drift is None or 0 <= drift <= 1):
        raise ValueError(f"need B, N, d at least 1, noise at least 0 and drift between 0 and 1, got B={B}, N={N}, "
                         f"d={d}, noise={noise}, drift={drift}")
    draw = dict(generator=generator, device=generator.device if generator else "cpu")
    x, w = torch.randn(B, N + 1, d, **draw), torch.randn(B, 1 if drift is None else N + 1, d, **draw)
    for t in range(1, w.shape[1]):
        w[:, t] = drift * w[:, t - 1] + math.sqrt(1 - drift**2) * w[:, t]
    y = (w * x).sum(-1)  # (B, N+1)  Linear prompt
    target = y[:, -1].clone()
    if noise:
        y = y + math.sqrt(noise) * torch.randn(B, N + 1, **draw)
    y[:, -1] = 0
    return torch.cat([x, y[..., None]], -1), target


def interleave(tokens):
    """(B, N+1, d+1) -> x_1, y_1, ..., x_N, y_N, x_q as 2N+1 tokens (x, 0) or (0, y): row 2i has seen i labels."""
    x, y = tokens.clone(), torch.zeros_like(tokens)
    x[..., -1], y[..., -1] = 0, tokens[..., -1]
    return torch.stack([x, y], 2).flatten(1, 2)[:, :-1]  # (B, 2N+1, d+1)


# ----------------------------------------------------------------------------------------------------------------------
# The layer


@dataclass
class S6Config:
    """Sizes and switches of --model s6 on linear prompts."""

    vocab: int = 1  # numbers predicted
    inputs: int = 5  # d + 1, set by the data
    state: int = 32  # width of the state h; d is enough
    half_life: float = 50.0  # tokens after which the first gate has forgotten half
    selective: bool = True  # b_t, c_t and a_t depend on the token; without, they are constants (S4)

    def __post_init__(self):
        if self.inputs < 2 or self.state < 1 or not 1e-3 <= self.half_life < math.inf:
            raise ValueError(f"need d and state of at least 1 and a half_life of at least 0.001, got "
                             f"d={self.inputs - 1}, state={self.state}, half_life={self.half_life}")


class OneLayerS6(nn.Module):
    """One S6 layer, tokens (B, N+1, d+1) -> prediction (B,). Only what labels wrote is read: P = 1, the value is y."""

    def __init__(self, d, state, half_life=50.0, selective=True):
        super().__init__()
        self.config = S6Config(inputs=d + 1, state=state, half_life=half_life, selective=selective)
        self.write, self.read = nn.Linear(d + 1, state), nn.Linear(d + 1, state)  # W_B, b_B; W_C, b_C
        self.gate = nn.Linear(d + 1, 1)  # w_D, b_D
        with torch.no_grad():
            for layer, spread in ((self.write, state), (self.read, state), (self.gate, d + 1)):
                layer.weight.normal_(std=spread**-0.5)  # |w_D| near 1: the gate has yet to learn to be constant
                layer.bias.zero_()
                if not selective:  # all that is left without tokens; 0 would stay 0
                    layer.bias.normal_(std=spread**-0.5)
            self.gate.bias.fill_(math.log(math.expm1(math.log(2) / half_life)))

    def state(self, tokens):
        """The state (B, S) after the last of tokens (B, T, d+1)."""
        e = tokens if self.config.selective else torch.zeros_like(tokens)
        log_a = -nn.functional.softplus(self.gate(e))  # (B, T, 1), log of 1 - sigmoid
        x = -torch.expm1(log_a) * tokens[..., -1:]  # (B, T, 1), (1 - a_t) y_t
        b = self.write(e)[:, :, None]  # (B, T, 1, S)
        return scan(x[..., None], log_a, b, b)[1][:, 0, 0]  # S6 layer

    def forward(self, tokens):
        query = tokens[:, -1] if self.config.selective else torch.zeros_like(tokens[:, -1])
        return (self.state(tokens) * self.read(query)).sum(-1)

    @torch.no_grad()
    def read_off(self):
        """What the layer does once its gate ignores the tokens: a, F (d, d), f (d,), in float64."""
        d = self.config.inputs - 1
        F_f = self.read.weight.T[:d].double() @ self.write.weight.double()  # (d, d+1)
        return torch.sigmoid(-self.gate.bias.double()).item(), F_f[:, :d], F_f[:, d]

    def step_read_off(self):
        """eta of the online gradient descent that it then does: a pair writes (1 - a) y_i F x_i, F being close to a
        multiple of I, and the query's token lets the state decay by a once more."""
        a, F, _ = self.read_off()
        return a * (1 - a) * F.trace().item() / len(F)


@torch.no_grad()
def online_gd(d, eta, decay):
    """A float64 OneLayerS6 whose state after l tokens is w_l; ValueError unless 0 < decay < 1. PAPER: Theorem 4.1."""
    if not 0 < decay < 1 or not math.isfinite(eta):
        raise ValueError(f"need 0 < decay < 1 and a finite eta, got decay={decay}, eta={eta}")
    layer = OneLayerS6(d, d).double().requires_grad_(False)
    for p in layer.parameters():
        p.zero_()
    layer.gate.bias.fill_(math.log(decay / (1 - decay)))
    layer.write.weight[:, :d] = eta / decay * torch.eye(d).double()  # the scan writes (1 - a) y b = eta y x
    layer.read.weight[:, :d] = torch.eye(d).double() / (1 - decay)  # the state decays once more at the query
    return layer


def train_layer(layer, N, steps, batch=256, lr=2e-2):
    """Every parameter of a OneLayerS6 by Adam on fresh prompts, the rate on a cosine; train.py does this with a log."""
    optimizer, g = torch.optim.Adam(layer.parameters()), stream(0, "data")
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        tokens, target = linear_prompts(batch, N, layer.config.inputs - 1, generator=g)
        optimizer.zero_grad()
        (layer(tokens) - target).square().mean().backward()
        optimizer.step()
    return layer


# ----------------------------------------------------------------------------------------------------------------------
# Reference estimators: tokens (B, N+1, d+1) -> prediction (B,)


def _steps(tokens, step):
    """All w_l (B, N, d), where step(w, x, y) with x (B, d), y (B, 1) gives the next w, starting from 0."""
    w, steps = torch.zeros_like(tokens[:, 0, :-1]), []
    for e in tokens[:, :-1].unbind(1):
        w = step(w, e[:, :-1], e[:, -1:])
        steps.append(w)
    return torch.stack(steps, 1) if steps else tokens[:, :0, :-1]


def _read(steps, tokens):
    """<w_N, x_q>; 0 without a context."""
    return (steps[:, -1:] * tokens[:, -1:, :-1]).sum((1, 2))


def step_weights(tokens, eta, decay):
    """w_l (B, N, d) of online gradient descent after each pair; decay 0 never forgets."""
    return _steps(tokens, lambda w, x, y: (1 - decay) * w + eta * y * x)  # Online GD


def predict_zero(tokens):
    """Knows nothing; its loss is d."""
    return torch.zeros_like(tokens[:, 0, 0])


def predict_one_step_gd(tokens, eta=None):
    """One gradient step from 0 on all pairs at once; eta=None: 1/(N+d+1), the optimum of the one-layer class."""
    return _read(step_weights(tokens, 1 / sum(tokens.shape[1:], -1) if eta is None else eta, 0), tokens)


def predict_lms(tokens, eta=None):
    """Least mean squares, a gradient step on (<w, x> - y)^2 / 2 for each pair; eta=None: 1/(d+2), the fastest."""
    eta = 1 / (tokens.shape[-1] + 1) if eta is None else eta
    return _read(_steps(tokens, lambda w, x, y: w + eta * (y - (w * x).sum(-1, keepdim=True)) * x), tokens)


def predict_nlms(tokens, eta=1.0):
    """Normalised LMS, a step of eta / |x|^2: eta = 1 fits each pair exactly."""
    return _read(_steps(tokens, lambda w, x, y: w + eta * (y - (w * x).sum(-1, keepdim=True)) * x
                        / (x * x).sum(-1, keepdim=True)), tokens)


def predict_ridge(tokens, ridge=0.0, drift=None):
    """Bayes at ridge = s2; 0 is least squares, of minimum norm where N < d. In float64, through the singular values:
    CUDA's solvers assume full rank. With drift, the Gaussian process of covariance rho^|i-j| <x_i, x_j>."""
    x, y, xq = tokens[:, :-1, :-1].double(), tokens[:, :-1, -1:].double(), tokens[:, -1, :-1, None].double()
    N = x.shape[1]
    if not N:
        return predict_zero(tokens)
    drift = None if drift == 1 else drift  # w stands still: K would be singular without noise
    if drift is not None and len(x) > 32:  # N^2 numbers a prompt
        return torch.cat([predict_ridge(part, ridge, drift) for part in tokens.split(32)])
    if drift is not None:
        r, R = (v.to(x.device) for v in drift_moments(N, drift))
        K = R * (x @ x.mT) + ridge * torch.eye(N).to(x)  # (B, N, N)
        return (r[:, None] * (x @ xq) * torch.linalg.solve(K, y)).sum((1, 2)).to(tokens.dtype)
    U, s, Vh = torch.linalg.svd(x, full_matrices=False)  # (B, N, K), (B, K), (B, K, d)
    alive = s > max(x.shape[1:]) * torch.finfo(s.dtype).eps * s[:, :1]
    gain = torch.where(alive, s / (s**2 + ridge).clamp(min=1e-300), 0.0)  # (B, K)
    return ((Vh @ xq) * gain[..., None] * (U.mT @ y)).sum((1, 2)).to(tokens.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Exact losses


def drift_moments(N, drift):
    """r (N,) and R (N, N) of the loss of weights, oldest pair first, float64; drift None is 1."""
    i, rho = torch.arange(N).double(), 1.0 if drift is None else drift
    return rho ** (N - i), rho ** (i[:, None] - i).abs()


def loss_of_weights(g, d, noise=0.0, drift=None):
    """Expected squared error of <x_q, sum_i g_i y_i x_i>, g (N,) oldest pair first."""
    g = torch.as_tensor(g, dtype=torch.float64)
    r, R = drift_moments(len(g), drift)
    return d * (1 - 2 * g @ r + g @ R @ g + (d + 1 + noise) * g @ g).item()  # Loss of weights


def optimal_loss(N, d, noise=0.0, drift=None):
    """The smallest loss of any weights, so of the one-layer class; Bayes is lower. No drift: all g_i = 1/(N+d+1+s2)."""
    if drift is None:
        return d * (d + 1 + noise) / (N + d + 1 + noise)
    r, R = drift_moments(N, drift)
    return d * (1 - r @ torch.linalg.solve(R + (d + 1 + noise) * torch.eye(N).double(), r)).item()


def optimal_forgetting(N, d, drift, noise=0.0):
    """(a, loss): the best of all weights eta a^(N-i), each a with its best eta; a to 1e-4."""
    r, R = drift_moments(N, drift)
    a = torch.linspace(0, 1, 10001).double()
    q = a[:, None] ** torch.arange(N - 1, -1, -1)  # (10001, N)
    loss = d * (1 - (q @ r) ** 2 / (q @ R * q + (d + 1 + noise) * q * q).sum(-1))
    return a[loss.argmin()].item(), loss.min().item()


def moments(N, d, a):
    """b1, b2, b3: a layer of constant a has the loss d + b1 |F|^2 - 2 b3 tr F + b2 |f|^2 without noise and drift; its
    best F is b3/b1 I.

    The paper's b2 has d^2 in place of E[y_i^2 y_j^2] = d (d + 2); only the rate at which f decays differs.
    """
    G1, G2 = a * (1 - a**N), a**2 * (1 - a) * (1 - a ** (2 * N)) / (1 + a)  # sums of G_i and G_i^2 over the context
    return G1**2 + (d + 1) * G2, d * (d + 2) * (G1**2 + 2 * G2), G1


def population_loss(a, F, f, N):
    """Expected loss of a layer with constant a, F (d, d), f (d,), as `read_off` gives them."""
    b1, b2, b3 = moments(N, len(f), a)
    return (len(f) + b1 * (F * F).sum() - 2 * b3 * F.trace() + b2 * (f * f).sum()).item()


def population_gd(B, C, b, a, N, eta, steps):
    """Gradient descent on half the population loss under a frozen gate: B, C (S, d), b (S,), in float64.

    Returns the gap (steps+1,), which falls exponentially, and B, C, b at the end. PAPER: Theorem 4.2.
    """
    b1, b2, b3 = moments(N, B.shape[1], a)
    I, gaps = torch.eye(B.shape[1], dtype=B.dtype), []
    for step in range(steps + 1):
        error, f = b3 * I - b1 * C.T @ B, C.T @ b  # (d, d), (d,)
        gaps.append((error * error).sum() / (2 * b1) + b2 / 2 * (f * f).sum())
        if step < steps:
            B, C, b = B + eta * C @ error, C + eta * (B @ error.T - b2 * torch.outer(b, f)), b - eta * b2 * C @ f
    return torch.stack(gaps), B, C, b


def predicted_rate(a, N, d, eta, B=None, C=None):
    """Slope of log gap per step, from the B, C where it ended. None: from orthonormal B, C, b, without a parameter."""
    b1, _, b3 = moments(N, d, a)
    slowest = 2 * math.sqrt(1 + (b3 / b1) ** 2)  # of C^T C + B^T B at F*, as C^T C - B^T B never changes
    if B is not None:
        slowest = sum(torch.linalg.eigvalsh(W.T @ W)[0].item() for W in (B, C))
    return 2 * math.log1p(-eta * b1 * slowest)


# ----------------------------------------------------------------------------------------------------------------------
# The task of train.py --data linear


class LinearData:
    """Linear prompts; the gap counts from Bayes, ridge regression, and at the end stand all references.

    --model s6 predicts at the query only. A stack of layers reads interleaved tokens and is trained at every x.
    """

    models = {"s6": (lambda c: OneLayerS6(c.inputs - 1, c.state, c.half_life, c.selective), S6Config, {})}
    defaults = dict(model="s6", length=50, dim=4, noise=0.0, batch=256, steps=2000, lr=1e-2, clip=1.0)
    held_out = 4096  # prompts in the evaluation set

    def __init__(self, args, device):
        a, self.args, self.device, self.one_layer = args, args, device, args.model in self.models
        if max(a.batch, self.held_out) * (a.length + 1) * (a.dim + 1) > 2**28 or a.length > 2048:
            raise ValueError(f"prompts of {a.length} pairs of width {a.dim} do not fit in memory; "
                             f"lower --length (at most 2048), --dim or --batch")
        stack = dict(d=64, heads=4, layers=2, state=16, window=4, norm=True, block=2 * a.length + 1)
        self.fields = dict(vocab=1, inputs=a.dim + 1, predict="value", **({} if self.one_layer else stack))
        self.test = self.sample(self.held_out, stream(a.seed, "eval", 0, device))
        self.guesses = self.references(*self.test)  # name -> prediction, the best reference last
        self.bayes = self.error(list(self.guesses.values())[-1]).mean().item()

    def sample(self, B, generator):
        """B prompts: tokens (B, N+1, d+1), target (B,)."""
        a = self.args
        return linear_prompts(B, a.length, a.dim, a.noise, a.drift, generator)

    def references(self, tokens, target):
        """name -> prediction (B,)"""
        a = self.args
        return {"zero": predict_zero(tokens), "one step of GD": predict_one_step_gd(tokens), "LMS": predict_lms(tokens),
                "NLMS": predict_nlms(tokens), "Bayes": predict_ridge(tokens, a.noise, a.drift)}

    def batch(self, index):
        """Training batch number `index`."""
        return self.sample(self.args.batch, stream(self.args.seed, "data", index, self.device))

    def loss(self, model, batch):
        """Squared error, for stacks the mean over all N+1 positions of x."""
        tokens, target = batch
        if self.one_layer:
            return (model(tokens) - target).square().mean()
        labels = torch.cat([tokens[:, :-1, -1], target[:, None]], 1)  # (B, N+1)
        return (model(interleave(tokens))[:, ::2, 0] - labels).square().mean()

    def predict(self, model, tokens):
        """The model's prediction (B,) at the query."""
        return torch.cat([model(t) if self.one_layer else model(interleave(t))[:, -1, 0] for t in tokens.split(256)])

    def error(self, prediction):
        """Squared errors (B,) on the held-out targets."""
        return (prediction - self.test[1]).double().square()

    def evaluate(self, model):
        """val at the query, bayes and gap = val - bayes on the held-out prompts."""
        val = self.error(self.predict(model, self.test[0])).mean().item()
        return dict(val=val, bayes=self.bayes, gap=val - self.bayes)

    def report(self, model):
        """Lines of a table: the loss by number of pairs, beside every reference on the same prompts."""
        (tokens, target), N = self.test, self.args.length
        yield "held-out loss  pairs      model" + "".join(f"{name:>16s}" for name in self.guesses)
        for k in sorted({k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < N} | {N}):
            own = self.error(self.predict(model, tokens[:, N - k :]))
            others = [self.error(guess) for guess in self.references(tokens[:, N - k :], target).values()]
            yield f"{k:20d} {own.mean():10.4f}" + "".join(f"{e.mean():16.4f}" for e in others)
        differences = [own - e for e in others]
        yield f"{'model - reference':31s}" + "".join(f"{e.mean():+16.4f}" for e in differences)
        yield f"{'its standard error':31s}" + "".join(f"{e.std() / len(e) ** 0.5:16.4f}" for e in differences)
        yield from self.explain(model)

    def explain(self, model):
        """One line on what a trained layer does."""
        a = self.args
        if self.one_layer and model.config.selective:
            keep, eta, w_D = model.read_off()[0], model.step_read_off(), model.gate.weight.norm()
            best = 1.0 if a.drift is None else optimal_forgetting(a.length, a.dim, a.drift, a.noise)[0]
            yield (f"one layer: a = {keep:.4f}, best {best:.4f}; eta = {eta:.4f}, |w_D| = {w_D:.4f}; "
                   f"best loss {optimal_loss(a.length, a.dim, a.noise, a.drift):.4f}")


if __name__ == "__main__":
    d, N, g = 4, 50, torch.Generator().manual_seed(0)
    tokens, _ = linear_prompts(3, N, d, generator=g)
    layer, w = online_gd(d, 0.02, 0.03), step_weights(tokens.double(), 0.02, 0.03)
    error = max((layer.state(tokens[:, :l].double()) - w[:, l - 1]).abs().max() for l in range(1, N + 1))
    print(f"Set by hand, d = {d}, N = {N}: the state is w_l after every pair, to {error:.1e}.\n")

    torch.manual_seed(0)
    layer = train_layer(OneLayerS6(d, 32), N, steps=300)
    (a, F, f), eta = layer.read_off(), layer.step_read_off()
    tokens, target = linear_prompts(4000, N, d, generator=g)
    with torch.no_grad():
        ours = layer(tokens)
    formula = (step_weights(tokens, eta, 1 - a)[:, -1] * tokens[:, -1, :-1]).sum(-1)
    print(f"All parameters trained, 300 Adam steps: decay 1 - a = {1 - a:.4f}, eta = {eta:.4f}.\nFour fresh prompts:\n")
    print("  layer    w_N of online GD, <w_N, x_q>    wanted")
    for row in zip(ours[:4], formula, target):
        print("  {:7.3f} {:28.3f} {:12.3f}".format(*row))
    print("\n  estimator               expected loss   on 4,000 prompts")
    for name, exact, guess in [
        ("zero", d, predict_zero(tokens)), ("trained layer", population_loss(a, F, f, N), ours),
        ("  its formula", loss_of_weights(eta * a ** torch.arange(N - 1, -1, -1.0), d), formula),
        ("one step of GD, g_i equal", optimal_loss(N, d), predict_one_step_gd(tokens)),
        ("LMS", d * (1 - 1 / (d + 2)) ** N, predict_lms(tokens)), ("NLMS", d * (1 - 1 / d) ** N, predict_nlms(tokens)),
        ("least squares", max(d - N, 0), predict_ridge(tokens)),
    ]:
        print(f"  {name:26s} {exact:10.6f} {(guess - target).square().mean():18.6f}")
    r = torch.corrcoef(torch.stack([ours, formula]))[0, 1]
    print(f"\nThe trained layer is online gradient descent (correlation {r:.5f}):\nit stops at the best of its class.")
