"""
Every figure and table of the Markov part, five questions that the paper leaves open, and six figures of in-context
regression: run, measure, draw.

A figure is three things, all visible below: a line of RUNS (how many seeds, what is measured on a finished run, and the
flags of train.py that make each run), a measurement, and a function of the figure's name, which arranges the numbers in
panels. Pictures and tables are made from the same panels. A run is its flags and its seed: figures share runs.

    distance = mean over chains and t >= k of |P_model(1) - P_beta(1)|                # L1 distance
    gap_t    = mean of KL(P_beta || P_model) at t: the expected loss beyond the optimum    # Gap by position
    logits_t = unit (sum_ij n_ij u_ij(x_t) + beta vector), u_ij(l) = W_l W_o x~(ij) b(ij)^T c(l) / unit    # Readout
    d p     >= 2^k (1 - 3 eps) log2(1 / eps)                                          # Theorem 2

Glossary:
    line, x      which curve of a figure a run belongs to, and where on its axis    row: a line, an x, a value per seed
    i, j, l      the token before, the token written, the token at which is read; n_ij counts transitions
    unit         what one counted successor adds to its logit; at the optimum u_ij(l) is e_j if i = l, otherwise 0
    exact        rows with these flags are not trained: the models of mambazero.py whose weights were set by hand
    untrained    nor are these: the measurement itself computes what the flags say, from the seed

results/ID.json has flags, seeds and numbers, results/ID.png the picture; the runs are folders in out/figures.

Run me:     python figures.py fig1b        (from results/fig1b.json; --run makes what is missing, --list tells the cost)
Change me:  a new figure is a line of RUNS and a function of that name, with its claim as docstring.
"""

import argparse
import functools
import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

import train
from laplace import add_beta
from mambazero import laplace_any_order, laplace_switching
from markov import sample_chain, sample_kernel, sample_switching, stream
from regression import (LinearData, drift_moments, linear_prompts, loss_of_weights, optimal_forgetting, optimal_loss,
                        population_gd, predicted_rate)
from single_index import best_kernel_ridge, single_index_prompts, stage_one

# ----------------------------------------------------------------------------------------------------------------------
# Measurements: what is read off a finished run. `run` has model, args, folder and log (its evaluations).


def chains(run, n, length=None, **other):
    """n chains that no run was trained or evaluated on, always the same ones: (n, length or the run's own T)."""
    a, g = SimpleNamespace(**vars(run.args) | other), stream(0, "figures")
    if a.switch:
        return sample_switching(n, length or a.length, a.states, a.order, a.beta, a.switch, g)
    return sample_chain(sample_kernel(n, a.states, a.order, a.beta, g, "cpu", *a.prior), length or a.length, g)


def probabilities(run, x):
    """P_model and P_beta of the next token, (n, T, V) float64 each, for tokens x (n, T)."""
    a = run.args
    ours = torch.cat([run.model(part).exp() for part in x.split(max(1, 2**14 // x.shape[1]))])  # in parts, for memory
    return ours.double(), add_beta(x, a.states, a.order, a.beta, a.switch or None, torch.float64)


def kl(ours, best):
    """Gap by position, (n, T): given its past a token is distributed as `best` says, so its mean is the gap's."""
    return (best * (best / ours).log()).sum(-1)


def outcome(run):
    """|gap| at the end, also as a share of the optimum's loss; L1 distance on 1,024 fresh chains; |gap| by step."""
    ours, best = probabilities(run, chains(run, 1024))
    gaps = [abs(e["gap"]) for e in run.log]
    return dict(gap=gaps[-1], share=gaps[-1] / run.log[-1]["bayes"], step=[e["step"] for e in run.log], gaps=gaps,
                distance=(ours - best)[:, run.args.order - 1 :, 1].abs().mean().item())


def one_chain(run):
    """P(1) of the model along one chain, at the t with x_t = 0."""
    x = chains(run, 1)
    t = (x[0] == 0).nonzero()[:, 0]
    return dict(t=(t + 1).tolist(), p=probabilities(run, x)[0][0, t, 1].tolist())


def decay(run):
    """a_t of the first layer by position, mean over 256 chains and heads."""
    a = run.model.internals(chains(run, 256))["a"][0].mean((0, 2))
    return dict(t=list(range(1, 1 + len(a))), a=a.tolist())


def readout(run):
    """Readout, at every kept checkpoint of an order-1 MambaZero: |b(ij)^T c(l)| for i = l and i != l, beta vector, how
    far u is from Theorem 1's (0 = equal, relative to its norm), mean a_t, gap."""
    return [dict(step=e["step"], gap=abs(e["gap"]), **readout_of(train.load_model(run.folder, e["step"])))
            for e in run.log]


def readout_of(model):
    """The numbers of `readout` for one binary model of one layer and one head."""
    S, W = 2, model.head.weight @ model.blocks[0].out_proj.weight  # (S, E)
    i, j, l = torch.arange(S)[:, None, None], torch.arange(S)[:, None], torch.arange(S)
    pairs = torch.cartesian_prod(torch.arange(S), torch.arange(S))  # (S^2, 2): token before, token
    inside = {name: value[0][:, -1].flatten(1) for name, value in model.internals(pairs).items()}  # (S^2, ...)
    c = inside["c"].view(S, S, -1).mean(0)  # (S, N): at l, whatever came before it
    product = (inside["b"] @ c.T).view(S, S, S)  # (i, j, l)
    written = (inside["x"] @ W.T).view(S, S, 1, S)  # (i, j, 1, S)
    u = written * product[..., None]  # (i, j, l, S)
    unit = u[l, :, l, :].diagonal(dim1=1, dim2=2).mean()
    target = (i == l)[..., None] * torch.eye(S)[None, :, None, :]  # (i, j, l, S): Theorem 1
    first = {name: value[0][:, 0].flatten(1) for name, value in model.internals(l[:, None]).items()}
    once = (first["x"] @ W.T)[:, None] * (first["b"] @ c.T)[..., None]  # (first token, l, S): counted by no n_ij
    beta = (model.embed.weight @ model.head.weight.T + once).mean((0, 1)) / unit  # (S,)
    size, on = product.abs(), (i == l).expand(S, S, S)
    return dict(on=size[on].mean().item(), off=size[~on].mean().item(), beta=beta.tolist(),
                distance=((u / unit - target).norm() / target.expand(S, S, S, S).norm()).item(),
                a=inside["a"].mean().item())


def switching(run):
    """P(1) and a_t along one chain with switches; over 256 chains, mean a_t at switches and elsewhere, and the gap."""
    x = chains(run, 256)
    a, at = run.model.internals(x)["a"][0].mean(-1), x == run.args.states  # (256, T) both
    ours, best = probabilities(run, x)
    one = int((at.sum(1) - 3).abs().argmin())  # the first chain with three switches, if there is one
    return dict(t=list(range(1, 1 + x.shape[1])), p=ours[one, :, 1].tolist(), a=a[one].tolist(), at=a[at].mean().item(),
                elsewhere=a[~at].mean().item(), gap=kl(ours, best).mean().item())


def hold_out(run):
    """|P_model(1) - P_add-1(1)| after t tokens where P(1 | .) >= 1/2: on one fixed chain, and mean over 1,024."""
    ours, best = probabilities(run, chains(run, 1024, prior=(0.5, 1.0)))
    t = [t for t in (1, 50, 100, 300) if t <= run.args.length]
    away = (ours - best)[:, [i - 1 for i in t], 1].abs()  # (1024, len(t))
    return dict(t=t, one=away[0].tolist(), mean=away.mean(0).tolist())


def by_position(run):
    """Gap by position on 16 chains 64 times as long as in training: mean over spans of equal ratio, and up to T."""
    x = chains(run, 16, 64 * run.args.length)
    gap = kl(*probabilities(run, x)).mean(0).clamp(min=1e-6)  # (T,); the floor is for a logarithmic axis
    edges = sorted({round(len(gap) ** (i / 24)) for i in range(25)})
    spans, T = list(zip(edges, edges[1:])), [run.args.length * r for r in (1, 4, 16, 64)]
    return dict(t=[math.sqrt(a * b) for a, b in spans], gap=[gap[a - 1 : b - 1].mean().item() for a, b in spans],
                T=T, upto=[gap[:t].mean().item() for t in T])


def other_prior(run):
    """Trained on one beta, tested on chains of another: distances between model, the old optimum and the new one."""
    found = dict(beta=[0.1, 1.0, 10.0], old=[], new=[], between=[])
    for beta in found["beta"]:
        x = chains(run, 1024, beta=beta)
        ours, old = (p[..., 1] for p in probabilities(run, x))
        new = add_beta(x, run.args.states, run.args.order, beta, dtype=torch.float64)[..., 1]
        for name, difference in dict(old=ours - old, new=ours - new, between=old - new).items():
            found[name].append(difference.abs().mean().item())
    return found


def quantised(run):
    """Theorem 2: d p, the bound, and eps = largest |P - P_add-1| in any context after 16 chains of 1,024 tokens, with
    the counts kept to p bits each: levels equally spaced in log(1 + n), since it is ratios of counts that matter."""
    k, T = run.args.order, 1024
    contexts = torch.cartesian_prod(*[torch.arange(2)] * k).view(-1, k)  # (C, k)
    C, x = len(contexts), chains(run, 16, T)
    _, [(window, h)] = run.model.prefill(x)
    window, h = (v.repeat_interleave(C, 0) for v in (window, h))  # (16 C, w-1, conv_width), (16 C, H, P, N)
    then = contexts.repeat(16, 1)  # every chain goes on with every context
    best = add_beta(torch.cat([x.repeat_interleave(C, 0), then], 1), 2, k, dtype=torch.float64)[:, -1]
    found = dict(p=list(range(3, 13)), eps=[], whole=[], counts=[], bound=[])
    for p in found["p"]:
        level = (2**p - 1) / math.log1p(T)
        state = [(window, ((h.log1p() * level).round() / level).expm1())]
        eps = (run.model.prefill(then, state)[0][:, -1].exp() - best).abs().max().item()
        found["eps"].append(eps)
        found["whole"].append(p * (h[0].numel() + window[0].numel()))
        found["counts"].append(p * 2 * C + k)  # the rest of the state is 0, or follows from the last k tokens: k bits
        found["bound"].append(max(0.0, C * (1 - 3 * eps) * math.log2(1 / eps)))
    return found


def along_context(run):
    """Mean squared error after k pairs on 4,096 prompts, at least 1e-4 for a logarithmic axis: the one-layer model and
    every reference; and expected losses, of the weights eta a^(k-i) read off the model and of the best ones."""
    a, keep, eta, found = run.args, run.model.read_off()[0], run.model.step_read_off(), []
    data = LinearData(SimpleNamespace(**vars(a) | dict(length=160)), "cpu")
    for k in (1, 2, 4, 8, 16, 32, 50, 80, 160):
        tokens, target = data.test[0][:, -k - 1 :], data.test[1]  # (B, k+1, d+1), (B,)
        g = eta * keep ** torch.arange(k - 1, -1, -1).double()
        guesses = {"model": data.predict(run.model, tokens)} | data.references(tokens, target)
        found.append({name: (guess - target).square().mean().clamp(min=1e-4).item() for name, guess in guesses.items()}
                     | {"k": k, "formula": loss_of_weights(g, a.dim, a.noise),
                        "best weights": optimal_loss(k, a.dim, a.noise)})
    return {key: [at[key] for at in found] for key in found[0]}


def forgetting(run):
    """Under drift: the learned a and the best one; the loss on 65,536 prompts, beside the expected loss of the best
    weights eta a^(N-i) and of the best equal weights."""
    a = run.args
    tokens, target = linear_prompts(2**16, a.length, a.dim, a.noise, a.drift, stream(0, "figures"))
    loss = (torch.cat([run.model(part) for part in tokens.split(1024)]) - target).square().mean().item()
    best, geometric = optimal_forgetting(a.length, a.dim, a.drift, a.noise)
    r, R = drift_moments(a.length, a.drift)
    uniform = a.dim * (1 - r.sum() ** 2 / (R.sum() + (a.dim + 1 + a.noise) * a.length))
    return dict(a=run.model.read_off()[0], best=best, loss=loss, geometric=geometric, uniform=uniform.item())


def population_descent(run):
    """Gradient descent on the population loss from orthonormal B, C, b under the paper's gate, of half-life N: the gap
    by step, the predicted slope as a line through its middle, and the slope of the second half over the predicted."""
    a, g = run.args, stream(run.args.seed, "figures")
    keep, half = 2 ** (-1 / a.length), a.steps // 2
    W = torch.linalg.qr(torch.randn(a.state, 2 * a.dim + 1, generator=g).double())[0]
    gap = population_gd(W[:, : a.dim], W[:, a.dim : -1], W[:, -1], keep, a.length, a.lr, a.steps)[0]
    rate, step = predicted_rate(keep, a.length, a.dim, a.lr), torch.arange(0, a.steps + 1, 10)
    return dict(step=step.tolist(), gap=gap[step].tolist(), line=(gap[half] * (rate * (step - half)).exp()).tolist(),
                ratio=(gap[-1] / gap[half]).log().item() / (a.steps - half) / rate)


def first_step(run):
    """|gamma| of the d linear features after Stage I, largest of all features = 1; its mean inside the hidden subspace
    over that outside; 1 if the features above one half are exactly the subspace."""
    a, r = run.args, run.args.support
    size = stage_one(a.dim, r, a.length, a.batch * a.accumulate, a.mixer != "linear", link=a.link, noise=a.noise,
                     generator=stream(a.seed, "figures")).abs()
    size /= size.max()
    linear = size[1 : 1 + a.dim]
    return dict(i=list(range(1, 1 + a.dim)), size=linear.tolist(), ratio=(linear[:r].mean() / linear[r:].mean()).item(),
                found=int((size > 0.5).nonzero()[:, 0].tolist() == list(range(1, 1 + r))))


@functools.cache
def kernel_errors(N, d, r, link, noise):
    """x, y, xq, yq of 600 prompts with 16 queries, whose labels are the same for all d <= 32, and the squared errors of
    what needs no model (600,): kernels, in the hidden subspace or not, are tuned on these very prompts."""
    x, y, xq, yq, _ = single_index_prompts(600, N, max(d, 32), r, link, noise, 16, stream(0, f"figures/{N}"))
    guesses = {name: best_kernel_ridge(x[..., :k], y, xq[..., :k], yq) for name, k in
               (("kernel ridge", d), ("kernel in the subspace", r))} | {"zero": 0 * yq}
    return x[..., :d], y, xq[..., :d], yq, {name: (g - yq).square().mean(1) for name, g in guesses.items()}


def against_kernels(run):
    """Mean squared error after N pairs beside kernel ridge regression and zero; model - kernel in the subspace, prompt
    by prompt, with its standard error."""
    a, found = run.args, []
    for N in PAIRS:
        x, y, xq, yq, errors = kernel_errors(N, a.dim, a.support, a.link, a.noise)
        own = (run.model.read(x, y, xq) - yq).square().mean(1)  # (600,)
        errors = errors | {"model": own, "difference": own - errors["kernel in the subspace"]}
        found.append({name: e.mean().item() for name, e in errors.items()}
                     | {"N": N, "error": errors["difference"].std().item() / 600**0.5})
    return {key: [at[key] for at in found] for key in found[0]}


def perplexity(run):
    """Token and word perplexity and bits per byte of the held-out text at the end, and token perplexity by step."""
    return dict({key: run.log[-1][key] for key in ("token_perplexity", "word_perplexity", "bits_per_byte")},
                step=[e["step"] for e in run.log], curve=[e["token_perplexity"] for e in run.log])


# ----------------------------------------------------------------------------------------------------------------------
# Runs: id -> seeds, measurement, {(line, x): flags}. What flags do not say is train.py's default: 1,000 steps, B = 64,
# T = 256, where the paper takes 10,000 steps. Sweeps are SHORT: half the length, and four times the steps at a quarter
# of the batch, with which both kinds of model get further. Switches are rare and need the most updates. Figure 6 has no
# LayerNorm, which of two channels leaves a sign. Table 3, where d = 1,000 is costly, has no MLP, e = 1, few steps, and
# a rate that falls with d.

ORDERS = (1, 2, 3, 4)
SMALL = " --batch 16 --steps 4000"
SHORT = " --length 128" + SMALL
MAMBA, ZERO = "--model mamba --order {}", "--model mambazero --order {}"
GPT = "--model transformer --order {}"
MAMBA_1, ZERO_1, NO_CONV = MAMBA.format(1), ZERO.format(1), MAMBA.format(1) + " --no-conv"
KEPT = ZERO_1 + " --steps 3000 --eval-every 50 --keep"
LINES = {"Mamba": MAMBA, "transformer, 1 layer": GPT, "transformer, 2 layers": GPT + " --layers 2"}
FAR = " --block 16384"  # positions enough for the study of length, which shares its transformers with Figure 1a
LONG = {("Mamba", 0): MAMBA_1, ("transformer, 1 layer", 0): GPT.format(1) + SMALL + FAR,
        ("transformer, 2 layers", 0): GPT.format(1) + SMALL + " --layers 2" + FAR}
WINDOWS = {(f"order {k}", w): MAMBA.format(k) + SHORT + f" --window {w}" * (w != k + 1)
           for k in ORDERS for w in (2, 3, 4, 5, 6)}
SWITCH = MAMBA_1 + " --switch 0.01 --batch 16 --steps 10000"
WIDE = NO_CONV + " --length 128 --no-mlp --expand 1 --batch 16 --steps 200 --d {} --lr {}"
PAIRS = (16, 32, 64, 128)  # at which single-index models are compared
LINEAR, INDEX = "--data linear", "--data single-index"
DESCENT = f"untrained {LINEAR} --state 80 --steps 1000 --dim {{}} --length {{}} --lr {{}}"
STEP = f"untrained {INDEX} --batch 500 --accumulate {{}}"
LONGER = f"{INDEX} --support 8 --steps 5000"
# Language models of about a million parameters on the text of WikiText's validation split, tested on its test split:
# 400 steps are 3.7 passes. RATES are the best of `rates`, on a tenth of the training text.
TEXT = "--data wikitext --corpus corpus-{} --d 96 --batch 8 --steps 400 --eval-every {}"
ABLATIONS = {"Mamba": "", "no convolution": " --no-conv", "no factor a_t": " --no-decay", "no SiLU": " --act none",
             "transformer": " --model wikitext-transformer",
             "transformer, convolution": " --model wikitext-transformer --conv qkv"}
RATES = {"Mamba": 8e-3, "no convolution": 4e-3, "no factor a_t": 8e-3, "no SiLU": 8e-3,
         "transformer": 4e-3, "transformer, convolution": 8e-3}
LANGUAGE = {line: TEXT.format("laptop", 400) + f" --lr {RATES[line]}" + flags for line, flags in ABLATIONS.items()}


def grid(lines, xs):
    """{(line, x): flags} of all lines at all xs."""
    return {(line, x): flags.format(x) for line, flags in lines.items() for x in xs}


RUNS = {
    "fig1a": (5, one_chain, {("add-1", 0): "exact --order 1"} | LONG),
    "fig1b": (5, outcome, grid({line: flags + SHORT for line, flags in LINES.items()}, ORDERS)),
    "fig3a": (5, outcome, {("Mamba", 0): MAMBA_1, ("MambaZero", 0): ZERO_1, ("Mamba, no convolution", 0): NO_CONV}),
    "fig3b": (3, outcome, WINDOWS),
    "fig4": (5, decay, {("Mamba", 0): MAMBA_1, ("MambaZero", 0): ZERO_1}),
    "fig5a": (10, readout, {("MambaZero", 0): KEPT}),
    "fig5b": (10, readout, {("MambaZero", 0): KEPT}),
    "fig6": (3, outcome, grid({f"d = {d}": MAMBA + SHORT + f" --no-norm --d {d} --state {d}"
                               for d in (2, 4, 8, 16, 32)}, (1, 2, 3, 4, 5))),
    "fig7": (3, outcome, grid({"Mamba": MAMBA + SHORT, "linear, 1 layer": GPT + SHORT + " --attention linear",
                               "linear, 2 layers": GPT + SHORT + " --layers 2 --attention linear"}, ORDERS[:3])),
    "fig8": (3, outcome, {("Mamba", S): MAMBA_1 + f" --states {S}" * (S > 2) for S in (2, 4, 6, 8)}),
    "fig9": (3, outcome, {("window", w): flags for (line, w), flags in WINDOWS.items() if line == "order 1" and w < 6}
             | {("layers", n): MAMBA_1 + SHORT + f" --layers {n}" * (n > 1) for n in (1, 2, 3, 4)}),
    "fig10": (3, outcome, grid({f"{name}, depth {n}": flags + SHORT + f" --layers {n}" * (n > 1) for n in (1, 2, 4)
                                for name, flags in (("Mamba", MAMBA), ("transformer", GPT))}, ORDERS[:3])),
    "fig11": (3, outcome, grid({"Mamba": MAMBA + SHORT, "transformer": GPT + SHORT,
                                "with convolution": GPT + SHORT + " --conv qkv"}, ORDERS)),
    "fig12": (5, outcome, {("1 layer, convolution", 0): MAMBA_1, ("1 layer, none", 0): NO_CONV,
                           ("2 layers, none", 0): NO_CONV + " --layers 2"}),
    "fig13": (5, switching, {("optimum", 0): "exact --switch 0.01", ("Mamba", 0): SWITCH}),
    "table2": (5, hold_out, {(line, 0): flags + " --prior 0 0.5 --length 300" for line, flags in
                             (("Mamba", MAMBA_1), ("no LayerNorm", MAMBA_1 + " --no-norm"), ("MambaZero", ZERO_1))}),
    "table3": (5, outcome, {("Mamba", d): WIDE.format(d, lr) for d, lr in ((10, 2e-2), (100, 5e-3), (1000, 1e-3))}),
    "orders": (3, outcome, grid({"MambaZero": ZERO + SHORT, "MambaZero with ReLU": ZERO + SHORT + " --act relu"},
                                (2, 3, 4))),
    "dynamics": (10, readout, {("MambaZero", 0): KEPT}),
    "length": (3, by_position, {("exact", 0): "exact --order 1", ("MambaZero", 0): ZERO_1} | LONG),
    "theorem2": (1, quantised, {(f"k = {k}", 0): f"exact --order {k}" for k in range(1, 7)}),
    "prior": (5, other_prior, {("Mamba", 0): MAMBA_1, ("MambaZero", 0): ZERO_1}),
    "table1": (5, perplexity, {(name, x): LANGUAGE[line] for line, name, x in
                               (("no convolution", "Mamba", 0), ("Mamba", "Mamba", 1),
                                ("transformer", "transformer", 0), ("transformer, convolution", "transformer", 1))}),
    "table4": (5, perplexity, {(line, x): flags for x, (line, flags) in enumerate(LANGUAGE.items()) if x < 4}),
    "rates": (2, perplexity, {(line, lr): TEXT.format("tune", 100) + f" --lr {lr}" + flags
                              for line, flags in ABLATIONS.items() for lr in (2e-3, 4e-3, 8e-3, 1.6e-2)}),
    "context": (3, along_context, {("model", 0): LINEAR + " --state 80"}),
    "drift": (3, forgetting, grid({"trained layer": LINEAR + " --drift {}"}, (0.9, 0.95, 0.98, 0.99))),
    "descent": (1, population_descent, {(f"d = {d}, N = {N}, eta = {eta}", d): DESCENT.format(d, N, eta)
                                        for d, N, eta in ((4, 50, 0.01), (5, 20, 0.02), (10, 40, 0.015))}),
    "gamma": (5, first_step, {(line, 500 * n): STEP.format(n) + more for line, more in
                              (("gate", " --mixer mamba"), ("no gate", " --mixer linear")) for n in (3, 10, 40)}),
    "kernels": (3, against_kernels, {("d = 16", 0): LONGER, ("d = 32", 0): LONGER + " --dim 32",
                                     ("d = 16, on 16 pairs", 0): LONGER + " --length 16"}),
    "ladder": (3, against_kernels, grid({"gate": INDEX + " --heads {}"}, (1, 2, 4, 8))
               | {("no gate", 8): INDEX + " --mixer linear", ("softmax attention", 8): INDEX + " --mixer softmax"}),
}

# ----------------------------------------------------------------------------------------------------------------------
# Figures: rows -> panels; the docstring is the claim | the paper's reading. A panel is one pair of axes, with lines
# name -> (x, y of shape (seeds, len(x))). style: log ("x", "y", "xy"); points, for few x; marks, the levels to reach.

DISTANCE, GAP = "mean |P(1) - P_add-1(1)|", "|gap| (nats)"


def panel(title, xlabel, ylabel, lines, **style):
    """One panel, its numbers as arrays."""
    lines = {name: (np.asarray(x, float), np.atleast_2d(np.asarray(y, float))) for name, (x, y) in lines.items()}
    return dict(title=title, xlabel=xlabel, ylabel=ylabel, lines=lines) | style


def over_x(rows, key, n=...):
    """Lines over the x of their rows: value[key], or its entry n."""
    of = {row["line"]: [r for r in rows if r["line"] == row["line"]] for row in rows}
    return {line: ([r["x"] for r in own], np.array([[np.array(v[key])[n] for v in r["values"]] for r in own]).T)
            for line, own in of.items()}


def within(rows, x, y, suffix=""):
    """Lines inside the rows' values: the list value[y] over the list value[x]."""
    return {row["line"] + suffix: (row["values"][0][x], [value[y] for value in row["values"]]) for row in rows}


def by_solution(rows):
    """The runs of one row by what they count: name -> values. Runs end near Theorem 1, which counts what came after a
    token, or far from it: in a binary chain counting what came before is almost as good."""
    [row] = rows
    far = [value[-1]["distance"] > 0.5 for value in row["values"]]
    found = {name: [value for value, f in zip(row["values"], far) if f == kind]
             for name, kind in (("successors", False), ("predecessors", True))}
    return {name: values for name, values in found.items() if values}


def over_steps(values, pick):
    """The line of values that are lists of one dict per checkpoint: pick(dict) over the steps."""
    return [e["step"] for e in values[0]], [[pick(e) for e in value] for value in values]


def fig1a(rows):
    """One Mamba layer predicts as add-1 does, one of a transformer cannot | Mamba on the optimum, 2 layers near it"""
    return [panel("P(1) where x_t = 0, one test chain, order 1", "t", "P(1)", within(rows, "t", "p"))]


def fig1b(rows):
    """Mamba is close to add-1 at every order | Mamba 0, transformer 0.2-0.3 with 1 layer, between with 2"""
    return [panel("Distance to add-1, T = 128", "order k", DISTANCE, over_x(rows, "distance"), points=True,
                  marks=[0.02])]


def fig3a(rows):
    """The gap closes with convolution, not without | Mamba, MambaZero to 0, without convolution 0.10-0.15"""
    return [panel("Gap over training, order 1", "step", GAP, within(rows, "step", "gaps"), log="y", marks=[1e-3])]


def fig3b(rows):
    """A window of k + 1 is enough and needed | gap 0 exactly from w = k + 1 on"""
    return [panel("Gap by window, T = 128", "window w", GAP, over_x(rows, "gap"), log="y", points=True, marks=[2e-3])]


def fig4(rows):
    """Nothing is forgotten: a_t is 1 | about 1 everywhere"""
    return [panel("Decay after training", "position t", "a_t", within(rows, "t", "a"), marks=[0.995])]


def fig5a(rows):
    """What was written in context i is read in context l = i only | only i = l stays"""
    runs = by_solution(rows)
    sizes = {f"{name}, {label}": over_steps(values, lambda e, key=key: e[key]) for name, values in runs.items()
             for label, key in (("i = l", "on"), ("i not l", "off"))}
    ratio = {name: over_steps(values, lambda e: e["off"] / e["on"]) for name, values in runs.items()}
    return [panel("Products of writing and reading", "step", "mean |b(ij)^T c(l)|", sizes, log="y"),
            panel("The products with i not l, over those with i = l", "step", "ratio", ratio, log="y", marks=[0.05])]


def fig5b(rows):
    """The logits without counts are beta | both coordinates go to 1"""
    lines = {f"{name}, coordinate {j}": over_steps(values, lambda e, j=j: e["beta"][j])
             for name, values in by_solution(rows).items() for j in (0, 1)}
    return [panel("Logits without counts", "step", "in units of a count", lines, marks=[0.9, 1.1])]


def fig6(rows):
    """d = N = 2^k is enough, less is not | the same"""
    return [panel("Gap by width, T = 128", "order k", GAP, over_x(rows, "gap"), log="y", points=True)]


def fig7(rows):
    """Linear attention does as softmax attention does | the same"""
    return [panel("Linear attention, T = 128", "order k", DISTANCE, over_x(rows, "distance"), points=True)]


def fig8(rows):
    """Larger alphabets are learned too | small for all"""
    return [panel("Gap by alphabet, order 1", "states S", GAP, over_x(rows, "gap"), log="y", points=True),
            panel("Relative", "states S", "|gap| / optimum's loss", over_x(rows, "share"), log="y", points=True)]


def fig9(rows):
    """More window or more layers than needed do no harm | all reach the optimum"""
    return [panel("Over-parametrised, order 1, T = 128", "window w, or layers", GAP, over_x(rows, "gap"), log="y",
                  points=True)]


def fig10(rows):
    """Depth adds little, Mamba stays ahead | the same"""
    lines = over_x(rows, "gap")
    return [panel(f"{name}: layers, T = 128", "order k", GAP, {n: y for n, y in lines.items() if n.startswith(name)},
                  log="y", points=True) for name in ("Mamba", "transformer")]


def fig11(rows):
    """Convolution on q, k, v makes one transformer layer enough | the same"""
    return [panel("One layer of attention, T = 128", "order k", DISTANCE, over_x(rows, "distance"), points=True)]


def fig12(rows):
    """Without convolution Mamba needs two layers | the same"""
    return [panel("Mamba without convolution", "step", GAP, within(rows, "step", "gaps"), log="y")]


def fig13(rows):
    """With switches a_t is 0 at a switch and 1 elsewhere | the same, on the optimum"""
    trained = [row | dict(x=seed, values=[v]) for row in rows[1:] for seed, v in zip(row["seeds"], row["values"])]
    lines = {name: over_x(trained, key)["Mamba"] for name, key in
             (("a_t at a switch", "at"), ("a_t elsewhere", "elsewhere"), ("gap to the optimum", "gap"))}
    return [panel("One chain with switches", "t", "P(1)", within(rows[::-1], "t", "p")),
            panel("Decay", "t", "a_t", within(rows[1:], "t", "a")),
            panel("Over 256 chains", "seed", "mean", lines, log="y", points=True, marks=[2e-3, 0.05])]


def table2(rows):
    """Trained where P(1 | .) <= 1/2, it is add-1 where P(1 | .) >= 1/2 | 0.378, 0.098, 0.007, 0.001 at the same t"""
    return [panel("Hold-out prior", "t", "|P(1) - P_add-1(1)|", within(rows, "t", "one", ", one chain")
                  | within(rows, "t", "mean", ", 1,024 chains"), log="y", points=True)]


def table3(rows):
    """Without convolution width does not help | 0.113, 0.158, 0.140 (spread 0.03 to 0.07) at the same d"""
    return [panel("No convolution, T = 128", "d", GAP, over_x(rows, "gap"), log="x", points=True, marks=[0.03])]


def orders(rows):
    """Ours, a conjecture: from order 2 on MambaZero keeps a gap, and a ReLU after its convolution closes it"""
    return [panel("MambaZero and the ReLU, T = 128", "order k", GAP, over_x(rows, "gap"), log="y", points=True,
                  marks=[2e-3])]


def dynamics(rows):
    """Ours: plateau and drop, what moves first, in the runs of MambaZero that end at Theorem 1 (order 1)"""
    picks = {"gap": lambda e: e["gap"], "ratio of products": lambda e: e["off"] / e["on"],
             "1 - a": lambda e: 1 - e["a"], "u to Theorem 1": lambda e: e["distance"],
             "beta vector to 1": lambda e: math.dist(e["beta"], (1, 1))}
    values = next(iter(by_solution(rows).values()))  # successors, if there are any
    lines = {name: over_steps(values, pick) for name, pick in picks.items()}
    half = {}
    for name, (steps, y) in lines.items():
        y = np.array(y)
        moved = (y - y[:, -1:]) ** 2 <= (y[:, :1] - y[:, -1:]) ** 2 / 4  # (runs, checkpoints)
        half[name] = range(1, 1 + len(y)), [np.array(steps)[moved.argmax(1)]]
    return [panel("Along training", "step", "see legend", lines, log="y"),
            panel("First step half way from start to end", "run", "step", half, points=True)]


def length(rows):
    """Ours: trained on 256 tokens, read up to 16,384"""
    label = "gap (nats), at least 1e-6"
    return [panel("Gap by position", "t", label, within(rows, "t", "gap"), log="xy", marks=[2e-3]),
            panel("Mean over the first T", "T", label, within(rows, "T", "upto"), log="xy", points=True)]


def theorem2(rows):
    """Ours: d p of the exact models, their counts quantised, beside the lower bound of Theorem 2"""
    lines = {"bound": ([1, 1e3], [1, 1e3])}
    for row in rows:
        [v] = row["values"]
        lines[row["line"]] = np.array([(b, dp) for b, dp in zip(v["bound"], v["counts"]) if b >= 1]).T
    return [panel("Bits of state", "2^k (1 - 3 eps) log2(1 / eps)", "d p of counts and last tokens", lines, log="xy",
                  points=True)]


def prior(rows):
    """Ours: trained on beta = 1 and tested on another, the model follows the add-beta of its training"""
    lines = within(rows, "beta", "old", " to add-1") | within(rows, "beta", "new", " to the new optimum")
    lines["add-1 to the new optimum"] = within(rows, "beta", "between")["Mamba"]
    return [panel("Another prior", "beta of the test", "mean |difference of P(1)|", lines, log="xy", points=True)]


def table1(rows):
    """On real text Mamba needs its convolution, attention less | without and with: 30.68, 27.55; 29.28, 28.67"""
    lines = over_x(rows, "token_perplexity")
    more = {line: (x[1:], 100 * (y[:, :1] / y[:, 1:] - 1)) for line, (x, y) in lines.items()}
    return [panel("About 1.04 M parameters, 8,192 words", "convolution: 0 without, 1 with", "token perplexity", lines,
                  points=True), panel("Without over with", "convolution", "more perplexity (%)", more, points=True)]


def table4(rows):
    """What each part of Mamba is worth | 27.55; no convolution +11%, no factor a_t +17%, no non-linearity +5%"""
    lines = over_x(rows, "token_perplexity")
    more = {line: (x, 100 * (y / lines["Mamba"][1] - 1)) for line, (x, y) in lines.items()}
    return [panel("Mamba, about 1.04 M parameters, 8,192 words", "row", "token perplexity", lines, points=True),
            panel("Beside the whole model", "row", "more perplexity (%)", more, points=True)]


def rates(rows):
    """Ours: each row's learning rate, chosen on a tenth of the training text"""
    return [panel("Held-out tenth", "peak learning rate", "token perplexity", over_x(rows, "token_perplexity"), log="x",
                  points=True)]


def context(rows):
    """One S6 layer stops at the best of its class, and is bad beyond its length | near online gradient descent"""
    lines = {name: within(rows, "k", name)["model"] for name in rows[0]["values"][0] if name != "k"}
    return [panel("d = 4, trained on 50 pairs (dashed: expected)", "pairs k", "squared error", lines, log="xy")]


def drift(rows):
    """Ours: where the target drifts, one layer learns the best rate of forgetting"""
    own = {key: over_x(rows, key)["trained layer"] for key in rows[0]["values"][0]}
    keep = {"trained layer": own["a"], "optimum": own["best"]}
    loss = {"trained layer": own["loss"], "optimum": own["geometric"], "best equal weights": own["uniform"]}
    return [panel("What a step keeps", "rho of the target", "a", keep, points=True),
            panel("Loss", "rho of the target", "squared error", loss, points=True)]


def descent(rows):
    """Population gradient descent converges exponentially, at a rate without a free parameter | at least eta b1 d_h"""
    lines = within(rows, "step", "gap") | {f"predicted, {name}": y for name, y in within(rows, "step", "line").items()}
    ratio = over_x([row | dict(line="slope") for row in rows], "ratio")
    return [panel("Gap of half-losses", "step", "gap", lines, log="y"),
            panel("Slope of log gap", "d", "measured / predicted", ratio, points=True, marks=[0.99, 1.01])]


def gamma(rows):
    """One gradient step finds the hidden subspace, but only through the gate | exact support"""
    most = [row for row in rows if row["x"] == rows[-1]["x"]]
    return [panel(f"d = 16, r = 4, {most[0]['x']:,} prompts of 64 pairs", "coordinate of x (hidden: 1 to 4)",
                  "|gamma|, largest = 1", within(most, "i", "size"), points=True),
            panel("Inside over outside", "prompts", "ratio of mean |gamma|", over_x(rows, "ratio"), log="y",
                  points=True),
            panel("Features above one half are the subspace", "prompts", "share of seeds", over_x(rows, "found"),
                  points=True)]


def kernels(rows):
    """At r = 8 a kernel that is given the subspace needs more pairs than one layer, whatever d | the same"""
    lines = within(rows, "N", "model") | within(rows[:2], "N", "kernel ridge", ", kernel ridge")
    lines["kernel in the subspace"] = within(rows, "N", "kernel in the subspace")[rows[0]["line"]]
    return [panel("r = 8, trained on 64 pairs", "pairs N", "squared error", lines, points=True),
            panel("Model - kernel in the subspace", "pairs N", "difference", within(rows, "N", "difference"),
                  points=True, marks=[0])]


def ladder(rows):
    """Heads help, and at r = 4 the kernel in the subspace wins from 64 pairs on | the layer beats it"""
    beside = ("zero", "kernel ridge", "kernel in the subspace")
    return [panel(f"r = 4, after {rows[0]['values'][0]['N'][n]} pairs", "heads", "squared error",
                  over_x(rows, "model", n) | {key: over_x(rows, key, n)["gate"] for key in beside}, points=True)
            for n in (1, 2)]


FIGURES = {name: globals()[name] for name in RUNS}

# ----------------------------------------------------------------------------------------------------------------------
# From runs to results


def run_folder(flags, seed):
    """The folder of a run, made of its flags and seed, so that figures share it."""
    return Path("out/figures") / f"{re.sub(r'[^a-z0-9.]+', '-', flags.strip('- '))}-seed-{seed}"


def parse(flags):
    """The args of a run, without the word in front that says who makes it."""
    return train.task_args(re.sub(r"^\w+ ", "", flags).split())


def finished_run(flags, seed):
    """The run as measurements want it, or None if it has not ended yet. Exact models are made on the spot."""
    args = parse(f"{flags} --seed {seed}")
    if flags.startswith("untrained"):
        return SimpleNamespace(args=args)
    if flags.startswith("exact"):
        model = laplace_switching(args.states, args.beta, args.switch) if args.switch else \
            laplace_any_order(args.states, args.order, args.beta)
        return SimpleNamespace(model=model, args=args)
    folder = run_folder(flags, seed)
    try:
        log = [json.loads(text) for text in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        if log[-1]["step"] < args.steps:
            return None
        return SimpleNamespace(model=train.load_model(folder), args=args, folder=folder, log=log)
    except (OSError, ValueError, IndexError, KeyError, TypeError):  # not there yet, or damaged
        return None


def launch(flags, seed):
    """Train one run in a process of its own, or go on where it was interrupted. Raises ValueError with its reason."""
    folder = run_folder(flags, seed)
    words = ["--resume"] if (folder / "model.pt").exists() else [*flags.split(), "--seed", str(seed)]
    done = subprocess.run([sys.executable, str(Path(train.__file__)), *words, "--out", str(folder), "--threads", "1"],
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise ValueError(f"{folder}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")


def spec(name, a):
    """The rows of a figure without values: line, x, flags with those of the command line, seeds."""
    count, _, runs = RUNS[name]
    return [dict(line=line, x=x, flags=f"{f} {a.flags}".strip(),
                 seeds=list(range(1 if f.startswith("exact") else a.seeds or count))) for (line, x), f in runs.items()]


def compute(names, a):
    """Launch what is missing, as many runs at once as there are cores, then measure and write results/ID.json."""
    specs = {name: spec(name, a) for name in names}
    wanted = dict.fromkeys((row["flags"], seed) for rows in specs.values() for row in rows for seed in row["seeds"])
    missing = [run for run in wanted if finished_run(*run) is None]
    failed = []
    with ThreadPoolExecutor(a.jobs) as pool:
        jobs = [pool.submit(launch, *run) for run in missing]
        try:
            for job in tqdm(as_completed(jobs), "runs", len(jobs), disable=not jobs):
                failed += [str(job.exception())] if job.exception() else []
        except KeyboardInterrupt:  # the runs at work got it too, and stop at their last checkpoint
            pool.shutdown(cancel_futures=True)
            raise SystemExit(130) from None
    if failed:
        raise ValueError(f"{len(failed)} of {len(missing)} runs failed, the first: {failed[0]}")
    torch.set_num_threads(1)
    for name, rows in specs.items():
        for row in tqdm(rows, f"measuring {name}", leave=False, disable=None):
            runs = [finished_run(row["flags"], seed) for seed in row["seeds"]]
            with torch.no_grad():
                values = json.dumps([RUNS[name][1](run) for run in runs], allow_nan=False)
            row["values"] = json.loads(values, parse_float=lambda text: float(f"{float(text):.6g}"))  # six digits
            row["minutes"] = round(sum(minutes(run) for run in runs), 2)
        result = dict(id=name, claim=FIGURES[name].__doc__, torch=torch.__version__, rows=rows)
        a.results.mkdir(parents=True, exist_ok=True)
        train.write(a.results / f"{name}.json", json.dumps(result) + "\n")


def minutes(run):
    """What a run took to train, on one core."""
    log = getattr(run, "log", [dict(step=0)])
    return sum(e["ms_per_step"] * (e["step"] - before["step"]) for before, e in zip(log, log[1:])) / 6e4


# ----------------------------------------------------------------------------------------------------------------------
# From results to pictures and tables

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito: for all eyes
REFERENCES = ("add-1", "optimum", "exact", "bound", "predicted", "formula", "best weights")  # dashed, black


def spread(y):
    """Standard deviation over seeds of y (seeds, n)."""
    return y.std(0, ddof=1) if len(y) > 1 else 0 * y[0]


def table(panels):
    """Lines of text: name (seeds), then x: mean ± standard deviation at up to eight x."""
    for p in panels:
        yield f"{p['title']}: {p['ylabel']} over {p['xlabel']}"
        for name, (x, y) in p["lines"].items():
            pick = np.unique(np.linspace(0, len(x) - 1, 8).round().astype(int))
            std = spread(y)
            numbers = (f"{x[i]:.4g}: {y[:, i].mean():.3g}" + f" ± {std[i]:.1g}" * (len(y) > 1) for i in pick)
            yield f"  {name} ({len(y)})  " + "  ".join(numbers)


def draw(panels, path):
    """The panels below each other as a PNG: mean ± one standard deviation over seeds, on a logarithmic axis the median
    and the range. False if matplotlib is not installed; no window is opened, whatever the display."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(5.2, 0.3 + 3 * len(panels)), dpi=160, layout="constrained")
    for p, ax in zip(panels, figure.subplots(len(panels), squeeze=False)[:, 0]):
        ax.set(title=p["title"], xlabel=p["xlabel"], ylabel=p["ylabel"])
        for axis in p.get("log", ""):
            getattr(ax, f"set_{axis}scale")("log", nonpositive="clip")
        ticks = np.unique(np.concatenate([x for x, _ in p["lines"].values()]))
        if p.get("points") and len(ticks) <= 8:
            ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
            ax.set_xticks([], minor=True)
        for (name, (x, y)), color, mark in zip(p["lines"].items(), COLORS * 2, "osD^vPX" * 2):
            if "y" in p.get("log", ""):  # where a spread around the mean would reach below 0
                middle, low, high = np.median(y, 0), y.min(0), y.max(0)
            else:
                middle, low, high = y.mean(0), y.mean(0) - spread(y), y.mean(0) + spread(y)
            if name.startswith(REFERENCES):
                ax.plot(x, middle, "k--", linewidth=1, zorder=9, label=name)
            elif p.get("points"):
                ax.errorbar(x, middle, (middle - low, high - middle), color=color, marker=mark, markersize=4, capsize=3,
                            label=name)
                ax.plot(x, y.T, mark, color=color, markersize=2.5, alpha=0.4)  # every seed
            else:
                ax.plot(x, middle, color=color, label=name)
                ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        for level in p.get("marks", ()):
            ax.axhline(level, color="grey", linewidth=0.8, linestyle=":")
        ax.legend(fontsize=7, framealpha=0.6)
        ax.title.set_fontsize(9)
        ax.grid(alpha=0.2)
    if (seeds := max(len(y) for p in panels for _, y in p["lines"].values())) > 1:
        figure.supxlabel(f"{seeds} seeds: mean ± one standard deviation; on a logarithmic axis median and range",
                         fontsize=7)
    figure.savefig(path)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def make_parser():
    """The flags."""
    p = train.Parser(prog="figures.py", description="Draw figures from results, or make the results first.",
                     allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("id", nargs="*", help="figures and tables; none: all that have results")
    p.add_argument("--run", action="store_true", help="launch the runs that are missing")
    p.add_argument("--list", action="store_true", help="say for each: claim, runs, minutes")
    p.add_argument("--results", type=train.folder, default=Path("results"), help="folder to read and write")
    p.add_argument("--seeds", type=int, default=None, help="seeds a run (default: 5 or 3, by figure)")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at once")
    p.add_argument("--flags", default="", help="more flags of train.py for every run, to try things; needs --results")
    return p


def read(name, a):
    """The rows of results/ID.json, or None if there are none or they are damaged."""
    try:
        rows = json.loads((a.results / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        return rows if rows and all(row["values"] and row["minutes"] >= 0 for row in rows) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def main(argv=None):
    """List, run or draw; bad input: one line on stderr and exit code 2."""
    parser = make_parser()
    a = parser.parse_args(argv)
    for name in a.id:
        if name not in FIGURES:
            parser.error(f"there is no {name}; choose from {', '.join(FIGURES)}")
    if a.jobs < 1 or a.seeds is not None and not 1 <= a.seeds <= 1000:
        parser.error("--jobs must be at least 1, and --seeds between 1 and 1000")
    if a.flags and a.results == parser.get_default("results"):
        parser.error("--flags is for trying things: it needs another folder for --results")
    names = a.id or list(FIGURES)
    if a.list:
        for name in names:
            rows, runs = read(name, a), spec(name, a)
            cost = f"{sum(row['minutes'] for row in rows):.0f} minutes on one core" if rows else "not run yet"
            print(f"{name:9s} {FIGURES[name].__doc__}\n          {sum(len(r['seeds']) for r in runs)} runs, {cost}")
        return
    if a.run:
        try:
            compute([name for name in names if not up_to_date(name, a)], a)
        except (ValueError, OSError) as error:
            parser.error(str(error))
    for name in names:
        rows = read(name, a)
        if rows is None and name not in a.id:
            continue
        try:
            panels = FIGURES[name](rows)
            drawn = draw(panels, a.results / f"{name}.png")
        except OSError as error:
            parser.error(str(error))
        except (KeyError, IndexError, TypeError, ValueError):
            parser.error(f"{a.results}/{name}.json is missing or damaged; make it with: python figures.py {name} --run")
        print(f"{name}: {FIGURES[name].__doc__}", *table(panels), sep="\n")
        print(f"{a.results}/{name}.png" if drawn else "no picture: matplotlib is not installed", end="\n\n")


def up_to_date(name, a):
    """Whether results/ID.json holds the very runs that are asked for."""
    return [{k: row.get(k) for k in ("line", "x", "flags", "seeds")} for row in read(name, a) or []] == spec(name, a)


if __name__ == "__main__":
    train.as_program(main)
