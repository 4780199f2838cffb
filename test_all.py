"""
The claims of this project, in reading order: each test fails under a plausible bug in the file it is named after.

    pytest test_all.py              everything that takes seconds
    pytest test_all.py -m slow      the training claims, minutes
"""

import ast
import http.server
import importlib
import io
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import bench
import figures
import mambazero
import regression
import single_index
import ssm
import train
import transformer
import wikitext
from laplace import add_beta, add_beta_loop, bayes_loss, oracle_loss
from mambazero import PRESETS, Mamba, MambaConfig
from markov import context_index, sample_chain, sample_kernel, sample_switching
from regression import OneLayerS6, linear_prompts, loss_of_weights, online_gd, optimal_loss, step_weights
from single_index import hermite_features, single_index_prompts, stage_one
from ssm import scan, scan_chunked, scan_sequential, scan_step
from transformer import Transformer, TransformerConfig

HERE = Path(__file__).parent
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ----------------------------------------------------------------------------------------------------------------------
# markov.py


@pytest.mark.parametrize("S, beta, sure", [(3, 1e-3, 0.990), (3, 1e-2, 0.909), (2, 1e-3, 0.995)])
def test_kernels_of_small_beta_are_nearly_deterministic(S, beta, sure):
    P = sample_kernel(20_000, S, 0, beta, generator())[:, 0]  # (20000, S)
    assert P.isfinite().all() and (P.sum(-1) - 1).abs().max() < 1e-6
    assert abs((P.max(-1).values > 0.99).float().mean() - sure) < 0.01
    assert ((P - 1 / S).abs().max(-1).values > 1e-3).all()
    if (S, beta) == (3, 1e-3):
        assert abs(torch.special.entr(P).sum(-1).mean() - 0.0033) < 0.001
    assert (P.mean(0) - 1 / S).abs().max() < 0.02


@pytest.mark.parametrize("S, beta", [(2, 0.5), (3, 1.0), (4, 30.0), (2, 1e3)])
def test_kernels_have_dirichlet_moments(S, beta):
    P = sample_kernel(40_000, S, 0, beta, generator(1))[:, 0].double()
    variance = (S - 1) / (S**2 * (S * beta + 1))
    assert (P.mean(0) - 1 / S).abs().max() < 5 * math.sqrt(variance / 40_000)
    assert (P.var(0) / variance - 1).abs().max() < 0.05
    if S == 2 and beta == 0.5:  # arcsine law
        assert abs((P[:, 0] < 0.25).double().mean() - 1 / 3) < 0.01


def test_kernel_rows_are_independent():
    P = sample_kernel(64, 3, 1, 1.0, generator())
    assert P.shape == (64, 3, 3) and len(torch.unique(P.view(-1, 3), dim=0)) == 192
    P = sample_kernel(10_000, 2, 2, 1.0, generator())
    assert P.shape == (10_000, 4, 2) and (P.mean((0, 1)) - 0.5).abs().max() < 0.02
    r = torch.corrcoef(P[..., 0].T) - torch.eye(4)
    assert r.abs().max() < 0.05


def test_same_seed_same_chains_whatever_the_global_state():
    def draw(seed):
        g = generator(seed)
        P = sample_kernel(8, 3, 2, 0.5, g)
        return P, sample_chain(P, 50, g), sample_switching(8, 50, 3, 1, generator=g)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = draw(0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert all(torch.equal(u, v) for u, v in zip(a, draw(0)))
    assert not any(torch.equal(u, v) for u, v in zip(a, draw(1)))
    torch.manual_seed(3)
    x = sample_chain(sample_kernel(8, 2, 1), 20)  # generator=None is the global one
    torch.manual_seed(3)
    assert torch.equal(x, sample_chain(sample_kernel(8, 2, 1), 20))


@pytest.mark.parametrize("S, k", [(2, 1), (2, 3), (3, 2), (5, 1)])
def test_chains_follow_their_kernels_to_the_last_token(S, k):
    P = sample_kernel(1, S, k, 1.0, generator()).expand(20_000, -1, -1)
    x = sample_chain(P, k + 4, generator(1))
    c = context_index(x, S, k)
    for t in range(k):  # the first k tokens are uniform
        assert (F.one_hot(x[:, t], S).double().mean(0) - 1 / S).abs().max() < 0.02
    for t in range(k, k + 4):  # every later one follows its row, the last included
        for context in range(S**k):
            here = x[:, t][c[:, t - 1] == context]
            if len(here) > 500:
                error = (F.one_hot(here, S).double().mean(0) - P[0, context]).abs().max()
                assert error < 5 * 0.5 / math.sqrt(len(here))


def test_deterministic_chains():
    identity, swap = torch.eye(2).expand(50, 2, 2), torch.eye(2).flip(0).expand(50, 2, 2)
    x = sample_chain(identity, 30, generator())
    assert torch.equal(x, x[:, :1].expand(-1, 30)) and 0 < x[:, 0].sum() < 50
    x = sample_chain(swap, 30, generator())
    assert (x[:, 1:] != x[:, :-1]).all()
    for S in (2, 5):  # a symbol of probability 0 never comes, wherever it stands in the row
        for j in range(S):
            row = torch.full((S,), 1 / (S - 1))
            row[j] = 0
            assert not (sample_chain(row.expand(1000, 1, S), 20, generator()) == j).any()


def test_context_index():
    x = torch.tensor([[0, 1, 1, 0, 2, 1]])
    assert context_index(x, 3, 1).tolist() == [[0, 1, 1, 0, 2, 1]]
    assert context_index(x, 3, 2).tolist() == [[-1, 1, 4, 3, 2, 7]]  # newest token least significant
    assert context_index(x, 2, 2).tolist() == [[-1, 1, 3, 2, -1, -1]]  # 2 is a switch
    assert context_index(x, 3, 0).tolist() == [[0] * 6]
    assert context_index(x, 3, 9).tolist() == [[-1] * 6]


def test_switching_process():
    x = sample_switching(400, 500, S=3, k=2, beta=0.05, p_switch=0.02, generator=generator())
    assert x.min() == 0 and x.max() == 3
    rate = (x == 3).double()
    assert abs(rate.mean() - 0.02) < 0.002 and 0 < rate[:, 0].sum() < 24  # also at the very first position
    c = context_index(x, 3, 2)
    free = x[:, 1:][(c[:, :-1] < 0) & (x[:, 1:] < 3)]
    assert (F.one_hot(free, 3).double().mean(0) - 1 / 3).abs().max() < 0.02  # uniform until k tokens are seen
    loss = lambda y: bayes_loss(y, 3, 2, 0.05, 0.02).mean()
    glued = x[x < 3][: 400 * 400].view(400, 400)  # forgetting the switches must cost: kernels really change
    assert loss(x) < bayes_loss(glued, 3, 2, 0.05).mean()
    assert not (sample_switching(4, 50, 2, 1, p_switch=0.0, generator=generator()) == 2).any()


def test_hold_out_prior():
    p = sample_kernel(5000, 2, 1, generator=generator(), low=0.0, high=0.5)[..., 1]
    assert p.max() <= 0.5 and abs(p.mean() - 0.25) < 0.01 and p.min() < 0.01
    with pytest.raises(ValueError, match="S=3"):
        sample_kernel(5, 3, 1, low=0.0, high=0.5)


def test_markov_rejects_bad_input():
    for bad in (dict(B=0), dict(S=1), dict(k=-1), dict(beta=0.0), dict(beta=math.nan), dict(beta=math.inf)):
        with pytest.raises(ValueError):
            sample_kernel(**dict(B=2, S=2, k=1) | bad)
    with pytest.raises(ValueError, match="shape"):
        sample_chain(torch.rand(2, 3, 2), 5)
    with pytest.raises(ValueError, match="p_switch"):
        sample_switching(2, 5, 2, 1, p_switch=1.0)
    with pytest.raises(ValueError, match="64-bit"):
        context_index(torch.zeros(1, 3, dtype=torch.long), 10, 30)


def test_any_integer_type_will_do():
    x = sample_chain(sample_kernel(2, 3, 3, generator=generator()), 40, generator(1))
    for dtype in (torch.uint8, torch.int8, torch.int32):
        assert torch.equal(context_index(x.to(dtype), 3, 3), context_index(x, 3, 3))
        assert torch.equal(add_beta(x.to(dtype), 3, 3), add_beta(x, 3, 3))
        assert torch.equal(bayes_loss(x.to(dtype), 3, 3), bayes_loss(x, 3, 3))


@cuda
def test_markov_on_cuda():
    g = torch.Generator("cuda").manual_seed(0)
    P = sample_kernel(8, 2, 1, generator=g, device="cuda")
    assert P.device.type == sample_chain(P, 9, g).device.type == "cuda"
    with pytest.raises(ValueError, match="generator"):
        sample_kernel(8, 2, 1, generator=g)


# ----------------------------------------------------------------------------------------------------------------------
# laplace.py


@pytest.mark.parametrize("beta, true_symbol, mean", [(1.0, [1/2, 1/2, 1/3, 2/3, 1/2, 3/4], 0.645200),
                                                     (0.5, [1/2, 1/2, 1/4, 3/4, 1/2, 5/6], 0.655957)])
def test_add_beta_on_a_worked_example(beta, true_symbol, mean):
    x = torch.tensor([[0, 1, 1, 0, 1, 0, 1]])
    found = add_beta(x[:, :-1], 2, 1, beta).gather(-1, x[:, 1:, None]).flatten()
    assert torch.allclose(found, torch.tensor(true_symbol))
    assert abs(bayes_loss(x, 2, 1, beta).mean() - mean) < 1e-6
    if beta == 1:
        assert torch.allclose(bayes_loss(x, 2, 1)[0], torch.tensor(
            [0.693147, 0.693147, 1.098612, 0.405465, 0.693147, 0.287682]), atol=1e-6)
        assert add_beta(torch.tensor([[0, 1, 1, 0, 1, 0]]), 2, 1)[0, -1, 1] == 0.75


def test_add_beta_order_2():
    x = torch.tensor([[0, 1, 0, 0, 1, 0, 1]])
    assert torch.allclose(add_beta(x, 2, 2)[0, 1:-1, 1], torch.tensor([1/2, 1/2, 1/2, 1/3, 1/3]))


@pytest.mark.parametrize("S, k, beta", [(2, 1, 1.0), (2, 3, 0.5), (3, 2, 2.0), (5, 1, 1e-3), (4, 4, 1.0)])
def test_vectorised_add_beta_equals_the_loop(S, k, beta):
    x = sample_chain(sample_kernel(6, S, k, 1.0, generator()), 60, generator(1))
    p = add_beta(x, S, k, beta, dtype=torch.float64)
    assert p.dtype == torch.float64 and (p.sum(-1) - 1).abs().max() < 1e-12
    loop = torch.tensor([add_beta_loop(row, S, k, beta) for row in x.tolist()], dtype=torch.float64)
    assert (p - loop).abs().max() < 1e-12
    y = x.clone()
    y[:, 40:] = (y[:, 40:] + 1) % S  # causal: what comes later changes nothing
    assert torch.equal(add_beta(y, S, k, beta)[:, :40], add_beta(x, S, k, beta)[:, :40])


def test_add_beta_for_the_switching_process_restarts_at_every_switch():
    S, k, p = 3, 2, 0.1
    x = sample_switching(5, 80, S, k, p_switch=p, generator=generator())
    probs = add_beta(x, S, k, 0.7, p_switch=p, dtype=torch.float64)
    assert probs.shape == (5, 80, S + 1) and (probs[..., S] - p).abs().max() < 1e-7
    for row, q in zip(x.tolist(), probs):
        for t in range(80):
            last = max([i for i in range(t + 1) if row[i] == S], default=-1)
            segment = row[last + 1 : t + 1]
            best = add_beta_loop(segment, S, k, 0.7)[-1] if segment else [1 / S] * S
            assert (q[t, :S] / (1 - p) - torch.tensor(best)).abs().max() < 1e-6


EXPECTED_BAYES = [  # exact expectations by enumeration
    (2, 1, 1.0, [0.693147, 0.693147, 0.664831, 0.621227, 0.604281, 0.586779, 0.576362, 0.566434]),
    (2, 1, 0.5, [0.693147, 0.693147, 0.627741, 0.536771, 0.507916, 0.478273, 0.463673, 0.448854]),
    (3, 1, 1.0, [1.098612, 1.098612, 1.078982, 1.047715, 1.027996, 1.011196]),
    (2, 2, 1.0, [0.693147, 0.693147, 0.693147, 0.678989, 0.657187, 0.632196, 0.613897, 0.602869]),
]


@pytest.mark.parametrize("S, k, beta, expected", EXPECTED_BAYES)
def test_expected_bayes_and_oracle_losses(S, k, beta, expected):
    g = generator()
    P = sample_kernel(40_000, S, k, beta, g)
    x = sample_chain(P, len(expected), g)
    bayes, oracle = bayes_loss(x, S, k, beta).double(), oracle_loss(x, P).double()
    assert (bayes.mean(0) - torch.tensor(expected[1:])).abs().max() < 0.01
    assert bayes[:, : k - 1].sub(math.log(S)).abs().sum() < 1e-4
    assert oracle[:, : k - 1].sub(math.log(S)).abs().sum() < 1e-4
    at_k = torch.digamma(torch.tensor(S * beta + 1)) - torch.digamma(torch.tensor(beta + 1))
    assert abs(oracle[:, k - 1].mean() - at_k) < 0.01
    assert (bayes.mean(0) - oracle.mean(0) > -0.005).all()
    for wrong in (beta * 2, beta / 5):  # the right beta is the best one
        assert bayes_loss(x, S, k, wrong).mean() > bayes.mean()


def test_oracle_loss_far_into_a_chain():
    P = sample_kernel(3000, 2, 1, 1.0, generator())
    assert abs(oracle_loss(sample_chain(P, 150, generator(1)), P)[:, 100:].mean() - 0.4809) < 0.012


def test_high_order_needs_no_table_of_contexts():
    x = torch.randint(2, (4, 4096), generator=generator())
    start = torch.randint(2, (4, 4096), generator=generator())
    assert add_beta(x, 2, 12).shape == (4, 4096, 2) and torch.equal(x, start)
    assert add_beta(x[:, :500], 2, 60).shape == (4, 500, 2)  # 2^60 contexts: only the seen ones may be stored


def test_laplace_rejects_bad_input():
    x = torch.tensor([[0, 1, 2]])
    for call in (lambda: add_beta(x, 2, 1), lambda: add_beta(x, 3, 1, 0.0), lambda: add_beta(x, 3, 0),
                 lambda: add_beta(x.float(), 3, 1), lambda: add_beta(x, 3, 1, math.nan),
                 lambda: add_beta(x, 2, 1, p_switch=1.0), lambda: add_beta(-x, 3, 1), lambda: bayes_loss(x, 2, 1)):
        with pytest.raises(ValueError):
            call()


# ----------------------------------------------------------------------------------------------------------------------
# ssm.py


def unit(T, log_a, dtype=torch.float32):
    """x = b = c = 1, one head, state 1; log_a a number or {position: value, None: the rest}."""
    one = torch.ones(1, T, 1, 1, dtype=dtype)
    if not isinstance(log_a, dict):
        log_a = {None: log_a}
    a = torch.full((1, T, 1), float(log_a[None]), dtype=dtype)
    for t, value in log_a.items():
        if t is not None:
            a[:, t] = value
    return one, a, one.clone(), one.clone()


def random_inputs(B=2, T=20, H=4, P=3, G=2, N=5, dtype=torch.float64, seed=0):
    g = generator(seed)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype)
    return r(B, T, H, P), -torch.rand(B, T, H, generator=g, dtype=dtype), r(B, T, G, N), r(B, T, G, N)


def close(pair, other, tolerance):
    return all((u - v).abs().max() <= tolerance for u, v in zip(pair, other))


@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 7, 8, 9, 63, 65])
def test_chunked_scan_equals_the_recurrence(T):
    y, h = scan_chunked(*unit(7, math.log(0.5)), chunk=4)
    assert torch.allclose(y.flatten(), 2 - 0.5 ** torch.arange(7.0)) and abs(h.item() - 1.984375) < 1e-6
    for chunk in (1, 3, 4, 64, 1000, None):
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            inputs = random_inputs(T=T, dtype=dtype)
            out = scan_chunked(*inputs, chunk=chunk)
            assert out[0].dtype == out[1].dtype == dtype
            assert close(out, scan_sequential(*inputs), tolerance)


def test_chunks_hand_over_and_stay_causal():
    y, _ = scan_chunked(*unit(12, 0.0), chunk=4)
    assert torch.equal(y.flatten(), torch.arange(1.0, 13))
    for T, chunk, t in ((12, 4, 9), (200, 4, 150), (600, 2, 301)):  # 3, 50 and 300 chunks: one, two and three levels
        inputs = random_inputs(T=T, dtype=torch.float32)
        y, _ = scan_chunked(*inputs, chunk=chunk)
        for i in range(4):
            changed = [v.clone() for v in inputs]
            changed[i][:, t] -= 1
            z, _ = scan_chunked(*changed, chunk=chunk)
            assert torch.equal(y[:, :t], z[:, :t]) and not torch.equal(y[:, t:], z[:, t:])
        assert close(scan_chunked(*inputs, chunk=chunk), scan_sequential(*inputs), 2e-5)


@pytest.mark.parametrize("T, log_a", [(3, -100.0), (64, -20.0), (64, -1000.0)])
def test_gradients_of_strong_decay_are_finite(T, log_a):
    inputs = [v.requires_grad_() for v in unit(T, log_a)]
    y, _ = scan_chunked(*inputs, chunk=64)
    y.sum().backward()
    assert (y - 1).abs().max() < 1e-6 and (inputs[0].grad - 1).abs().max() < 1e-6
    assert inputs[1].grad.abs().max() < 1e-6 and all(v.grad.isfinite().all() for v in inputs)


@pytest.mark.parametrize("reset", [-1e2, -1e4, -1e6, -1e30, -math.inf])
@pytest.mark.parametrize("chunk", [1, 4, 16, 64, None])
def test_small_decays_survive_a_reset(reset, chunk):
    y, h = scan_chunked(*unit(64, {None: -1e-3, 3: reset}), chunk=chunk)
    t = torch.arange(3, 64, dtype=torch.float64)
    exact = -torch.expm1(-0.001 * (t - 2)) / -math.expm1(-0.001)
    assert abs(exact[-1] - 59.2063535) < 1e-6
    assert (y.flatten()[3:].double() / exact - 1).abs().max() < 1e-5 and abs(h.item() / exact[-1] - 1) < 1e-5
    y, _ = scan_chunked(*unit(640, {None: -1e-3, 3: reset, 500: reset}), chunk=chunk)  # across chunks, too
    z, _ = scan_sequential(*unit(640, {None: -1e-3, 3: reset, 500: reset}, torch.float64))
    assert (y / z - 1).abs().max() < 1e-5


@pytest.mark.parametrize("at", [0, 3, 4, 7])
@pytest.mark.parametrize("reset", [-1e4, -math.inf])
def test_a_hard_reset_is_right_in_value_and_gradient(at, reset):
    inputs = [v.requires_grad_() for v in unit(8, {None: 0.0, at: reset})]
    y, h = scan_chunked(*inputs, chunk=4)
    y.sum().backward()
    before, after = list(range(1, at + 1)), list(range(1, 9 - at))
    assert y.flatten().tolist() == pytest.approx(before + after)
    assert inputs[0].grad.flatten().tolist() == pytest.approx(before[::-1] + after[::-1])
    paths = [sum(1 for s in range(t, 8) for j in range(t) if not j < at <= s) for t in range(8)]  # j < t <= s
    assert inputs[1].grad.flatten().tolist() == pytest.approx(paths)
    if at == 3:
        assert paths == [0, 2, 2, 0, 4, 6, 6, 4]
    assert all(v.grad.isfinite().all() for v in inputs)


def test_gradcheck_of_the_chunked_scan():
    inputs = [v.requires_grad_() for v in random_inputs(B=1, T=7, H=2, P=2, G=1, N=3)]
    h0 = torch.randn(1, 2, 2, 3, dtype=torch.float64, generator=generator(), requires_grad=True)
    assert torch.autograd.gradcheck(lambda *v: scan_chunked(*v, chunk=4), (*inputs, h0))


@pytest.mark.parametrize("T, chunk, G", [(7, 4, 1), (33, 4, 4), (70, 2, 2), (300, 1, 1), (40, None, 2)])
def test_all_gradients_equal_those_of_the_recurrence(T, chunk, G):
    def grads(f, **kwargs):
        inputs = [v.requires_grad_() for v in random_inputs(T=T, G=G)]
        with torch.no_grad():
            inputs[1][:, T // 2] = -1e6
            inputs[1][:, T // 3] = -math.inf
        h0 = torch.randn(2, 4, 3, 5, dtype=torch.float64, generator=generator(1)).requires_grad_()
        y, h = f(*inputs, h0, **kwargs)
        ((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() + (h * h).sum()).backward()
        return [v.grad for v in (*inputs, h0)]

    for ours, theirs in zip(grads(scan_chunked, chunk=chunk), grads(scan_sequential)):
        assert (ours - theirs).abs().max() < 1e-10


@pytest.mark.parametrize("pieces", [(5, 7), (1, 11), (3, 1, 8), (1,) * 12])
def test_a_sequence_in_pieces(pieces):
    inputs = random_inputs(T=12, dtype=torch.float32)
    whole = scan_chunked(*inputs)
    ys, h, start = [], None, 0
    for n in pieces:
        y, h = scan_chunked(*[v[:, start : start + n] for v in inputs], h, chunk=4)
        ys, start = ys + [y], start + n
    assert close((torch.cat(ys, 1), h), whole, 1e-5)


def test_final_state_is_differentiable():
    x, log_a, b, c = unit(7, math.log(0.5), torch.float64)
    x.requires_grad_(), (h0 := torch.zeros(1, 1, 1, 1, dtype=torch.float64).requires_grad_())
    scan_chunked(x, log_a, b, c, h0, chunk=4)[1].sum().backward()
    assert h0.grad.item() == pytest.approx(0.5**7)
    assert x.grad.flatten().tolist() == pytest.approx([0.5 ** (6 - t) for t in range(7)])


def test_no_extra_chunk_where_the_length_divides(monkeypatch):
    seen = []
    carry = ssm._carry
    monkeypatch.setattr(ssm, "_carry", lambda added, *rest: seen.append(added.shape[1]) or carry(added, *rest))
    scan_chunked(*random_inputs(T=8), chunk=4)
    scan_chunked(*random_inputs(T=9), chunk=4)
    assert seen == [2, 3]


@pytest.mark.parametrize("K", [1, 16, 17, 300])
def test_carry_over_groups_of_chunks_is_one_loop(K):
    added = torch.randn(2, K, 3, 2, dtype=torch.float64, requires_grad=True)
    a = torch.rand(2, K, 3, 1, dtype=torch.float64)
    a[:, K // 2] = 0.0  # a reset
    a.requires_grad_()
    h0 = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    slow = ssm._steps(added, a, h0, dim=1)
    fast = ssm._carry(added, a, h0)
    for u, v in zip(slow, fast):
        assert torch.allclose(u, v, atol=1e-14, rtol=0)
    weights = torch.randn_like(slow[0])
    loss = lambda before, last: (before * weights).sum() + last.square().sum()
    for u, v in zip(*(torch.autograd.grad(loss(*out), (added, a, h0)) for out in (slow, fast))):
        assert torch.allclose(u, v, atol=1e-12, rtol=0)


def test_half_precision_keeps_decay_and_state_in_float32():
    x, log_a, b, c = (v.bfloat16() for v in unit(256, -0.3))
    a = math.exp(float(log_a[0, 0, 0]))
    exact = (1 - a ** torch.arange(1.0, 257)) / (1 - a)
    for scan_form in (lambda: scan_chunked(x, log_a, b, c, chunk=256), lambda: scan_sequential(x, log_a, b, c)):
        y, h = scan_form()
        assert y.dtype == torch.bfloat16 and h.dtype == torch.float32
        assert (y.flatten().float() / exact - 1).abs().max() < 0.02 and abs(exact[-1] - 3.8497) < 1e-3
    with torch.autocast("cpu", dtype=torch.bfloat16):  # autocast must not reach inside
        inputs = random_inputs(dtype=torch.float32)
        assert close(scan_chunked(*inputs), scan_sequential(*inputs), 1e-5)


def test_scan_step_leaves_the_state_passed_in():
    x, log_a, b, c = random_inputs(T=3)
    h = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    kept = h.clone()
    y, new = scan_step(x[:, 0], log_a[:, 0], b[:, 0], c[:, 0], h)
    assert torch.equal(h, kept) and not torch.equal(new, kept) and y.shape == (2, 4, 3)


def test_scan_rejects_shapes_that_do_not_fit():
    x, log_a, b, c = random_inputs()
    for bad in ((x, log_a, b[..., :3], c), (x, log_a[:, 1:], b, c), (x[:, :, :3], log_a[:, :, :3], b, c),
                (x, log_a, b, c, torch.zeros(1)), (x[:, :0], log_a[:, :0], b[:, :0], c[:, :0]), (x.long(), log_a, b, c),
                (x, log_a[..., :1], b, c)):
        for form in (scan_chunked, scan_sequential):
            with pytest.raises(ValueError):
                form(*bad)
    with pytest.raises(ValueError, match="chunk"):
        scan_chunked(x, log_a, b, c, chunk=0)


def test_deterministic_mode():
    torch.use_deterministic_algorithms(True)
    try:
        inputs = [v.requires_grad_() for v in random_inputs(dtype=torch.float32)]
        scan(*inputs)[0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert inputs[0].grad.isfinite().all()


def test_compiled_scan_handles_other_lengths_without_recompiling():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    inside = torch.compile(ssm.scan_inside, fullgraph=True, dynamic=True, backend=backend)
    for T, B in ((20, 8), (30, 8), (40, 3), (230, 3), (1, 3)):
        inputs = random_inputs(B=B, T=T, dtype=torch.float32)
        assert close(scan_chunked(*inputs, inside=inside), scan_chunked(*inputs), 1e-4)
    assert len(graphs) <= 4  # three for the lengths, one more for T = 1
    assert max(len(graph.graph.nodes) for graph in graphs) < 200  # no loop over T unrolled


def test_failing_compilation_falls_back_once(monkeypatch):
    calls = []

    def broken(*args):
        calls.append(1)
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(ssm, "_compiled", broken)
    inputs = random_inputs(dtype=torch.float32)
    monkeypatch.setattr(ssm, "_check", lambda *a: None)
    fake = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"))
    monkeypatch.setattr(ssm, "scan_chunked", lambda *a, inside=None: inside(*a) if inside else scan_chunked(*inputs))
    with pytest.warns(UserWarning, match="no compiler here"):
        out = scan(fake, None, None, None)
    assert close(out, scan_chunked(*inputs), 0)
    with pytest.raises(AttributeError):  # from now on scan_inside runs, and its errors are not hidden
        scan(fake, None, None, None)
    assert calls == [1]


@cuda
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_scan_on_cuda(dtype, tolerance):
    cpu = [v.to(dtype).requires_grad_() for v in random_inputs(T=300, H=4, P=16, G=2, N=16, dtype=torch.float32)]
    gpu = [v.detach().cuda().requires_grad_() for v in cpu]
    y, h = scan(*gpu)
    z, g = scan_sequential(*cpu)
    y.float().sum().backward(), z.float().sum().backward()
    for u, v in ((y, z), (h, g), *((u.grad, v.grad) for u, v in zip(gpu, cpu))):
        assert (u.cpu().float() - v.float()).abs().max() <= tolerance * v.float().abs().max()


# ----------------------------------------------------------------------------------------------------------------------
# mambazero.py


def random_model(seed=0, double=True, **fields):
    torch.manual_seed(seed)
    model = Mamba(MambaConfig(**dict(vocab=3, d=6, state=5, heads=2, window=3) | fields))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model.double() if double else model


def tokens(B=2, T=9, V=3, seed=0):
    return torch.randint(V, (B, T), generator=generator(seed))


SWITCHES = [dict(conv=conv, act=act, gate=gate, predict=predict) for conv, act, gate, predict in
            itertools.product(("xbc", "none"), ("relu", "none"), (True, False), ("l1", "softmax"))]


@pytest.mark.parametrize("fields", SWITCHES + [
    dict(conv="xb"), dict(conv="x"), dict(act="silu"), dict(mlp=False), dict(norm=True, layers=2), dict(decay=False),
    dict(tie=True), dict(groups=2), dict(window=1), dict(expand=1, heads=1)], ids=str)
def test_step_prefill_and_forward_agree(fields):
    for double, tolerance in ((True, 1e-12), (False, 1e-5)):
        model, x = random_model(double=double, **fields), tokens()
        full = model(x)
        assert (full.exp().sum(-1) - 1).abs().max() < 1e-5
        for split in (1, 2, 4, 9):  # also prompts shorter than the convolution
            log_probs, state = model.prefill(x[:, :split])
            out = [log_probs]
            for t in range(split, 9):
                log_probs, state = model.step(x[:, t], state)
                out.append(log_probs[:, None])
            assert (torch.cat(out, 1).exp() - full.exp()).abs().max() <= tolerance
            _, whole = model.prefill(x)
            pairs = [(a, b) for s, w in zip(state, whole) for a, b in zip(s, w) if a.numel()]
            assert all((a - b).abs().max() <= tolerance for a, b in pairs)
        state = model.init_state(2)
        first = [model.step(x[:, t], state)[0] for t in range(3)]
        again = [model.step(x[:, t], state)[0] for t in range(3)]
        assert all(torch.equal(a, b) for a, b in zip(first, again))
        a, s = model.prefill(x[:, :4])
        b, _ = model.prefill(x[:, 4:], s)
        assert (torch.cat([a, b], 1).exp() - full.exp()).abs().max() <= tolerance


@pytest.mark.parametrize("act, norm", [("relu", False), ("silu", True)])
def test_the_model_computes_its_equations(act, norm):
    model, x = random_model(d=4, state=2, heads=1, window=2, layers=1, act=act, norm=norm), tokens(1, 5)
    block, (first, second, last), act = model.blocks[0], model.norms, dict(relu=F.relu, silu=F.silu)[act]
    W_X, W_B, W_C, W_dt, W_z = block.in_proj.weight.split((8, 2, 2, 1, 8))
    e, H = model.embed.weight[x[0]], torch.zeros(8, 2, dtype=torch.float64)
    n = first(e)
    for t in range(5):
        conv = lambda W, w, bias: act(w[:, 1] * (W @ n[t]) + (w[:, 0] * (W @ n[t - 1]) if t else 0) + bias)
        (wx, wb, wc), (px, pb, pc) = block.conv_weight.split((8, 2, 2)), block.conv_bias.split((8, 2, 2))
        delta = F.softplus(W_dt @ n[t] + block.delta_bias)
        H = torch.exp(-block.a_log.exp() * delta) * H + torch.outer(conv(W_X, wx, px) * delta, conv(W_B, wb, pb))
        u = e[t] + block.out_proj.weight @ ((H @ conv(W_C, wc, pc)) * act(W_z @ n[t]))
        w1, w3 = model.mlps[0].fc1.weight.split((16, 16))
        v = u + model.mlps[0].fc2.weight @ (act(w1 @ second(u)) * (w3 @ second(u)))
        assert (model(x)[0, t] - (model.head.weight @ last(v)).log_softmax(-1)).abs().max() < 1e-12
    inside = model.internals(x)
    assert inside["a"][0].shape == (1, 5, 1) and (inside["a"][0] <= 1).all() and (inside["a"][0] >= 0).all()
    assert torch.allclose(inside["a"][0], torch.exp(-block.a_log.exp() * inside["delta"][0]))


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5])
def test_convolution_is_causal_and_its_last_weight_is_the_current_token(window):
    model = random_model(window=window, conv="xbc", act="none", gate=False, mlp=False, decay=False, predict="value")
    for T in (1, 2, 3, 10):
        x = tokens(T=T)
        y = model(x)
        assert y.shape == (2, T, 3)
        for t in range(T):
            z = x.clone()
            z[:, t] = (z[:, t] + 1) % 3
            assert torch.equal(model(z)[:, :t], y[:, :t]) and not torch.equal(model(z)[:, t], y[:, t])
    block = model.blocks[0]  # an impulse comes out as the kernel, last weight first
    with torch.no_grad():
        block.conv_bias.zero_()
    u = torch.zeros(1, window, 6, dtype=torch.float64)
    u[0, 0, 0] = 1
    record = {}
    block(u, record=record)
    b = record["b"][0].flatten(2)[0]
    expected = block.conv_weight * block.in_proj.weight[: block.conv_width, :1]
    expected = expected[block.E : block.E + block.GN].T.flip(0)
    assert torch.allclose(b, expected)


def test_both_forms_of_the_convolution_agree():
    u, weight, bias = torch.randn(2, 12, 5), torch.randn(5, 4), torch.randn(5)
    fast = mambazero.causal_conv(u, weight, bias)
    assert fast.shape == (2, 9, 5)
    assert (fast - mambazero.causal_conv(u.double(), weight.double(), bias.double())).abs().max() < 1e-5


@pytest.mark.parametrize("fields", SWITCHES, ids=str)
def test_every_switch_trains_and_owns_its_parameters(fields):
    torch.manual_seed(0)
    model = Mamba(MambaConfig(**fields, d=8, state=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = sample_chain(sample_kernel(16, 2, 1, generator=generator()), 33, generator(1))
    for _ in range(30):
        optimizer.zero_grad()
        loss = -model(x[:, :-1]).gather(-1, x[:, 1:, None]).mean()
        loss.backward()
        assert loss.isfinite() and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    names = {n for n, _ in model.named_parameters()}
    assert any("conv" in n for n in names) == (fields["conv"] != "none")
    rows = 16 + 4 + 4 + 1 + 16 * fields["gate"]
    assert model.blocks[0].in_proj.weight.shape == (rows, 8)
    assert not hasattr(Mamba(MambaConfig(decay=False)).blocks[0], "a_log")
    assert not len(Mamba(MambaConfig(mlp=False)).mlps)


def test_parameter_shapes_of_the_paper():
    model = Mamba(MambaConfig(**PRESETS["mamba"], vocab=3, d=8, state=4, expand=2, window=2))
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    E, N, d, S, w = 16, 4, 8, 3, 2
    assert shapes["embed.weight"] == (S, d) and shapes["head.weight"] == (S, d)
    assert shapes["blocks.0.in_proj.weight"] == (2 * E + 2 * N + 1, d) and shapes["blocks.0.out_proj.weight"] == (d, E)
    assert shapes["blocks.0.conv_weight"] == (E + 2 * N, w)
    assert shapes["mlps.0.fc1.weight"] == (2 * 4 * d, d) and shapes["mlps.0.fc2.weight"] == (d, 4 * d)
    zero = Mamba(MambaConfig(**PRESETS["mambazero"]))
    matrices = {n.split(".")[-2] for n, p in zero.named_parameters() if p.dim() == 2}
    assert matrices == {"embed", "in_proj", "0", "out_proj", "head"}


def test_initial_decay_survives_building_the_model():
    for preset in PRESETS.values():
        block = Mamba(MambaConfig(**preset | dict(heads=4))).blocks[0]
        assert torch.allclose(F.softplus(block.delta_bias), torch.logspace(-3, -1, 4), rtol=1e-4)
        assert torch.equal(block.a_log.exp(), torch.ones(4)) and not block.conv_bias.any()
    assert all((p >= 0).all() for n, p in Mamba(MambaConfig(**PRESETS["mambazero"])).named_parameters()
               if n.endswith("weight") and "in_proj" not in n)


def test_l1_prediction():
    predict = lambda scores: mambazero.predict(torch.tensor(scores, requires_grad=True), "l1").exp()
    assert torch.allclose(predict([0.0, 0.0, 0.0]), torch.full((3,), 1 / 3))
    assert torch.allclose(predict([-1.0, -3.0]), torch.tensor([0.25, 0.75]))
    for scores, target in (([0.0, 0.0], 0), ([0.0, 1.0], 0), ([2.0, -1.0], 1)):
        scores = torch.tensor(scores, requires_grad=True)
        log_probs = mambazero.predict(scores, "l1")
        (-log_probs[target]).backward()
        assert log_probs.isfinite().all() and scores.grad.isfinite().all() and abs(log_probs.exp().sum() - 1) < 1e-6
    scores = torch.tensor([-1.0, 3.0], requires_grad=True)  # straight-through: what is below zero is pulled up
    (-mambazero.predict(scores, "l1")[0]).backward()
    assert scores.grad[0] < 0 < scores.grad[1]
    for kind in ("l1", "softmax"):
        assert mambazero.predict(torch.zeros(2, dtype=torch.bfloat16), kind).dtype == torch.float32


@pytest.mark.parametrize("V", [2, 3, 5, 7])
def test_no_symbol_is_added_to_the_vocabulary(V):
    for preset in PRESETS.values():
        model = Mamba(MambaConfig(**preset, vocab=V))
        for p in model.parameters():
            torch.nn.init.zeros_(p)
        log_probs = model(tokens(V=V))
        assert log_probs.shape[-1] == V and torch.allclose(log_probs, torch.tensor(-math.log(V)))


def test_odd_sizes_work_and_impossible_ones_are_named():
    model = Mamba(MambaConfig(d=6, expand=1, heads=2, state=5, window=3))
    model(tokens(V=2)).sum().backward()
    with pytest.raises(ValueError, match="6, got 4"):
        MambaConfig(d=6, expand=1, heads=4)
    for bad in (dict(layers=0), dict(window=0), dict(conv="bc"), dict(act="gelu"), dict(predict="l2"),
                dict(dropout=1.0),
                dict(heads=2, groups=3), dict(inputs=4, tie=True)):
        with pytest.raises(ValueError):
            MambaConfig(**bad)


def test_chained_steps_give_the_gradients_of_forward():
    model, x = random_model(), tokens(T=5)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    state, out = model.init_state(2), []
    kept = [tuple(s.clone() for s in layer) for layer in state]
    for t in range(5):
        log_probs, new = model.step(x[:, t], state)
        assert all(torch.equal(a, b) for k, s in zip(kept, state) for a, b in zip(k, s))
        kept, state, out = [tuple(s.clone() for s in layer) for layer in new], new, out + [log_probs]
    torch.stack(out, 1).square().sum().backward()
    assert all((p.grad - e).abs().max() < 1e-6 * max(1, e.abs().max()) for p, e in zip(model.parameters(), expected))


def test_generate_and_internals_leave_the_model_alone():
    model, x = random_model(), tokens()
    before = model(x)
    model.internals(x)
    assert torch.equal(before, model(x))
    out = model.generate(x, 6, generator=generator())
    assert out.shape == (2, 15)
    assert torch.equal(out[:, :9], x)
    assert torch.equal(out, model.generate(x, 6, generator=generator()))
    greedy = model.generate(x, 3, temperature=0)
    assert torch.equal(greedy[:, 9], before[:, -1].argmax(-1))


def test_real_inputs_and_values():
    model = Mamba(MambaConfig(inputs=4, vocab=1, predict="value"))
    assert model(torch.randn(2, 5, 4)).shape == (2, 5, 1)


def test_tied_head_is_one_tensor():
    model = Mamba(MambaConfig(tie=True))
    assert model.head.weight is model.embed.weight
    model.load_state_dict(model.state_dict())
    model.double()
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert len([p for p in model.parameters() if p is model.embed.weight]) == 1
    untied = Mamba(MambaConfig())
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()


@pytest.mark.parametrize("Model, Config", [(Mamba, MambaConfig), (Transformer, TransformerConfig)])
@pytest.mark.parametrize("d", [48, 192])
def test_tied_embeddings_start_with_small_logits_at_every_width(Model, Config, d):
    torch.manual_seed(0)
    std = Model(Config(vocab=500, d=d, tie=True)).embed.weight.std()
    assert abs(std * d**0.5 / (0.02 * 768**0.5) - 1) < 0.02  # a normalised input has norm d^1/2


def test_autocast_keeps_state_and_predictions_in_float32():
    torch.manual_seed(0)
    losses = {}
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        model = Mamba(MambaConfig(d=8, state=4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = sample_chain(sample_kernel(16, 2, 1, generator=generator()), 33, generator(1))
        for _ in range(20):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                log_probs = model(x[:, :-1])
                loss = -log_probs.gather(-1, x[:, 1:, None]).mean()
            assert log_probs.dtype == torch.float32 and loss.isfinite()
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            losses.setdefault(dtype, []).append(loss.item())
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert all(v.dtype == torch.float32 for s in optimizer.state.values() for v in s.values())
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            assert model.prefill(x)[1][0][1].dtype == torch.float32
            assert model.internals(x)["a"][0].dtype == torch.float32
    assert max(abs(a - b) for a, b in zip(*losses.values())) < 0.05


def sequences(S, k, beta=1.0, T=1000, p_switch=None):
    g = generator()
    if p_switch is None:
        x = sample_chain(sample_kernel(3, S, k, beta, g), T, g)
    else:
        x = sample_switching(3, T, S, k, beta, p_switch, g)
    return torch.cat([x, torch.arange(S)[:, None].expand(S, T)])  # and the all-equal ones


@pytest.mark.parametrize("S, beta", [(2, 1.0), (3, 0.5), (7, 1e-3), (2, 100.0)])
def test_theorem_1_is_exact(S, beta):
    x, model = sequences(S, 1), mambazero.laplace_first_order(S, beta)
    assert (model(x).exp() - add_beta(x, S, 1, beta, dtype=torch.float64)).abs().max() < 1e-12
    c = model.config
    assert (c.state, c.d, c.expand, c.window) == (S, 2 * S, 1, 2)
    assert (c.act, c.gate, c.mlp, c.predict) == ("none", False, False, "l1")


@pytest.mark.parametrize("beta", [0.5, 1.0])
@pytest.mark.parametrize("eps", [1e-1, 1e-3, 1e-5])
def test_theorem_4_is_within_epsilon(beta, eps):
    x, model = sequences(2, 1), mambazero.laplace_binary_2d(beta, eps)
    p = add_beta(x, 2, 1, beta, dtype=torch.float64)
    kl = (p * (p.log() - model(x))).sum(-1).max()
    assert kl <= eps and (model.config.d, model.config.state) == (2, 2)
    if beta == 1:
        assert kl <= {1e-1: 1.2e-3, 1e-3: 1.3e-7, 1e-5: 1e-10}[eps]


@pytest.mark.parametrize("S, k, beta", [(2, 1, 1.0), (2, 2, 0.5), (2, 5, 1.0), (3, 1, 1.0), (3, 2, 0.5), (4, 3, 1.0)])
def test_any_order_is_exact(S, k, beta):
    x, model = sequences(S, k), mambazero.laplace_any_order(S, k, beta)
    assert (model(x).exp() - add_beta(x, S, k, beta, dtype=torch.float64)).abs().max() < 1e-10
    if S == 2:
        assert model.config.state == 2**k and model.config.window == k + 1 and model.config.heads == 1


@pytest.mark.parametrize("S, beta, p", [(2, 1.0, 0.01), (4, 0.5, 0.2), (2, 1.0, 0.0)])
def test_switching_model_is_exact_and_forgets_only_at_a_switch(S, beta, p):
    x, model = sequences(S, 1, beta, p_switch=max(p, 0.02)), mambazero.laplace_switching(S, beta, p)
    best = add_beta(x, S, 1, beta, p_switch=p, dtype=torch.float64)
    assert (model(x).exp() - best).abs().max() < 1e-12
    a = model.internals(x)["a"][0][..., 0]
    assert (a[x == S] == 0).all() and (a[x < S] == 1).all()


def test_exact_models_are_ordinary_ones():
    x = sequences(3, 2, T=40)
    model = mambazero.laplace_any_order(3, 2, 1.0)
    state = model.init_state(len(x))
    out = []
    for t in range(40):
        log_probs, state = model.step(x[:, t], state)
        out.append(log_probs)
    assert (torch.stack(out, 1) - model(x)).abs().max() < 1e-9
    copy = Mamba(MambaConfig(**vars(model.config))).double()
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy(x), model(x))


def test_why_the_window_must_exceed_the_order():
    """w = 1 and a_t = 1: two sequences leave the same state, yet add-1 tells them apart."""
    x = torch.tensor([[0, 1, 0, 1, 0, 1], [0, 0, 0, 1, 1, 1]])
    model = random_model(vocab=2, window=1, decay=False)
    _, states = model.prefill(x)
    assert torch.allclose(states[0][1][0], states[0][1][1])
    assert torch.allclose(add_beta(x, 2, 1)[:, -1, 1], torch.tensor([0.25, 0.75]))


def test_constructions_reject_bad_input():
    for call in (lambda: mambazero.laplace_first_order(1, 1.0), lambda: mambazero.laplace_first_order(2, 0.0),
                 lambda: mambazero.laplace_binary_2d(1.0, 0.0), lambda: mambazero.laplace_any_order(2, 0, 1.0),
                 lambda: mambazero.laplace_any_order(9, 8, 1.0), lambda: mambazero.laplace_switching(2, 1.0, 1.0)):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(ValueError, match="2\\^53"):
        mambazero.laplace_any_order(10, 4, 1.0, length=10**8)


# ----------------------------------------------------------------------------------------------------------------------
# transformer.py


def random_transformer(seed=0, std=0.3, **fields):
    """Float64, all parameters random, so that nothing is hidden by a zero bias or a small initial value."""
    torch.manual_seed(seed)
    model = Transformer(TransformerConfig(**dict(vocab=3, d=6, heads=2, layers=2, block=12) | fields)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model


ATTENTIONS = [dict(attention=a, conv=conv) for a in ("softmax", "linear") for conv in ("none", "k", "qkv")]


def test_the_transformer_computes_its_equations():
    model, x = random_transformer(d=4, heads=2, layers=1, conv="qv", window=2), tokens(1, 5)
    attention, (first, _, third), mlp = model.attentions[0], model.mlps[0], model.mlps[0]
    norm = lambda u, layer: (u - u.mean()) / (u.var(correction=0) + 1e-5).sqrt() * layer.weight + layer.bias
    u = [model.embed.weight[x[0, t]] + model.position.weight[t] for t in range(5)]
    qkv = [attention.qkv.weight @ norm(z, model.norms[0]) + attention.qkv.bias for z in u]
    conv = lambda i, j, t: (attention.conv_weight[j : j + 4, 1] * qkv[t][i : i + 4] + attention.conv_bias[j : j + 4]
                            + (attention.conv_weight[j : j + 4, 0] * qkv[t - 1][i : i + 4] if t else 0))
    for t in range(5):
        o = []
        for h in (slice(0, 2), slice(2, 4)):
            scores = torch.stack([conv(0, 0, t)[h] @ qkv[s][4:8][h] / math.sqrt(2) for s in range(t + 1)])
            o.append(sum(a * conv(8, 4, s)[h] for s, a in enumerate(scores.softmax(0))))
        r = u[t] + attention.out_proj.weight @ torch.cat(o) + attention.out_proj.bias
        r = r + third.weight @ F.gelu(first.weight @ norm(r, model.norms[1]) + first.bias) + third.bias
        expected = (model.head.weight @ norm(r, model.norms[2])).log_softmax(-1)
        assert (model(x)[0, t] - expected).abs().max() < 1e-12


@pytest.mark.parametrize("attention", [transformer.linear_attention, transformer.linear_attention_quadratic])
def test_linear_attention_is_a_mean(attention):
    v = torch.tensor([1.0, 3.0, 5.0]).view(1, 1, 3, 1)
    zero = torch.zeros(1, 1, 3, 4)
    assert torch.allclose(attention(zero, zero, v).flatten(), torch.tensor([1.0, 2.0, 3.0]))  # of all so far
    q, k = torch.randn(2, 2, 3, 150, 4, generator=generator())
    v = torch.tensor([2.0, -3.0]).expand(2, 3, 150, 2)
    for scale in (1, 30, 1000):  # elu(-30) + 1 rounds to 0 in float32, exp(-1000) is 0
        assert torch.allclose(attention(scale * q, scale * k, v), v, atol=1e-4)
    assert torch.allclose(attention(-1000 * q.abs(), -1000 * k.abs(), v), v, atol=1e-4)


@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 63, 64, 65, 130])
def test_linear_attention_equals_its_quadratic_form(T):
    assert torch.allclose(transformer.phi(torch.linspace(-5, 5, 50)), F.elu(torch.linspace(-5, 5, 50)) + 1)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        inputs = [torch.randn(2, 3, T, 5, dtype=dtype, generator=generator(i)).requires_grad_() for i in range(3)]
        slow = transformer.linear_attention_quadratic(*inputs)
        slow_grads = torch.autograd.grad(slow.square().sum(), inputs)
        for chunk in (1, 4, 64, 1000):
            fast = transformer.linear_attention(*inputs, chunk=chunk)
            assert fast.dtype == dtype and (fast - slow).abs().max() <= tolerance
            for a, b in zip(torch.autograd.grad(fast.square().sum(), inputs), slow_grads):
                assert (a - b).abs().max() <= 10 * tolerance * max(1, b.abs().max())
    assert transformer.linear_attention(*(z.bfloat16() for z in inputs)).dtype == torch.bfloat16


@pytest.mark.parametrize("fields", ATTENTIONS, ids=str)
def test_the_transformer_is_causal_bit_by_bit(fields):
    for double in (True, False):
        model, x = random_transformer(**fields, window=3, block=70), tokens(T=70)
        model = model if double else model.float()
        y = model(x)
        assert y.shape == (2, 70, 3) and (y.exp().sum(-1) - 1).abs().max() < 1e-5
        for t in (0, 1, 9, 63, 64, 69):
            z = x.clone()
            z[:, t] = (z[:, t] + 1) % 3
            changed = model(z)
            assert torch.equal(changed[:, :t], y[:, :t]) and (changed[:, t:] != y[:, t:]).any(-1).all()
            assert (model(x[:, : t + 1])[:, t] - y[:, t]).abs().max() < (1e-12 if double else 1e-4)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_transformer_convolution_window(window):
    weight, bias = torch.randn(5, window, generator=generator()), torch.randn(5, generator=generator(1))
    u = torch.zeros(1, 8, 5)
    u[0, 2] = 1  # an impulse comes out as the kernel, last weight first
    out = transformer.causal_conv(u, weight)[0].T
    assert torch.equal(out, F.pad(weight.flip(1), (2, 6 - window)))
    u = torch.randn(2, 8, 5, generator=generator(2))
    padded = F.pad(u, (0, 0, window - 1, 0))
    other = mambazero.causal_conv(padded, weight, bias)
    assert torch.allclose(transformer.causal_conv(u, weight, bias), other, atol=1e-5)
    for conv in ("q", "kv", "qkv"):
        model = random_transformer(conv=conv, window=window)
        assert model.attentions[0].conv_weight.shape == (6 * len(conv), window)
        model(tokens()).square().sum().backward()
        assert all(p.grad.any() for n, p in model.named_parameters() if "conv_weight" in n)
    assert not any("conv" in n for n, _ in random_transformer(conv="none", window=window).named_parameters())


@pytest.mark.parametrize("fields", ATTENTIONS, ids=str)
def test_block_is_the_longest_sequence_and_generate_goes_beyond(fields):
    model, x = random_transformer(**fields, std=1.0), tokens(T=13)
    assert model(x[:, :12]).shape == (2, 12, 3)
    with pytest.raises(ValueError, match="13 .* 12"):
        model(x)
    with pytest.raises(ValueError, match="0"):
        model(x[:, :0])
    out = model.generate(x[:, :5], 20, generator=generator())
    assert out.shape == (2, 25) and torch.equal(out[:, :5], x[:, :5])
    hot = [model.generate(x[:, :5], 20, 100.0, generator(seed)) for seed in (0, 0, 1)]  # nearly uniform
    assert torch.equal(hot[0], hot[1]) and not torch.equal(hot[0], hot[2])
    greedy = model.generate(x, 6, temperature=0)  # the prompt is beyond block already
    for t in range(13, 19):
        assert torch.equal(greedy[:, t], model(greedy[:, t - 12 : t])[:, -1].argmax(-1))
    assert torch.equal(model.generate(x, 0), x)
    for bad in (dict(n=-1), dict(n=1, temperature=-1.0), dict(n=1, temperature=math.inf)):
        with pytest.raises(ValueError):
            model.generate(x, **bad)


def test_sampled_tokens_follow_the_predictions():
    model, x = random_transformer(std=1.0), tokens(1, 4).expand(20_000, -1)
    for temperature in (1.0, 0.5):
        drawn = F.one_hot(model.generate(x, 1, temperature, generator())[:, -1], 3).double().mean(0)
        assert (drawn - (model(x[:1])[0, -1] / temperature).softmax(-1)).abs().max() < 0.02


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_dropout_only_in_training(attention):
    model, x = random_transformer(dropout=0.5, attention=attention), tokens()
    model.eval()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))
    block = model.attentions[0]  # without the model's own dropout: that of the attention weights
    u = torch.randn(2, 9, 6, dtype=torch.float64)
    assert torch.equal(block(u), block(u)) == (attention == "linear")
    block.eval()
    assert torch.equal(block(u), block(u))


@pytest.mark.parametrize("fields", ATTENTIONS, ids=str)
def test_transformer_predictions_are_float32_under_autocast(fields):
    torch.manual_seed(0)
    model, x = Transformer(TransformerConfig(vocab=3, block=100, **fields)), tokens(T=100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(x)
        low.square().mean().backward()
    assert low.dtype == model(x).dtype == torch.float32 and model.double()(x).dtype == torch.float64
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert (low - model(x)).abs().max() < 0.05 and not torch.equal(low.double(), model(x))


def test_linear_attention_sums_in_float32_under_autocast():
    q, k, v = torch.randn(3, 1, 1, 1000, 4, generator=generator()).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = transformer.linear_attention(q, k, v)
    exact = transformer.linear_attention_quadratic(q.double(), k.double(), v.double())
    assert (low - exact).abs().max() < 2**-8 * exact.abs().max()  # no more than the last rounding


def test_transformer_parameters_counted_by_hand():
    small = dict(vocab=3, d=4, layers=2, block=5)
    count = lambda **f: sum(p.numel() for p in Transformer(TransformerConfig(**small, **f)).parameters())
    norm, qkv, out, mlp = 4 + 4, 4 * 12 + 12, 4 * 4 + 4, 4 * 16 + 16 + 16 * 4 + 4
    assert count() == 3 * 4 + 5 * 4 + 2 * (2 * norm + qkv + out + mlp) + norm + 4 * 3 == 540
    assert count(heads=2) == 540 and count(attention="linear") == 540 and count(tie=True) == 540 - 12
    assert count(bias=False) == 540 - 2 * (2 * 4 + 12 + 4 + 16 + 4) - 4
    assert count(conv="qkv", window=3) == 540 + 2 * (12 * 3 + 12) and count(conv="k") == 540 + 2 * (4 * 2 + 4)
    assert count(conv="k", bias=False) == count(bias=False) + 2 * 4 * 2


def test_transformer_tied_head_is_one_tensor():
    model = Transformer(TransformerConfig(tie=True, vocab=3, block=12))
    for step in (lambda: None, lambda: model.load_state_dict(model.state_dict()), model.double, model.float):
        step()
        assert model.head.weight is model.embed.weight
        assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    state = {n: p + 1 for n, p in model.state_dict().items()}
    model.load_state_dict(state)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert torch.equal(model.embed.weight, state["head.weight"])
    optimizer = train.make_optimizer(model, types.SimpleNamespace(weight_decay=0.1, lr=1e-3))
    listed = [p.data_ptr() for group in optimizer.param_groups for p in group["params"]]
    assert len(listed) == len(set(listed)) and listed.count(model.embed.weight.data_ptr()) == 1
    untied = Transformer(TransformerConfig())
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()


def test_transformer_initial_values():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab=200, d=64, layers=8, conv="qkv", window=4, block=100))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        elif "norms" in name:
            assert (p == 1).all()
        elif "conv_weight" in name:
            assert 0.4 < p.abs().max() <= 0.5
        else:
            std = 0.02 / 4 if "out_proj" in name or name.endswith("2.weight") else 0.02
            assert abs(p.std() / std - 1) < 0.05, name


def test_transformer_rejects_bad_configurations():
    with pytest.raises(ValueError, match="6, got 4"):
        TransformerConfig(d=6, heads=4)
    for bad in (dict(layers=0), dict(window=0), dict(block=0), dict(vocab=0), dict(d=0), dict(heads=0), dict(inputs=0),
                dict(d=1.5), dict(conv="xbc"), dict(conv=""), dict(attention="relu"), dict(predict="l1"),
                dict(dropout=1.0), dict(dropout=-0.1), dict(inputs=4, tie=True)):
        with pytest.raises(ValueError, match=next(iter(bad)) if "tie" not in bad else "tie"):
            TransformerConfig(**bad)


def test_transformer_on_real_inputs_and_values():
    model = random_transformer(inputs=4, vocab=1, predict="value")
    u = torch.randn(2, 5, 4, dtype=torch.float64)
    assert model(u).shape == (2, 5, 1) and model(u).dtype == torch.float64 and (model(u) != model(2 * u)).all()
    assert Transformer(TransformerConfig(inputs=4, vocab=1, predict="value"))(u.float()).dtype == torch.float32
    logits = random_transformer(predict="value")(tokens())
    assert torch.allclose(logits.log_softmax(-1), random_transformer()(tokens()))


# ----------------------------------------------------------------------------------------------------------------------
# train.py

TINY = ["--steps", "10", "--batch", "4", "--length", "16", "--eval-every", "5"]


def run(*argv):
    return train.main([str(a) for a in argv])


def losses(out):
    return [json.loads(text) for text in (Path(out) / "log.jsonl").read_text().splitlines()]


def weights(out):
    return torch.load(Path(out) / "model.pt", weights_only=True)["model"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def without_time(log):
    return [{k: v for k, v in entry.items() if k != "ms_per_step"} for entry in log]


@pytest.fixture(autouse=True)
def small_held_out_set_and_own_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.MarkovData, "held_out", 8)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_run_prints_and_writes_what_it_says(capsys):
    metrics = run(*TINY, "--model", "mambazero", "--order", "1")
    out = capsys.readouterr().out.splitlines()
    steps = [text for text in out if text.startswith("step ")]
    assert [text.split(" |")[0] for text in steps] == ["step 0/10", "step 5/10", "step 10/10"]
    parts = dict(p.split(" ") for p in steps[-1].split(" | ")[1:5])
    assert float(parts["gap"]) == pytest.approx(float(parts["val"]) - float(parts["bayes"]), abs=2e-4)
    assert out[-1].startswith("done") and f"gap {metrics['gap']:+.4f}" in out[-1]
    assert not any("gap" in text for text in out[out.index(steps[-1]) + 1 : -1])
    folder = Path("out/markov-mambazero-1-0")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "log.jsonl", "model.pt"]
    assert [set(entry) for entry in losses(folder)] == [{"step", "train", "val", "bayes", "gap", "ms_per_step"}] * 3
    config = json.loads((folder / "config.json").read_text())
    assert config["args"]["order"] == 1 and config["model"]["window"] == 2
    run(*TINY, "--steps", "0")
    assert Path("out/markov-mambazero-1-0-2").is_dir()  # never over an earlier run
    model = train.load_model(folder)
    assert same(model.state_dict(), weights(folder)) and not model.training


def test_val_and_bayes_are_on_the_same_held_out_chains():
    args = train.make_parser().parse_args(TINY)
    data = train.MarkovData(args, torch.device("cpu"))
    exact = mambazero.laplace_first_order(2, 1.0)
    assert abs(data.evaluate(exact)["gap"]) < 1e-6 and data.test.shape == (8, 17)
    assert not any(torch.equal(a, b) for a in data.test for b in data.batch(0))
    a, b = data.batch(3).clone(), (data.batch(200), data.batch(3))[1]
    assert torch.equal(a, b) and not torch.equal(a, data.batch(4))


def test_more_evaluations_change_nothing():
    run(*TINY, "--out", "a")
    run(*TINY, "--eval-every", "2", "--out", "b")
    assert same(weights("a"), weights("b"))
    run(*TINY, "--seed", "1", "--out", "c")
    assert not same(weights("a"), weights("c"))
    run(*TINY, "--out", "d")
    assert without_time(losses("a")) == without_time(losses("d"))


def test_resume_is_a_continuation(monkeypatch, capsys):
    run(*TINY, "--model", "mamba", "--dropout", "0.1", "--out", "whole")
    rate = train.learning_rate

    def interrupt(step, args):
        if step == 7:
            raise KeyboardInterrupt
        return rate(step, args)

    monkeypatch.setattr(train, "learning_rate", interrupt)
    with pytest.raises(SystemExit) as stop:
        run(*TINY, "--model", "mamba", "--dropout", "0.1", "--out", "parts")
    assert stop.value.code == 130 and "--resume --out parts" in capsys.readouterr().err
    assert [entry["step"] for entry in losses("parts")] == [0, 5]
    monkeypatch.setattr(train, "learning_rate", rate)
    run("--resume", "--out", "parts")
    assert same(weights("whole"), weights("parts"))
    assert without_time(losses("whole")) == without_time(losses("parts"))
    config = json.loads(Path("parts/config.json").read_text())
    del config["args"]["noise"], config["model"]["groups"]  # as in a run made before there were such flags
    Path("parts/config.json").write_text(json.dumps(config))
    run("--resume", "--out", "parts", "--steps", "12")
    assert "resumed at step 10; the schedule now ends at step 12" in capsys.readouterr().out
    assert [entry["step"] for entry in losses("parts")] == [0, 5, 10, 12]


def test_eval_only_evaluates(capsys):
    metrics = run(*TINY, "--out", "a")
    before = {p.name: p.read_bytes() for p in Path("a").iterdir()}
    capsys.readouterr()
    assert run("--eval", "--out", "a")["gap"] == pytest.approx(metrics["gap"], abs=1e-6)
    assert capsys.readouterr().out.splitlines()[-1].startswith("done")
    for other in (["--length", "40"], ["--prior", "0.5", "1"], ["--order", "3"]):
        assert run("--eval", "--out", "a", *other)["bayes"] != metrics["bayes"]
    assert before == {p.name: p.read_bytes() for p in Path("a").iterdir()}


def test_damaged_checkpoints_are_reported(capsys):
    run(*TINY, "--out", "a")
    data = Path("a/model.pt").read_bytes()
    Path("a/model.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(SystemExit) as stop:
        run("--resume", "--out", "a", "--steps", "20")
    assert stop.value.code == 2 and "damaged" in capsys.readouterr().err
    assert len(Path("a/model.pt").read_bytes()) == len(data) // 2


def test_a_torn_log_and_a_run_without_checkpoint_are_no_dead_ends(capsys):
    run(*TINY, "--out", "a")
    with open("a/log.jsonl", "a") as f:
        f.write('{"step": 10, "tra\\n[1]\\n\\n')
    run("--resume", "--out", "a", "--steps", "15")
    assert [entry["step"] for entry in losses("a")] == [0, 5, 10, 15]
    Path("b").mkdir()
    Path("b/config.json").write_text("{}")  # stopped before its first checkpoint
    run(*TINY, "--out", "b")
    for damage in ("[]", "{}", json.dumps(dict(args=dict(model="gpt7"), model={})), "not json"):
        Path("b/config.json").write_text(damage)
        with pytest.raises(SystemExit) as stop:
            run("--resume", "--out", "b", "--steps", "20")
        assert stop.value.code == 2 and "damaged" in capsys.readouterr().err
        with pytest.raises(ValueError, match="damaged"):
            train.load_model("b")


def test_a_crash_while_saving_keeps_the_last_checkpoint(monkeypatch):
    run(*TINY, "--out", "a")
    before = weights("a")

    def half(obj, path):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError):
        model, scaler = torch.nn.Linear(1, 1), torch.amp.GradScaler("cpu")
        train.save(Path("a"), model, torch.optim.AdamW(model.parameters()), scaler, 11)
    assert same(before, weights("a"))


def test_accumulated_micro_batches_are_one_batch():
    run("--steps", "3", "--length", "16", "--eval-every", "1", "--batch", "32", "--out", "one")
    run("--steps", "3", "--length", "16", "--eval-every", "1", "--batch", "8", "--accumulate", "4", "--out", "four")
    for a, b in zip(losses("one"), losses("four")):
        if a["step"]:  # step 0 shows the first micro-batch
            assert abs(a["train"] - b["train"]) < 1e-5 and abs(a["val"] - b["val"]) < 1e-5
    assert abs(losses("four")[1]["train"] - math.log(2)) < 0.1


def test_only_matrices_decay_and_convolution_biases_are_slow():
    model = Mamba(MambaConfig())
    matrices, vectors, slow = train.make_optimizer(model, train.make_parser().parse_args([])).param_groups
    assert matrices["weight_decay"] > 0 == vectors["weight_decay"] == slow["weight_decay"]
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)] for p in vectors["params"]} == {"blocks.0.delta_bias", "blocks.0.a_log"}
    assert [names[id(p)] for p in slow["params"]] == ["blocks.0.conv_bias"] and slow["scale"] == 0.1 < vectors["scale"]
    assert sum(len(group["params"]) for group in (matrices, vectors, slow)) == len(names)


def test_two_tokens_start_as_opposites():
    embed = Mamba(MambaConfig(**PRESETS["mamba"])).embed
    assert embed.weight.sum(0).abs().max() < 1e-6  # no common part, no dead units
    assert (Mamba(MambaConfig(**PRESETS["mambazero"])).embed.weight > 0).all()  # L1 wants all positive


def test_schedule():
    args = train.make_parser().parse_args(["--steps", "100", "--lr", "1", "--warmup", "0.1"])
    rates = [train.learning_rate(s, args) for s in range(100)]
    assert rates[:2] == [0.1, 0.2] and max(rates) == 1 and rates[-1] < 0.001 and rates[55] == pytest.approx(0.5)


def test_a_loss_that_is_not_finite_stops_the_run(capsys):
    run(*TINY, "--out", "a", "--steps", "5")
    kept = weights("a")
    with pytest.raises(SystemExit) as stop:
        run(*TINY, "--lr", "1e30", "--out", "b", "--model", "mamba")
    assert "not finite at step" in str(stop.value.code) and "b" in str(stop.value.code)
    assert all(entry["step"] == 0 for entry in losses("b")) and all(v.isfinite().all() for v in weights("b").values())
    with pytest.raises(SystemExit):  # diverged in the very last update: seen by the evaluation, not by a training loss
        run(*TINY, "--steps", "1", "--lr", "1e20", "--weight-decay", "1e19", "--out", "c")
    assert [entry["step"] for entry in losses("c")] == [0] and same(kept, weights("a"))


BAD = """--order 0 | --order -1 | --order 1.5 | --states 1 | --beta 0 | --beta nan | --beta -1 | --beta 1e9
--switch 1 | --switch -0.1 | --switch nan | --prior 0.5 0.2 | --prior 0 2 | --prior 0 0.5 --states 3
--prior 0 0.5 --switch 0.1 | --length 1 | --length 2 --order 2 | --steps -1 | --batch 0 | --accumulate 0
--lr 0 | --lr nan | --lr inf | --lr -1 | --clip 0 | --warmup 2 | --warmup nan | --weight-decay nan
--threads 0 | --eval-every 0 | --window 0 | --layers 0 | --heads 0 | --heads 5 | --heads 4 --groups 3
--conv abc | --act gelu | --predict l2 | --dropout 1 | --d 0 | --state -4 | --model gpt7 | --data nothing
--device tpu | --dtype int8 | --dtype float16 | --bogus 1 | --ord 2 | --order 60
--states 1000000 --order 3 | --batch 1000000000000 | --length 100000000000 | --d 1000000 | --resume | --eval
--resume --eval --out x | --predict value | --model transformer --block 8 | --model transformer --state 4
--model transformer --attention no | --model transformer --heads 3 | --model mamba --attention linear
--resume --out nowhere | --eval --out nowhere | --order | stray""".replace("\n", " | ").split(" | ")


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_one_line_and_exit_code_2(command, capsys):
    before = sorted(Path(".").rglob("*"))
    with pytest.raises(SystemExit) as stop:
        run(*command.split())
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and err.startswith("train.py: error: "), err
    assert sorted(Path(".").rglob("*")) == before


@pytest.mark.parametrize("extra", ["", "--attention linear --conv qkv", "--no-conv",
                                   "--block 40 --tie --no-bias --layers 2"])
def test_the_transformer_trains_and_comes_back(extra, capsys):
    metrics = run("--model", "transformer", "--steps", 2, "--batch", 2, "--length", 16, "--out", "a", *extra.split())
    model = train.load_model("a")
    assert isinstance(model, Transformer) and model.config.block == (40 if "block" in extra else 16)
    assert math.isfinite(metrics["gap"]) and model.config.attention == ("linear" if "linear" in extra else "softmax")
    assert run("--eval", "--out", "a")["val"] == metrics["val"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:  # positions that were never learned
        run("--eval", "--out", "a", "--length", 41)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "41" in err and str(model.config.block) in err


def test_runs_are_not_overwritten_or_changed(capsys):
    run(*TINY, "--out", "a")
    before = {p.name: p.read_bytes() for p in Path("a").iterdir()}
    for command in (["--out", "a"], ["--resume", "--out", "a"],
                    ["--resume", "--out", "a", "--steps", "20", "--lr", "1"],
                    ["--resume", "--out", "a", "--steps", "20", "--order", "2"], ["--eval", "--out", "a", "--d", "8"],
                    ["--eval", "--out", "a", "--states", "3"],
                    ["--resume", "--out", "a", "--steps", "20", "--gate"], ["--out", "a/model.pt"]):
        with pytest.raises(SystemExit) as stop:
            run(*command)
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    assert before == {p.name: p.read_bytes() for p in Path("a").iterdir()}


def test_flags_reach_the_model(capsys):
    run(*TINY, *"--steps 0 --model mamba --no-gate --no-conv --act silu --no-decay --layers 2 --out a".split())
    model = train.load_model("a")
    c = model.config
    assert (c.gate, c.conv, c.act, c.decay, c.layers) == (False, "none", "silu", False, 2)
    run(*TINY, "--steps", "0", "--order", "5", "--model", "mamba", "--out", "b")
    assert (train.load_model("b").config.window, train.load_model("b").config.state) == (6, 128)
    run(*TINY, "--steps", "1", "--switch", "0.1", "--states", "3", "--out", "c")
    assert train.load_model("c").config.vocab == 4
    run(*TINY, "--steps", "1", "--prior", "0", "0.5", "--out", "d")
    run(*TINY, "--steps", "2", "--dtype", "bfloat16", "--out", "e")
    help_text = train.make_parser().format_help()
    assert "LayerNorm" in help_text and "--no-conv" in help_text


@pytest.mark.parametrize("extra", [{}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_as_a_program_from_another_folder(extra, tmp_path):
    env = {**os.environ, **extra}
    command = [sys.executable, str(HERE / "train.py"), *TINY, "--steps", "2", "--out", "with space"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.splitlines()[-1].startswith("done"), done.stderr
    bad = subprocess.run([*command[:2], "--order", "0"], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1


def test_compile_without_a_compiler_trains_eagerly(tmp_path):
    run(*TINY, "--out", "eager")
    env = {**os.environ, "CXX": "/nonexistent", "PATH": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(HERE / "train.py"), *TINY, "--compile", "--out", "compiled"],
                          capture_output=True, text=True, env=env)
    assert done.returncode == 0 and done.stderr.count("runs eagerly") == 1, done.stderr
    assert same(weights("eager"), weights("compiled"))


def test_checkpoints_of_compiled_runs_are_plain(monkeypatch):
    eager = lambda m: torch._dynamo.OptimizedModule(m, torch._dynamo.optimize("eager"))
    monkeypatch.setattr(train.torch, "compile", eager)
    torch._dynamo.reset()
    run(*TINY, "--steps", "2", "--compile", "--out", "a")
    assert not any("_orig_mod" in k for k in weights("a"))
    x = tokens(V=2)
    plain = Mamba(train.load_model("a").config)
    plain.load_state_dict(weights("a"), strict=True)
    assert torch.equal(plain(x), train.load_model("a")(x))


# ----------------------------------------------------------------------------------------------------------------------
# bench.py


def test_bench_compares_the_same_recurrence():
    args = bench.inputs((2, 64, 4, 8, 8), "cpu")
    for chunk in (16, 64):
        assert close(bench.listing_1(*args, chunk), scan_chunked(*args), 1e-4)


def test_bench_writes_its_table(capsys, tmp_path):
    bench.main(["decode", "--out", str(tmp_path / "b.json")])
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [r["name"] for r in rows if r["section"] == "decode"] == ["batch 1", "batch 64"]
    for wrong in (["nothing"], ["--threads", "0"]):
        with pytest.raises(SystemExit) as stop:
            bench.main(wrong)
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------------------
# The house


def test_every_module_needs_only_the_four_packages():
    allowed = {"torch", "numpy", "tqdm", "pytest"} | {p.stem for p in HERE.glob("*.py")} | set(sys.stdlib_module_names)
    for path in HERE.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10)).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path.name


def test_no_float64_on_the_default_path(monkeypatch):
    created = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            created.extend(func for o in (out if isinstance(out, (tuple, list)) else [out])
                           if isinstance(o, torch.Tensor) and o.dtype == torch.float64)
            return out

    with Watch():
        x = sample_chain(sample_kernel(4, 2, 1, generator=generator()), 20, generator(1))
        bayes_loss(x, 2, 1)
        sample_switching(4, 20, 2, 1, generator=generator())
        Mamba(MambaConfig(**PRESETS["mambazero"]))(x).sum().backward()
    assert not created, created


README = (HERE / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.S | re.M)  # without a language: output, or a GPU is needed


def readme_commands(script):
    """The words of every command of the README for this script, in a bash block or between backticks, each once."""
    commands = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
    commands += re.findall(r"`(python [^`]+)`", re.sub(r"```.*?```", "", README, flags=re.S))
    words = dict.fromkeys(tuple(command.split("#")[0].split()) for command in commands)
    return [list(w[2:]) for w in words if w[:2] == ("python", script)]


@pytest.mark.parametrize("command", readme_commands("train.py"), ids=" ".join)
def test_readme_training_commands(command, tmp_path):
    if "wikitext" in command:
        corpus()
    if "--help" in command:
        with pytest.raises(SystemExit, match="0"):
            run(*command)
    elif "cuda" in command:
        train.make_parser().parse_args(command)
    elif "--resume" in command or "--eval" in command:
        run(*TINY, "--out", command[command.index("--out") + 1])
        run(*command, *(["--steps", "12"] if "--resume" in command else []))
    else:
        run(*command, "--steps", "2", "--batch", "2", "--length", "16", "--eval-every", "1")


@pytest.mark.parametrize("command", readme_commands("figures.py"), ids=" ".join)
def test_readme_figure_commands(command, capsys):
    shutil.copytree(HERE / "results", "results")
    if "--run" in command:  # what is committed is up to date: nothing is left to launch, so this measures and draws
        assert all(figures.up_to_date(name, figures.make_parser().parse_args(command)) for name in command[:-1])
    names = ["fig1a" if word == "ID" else word for word in command]
    figures.main(names)
    out = capsys.readouterr().out
    assert all(name in out for name in names if not name.startswith("--"))


def test_readme_commands_for_a_gpu_name_flags_that_exist():
    text = "\n".join(text for language, text in BLOCKS if not language)
    more = re.search(r'^L="(.*)"$', text, re.M)[1]
    full = [command.replace("$L", more) for command in re.findall(r"(train\.py .*?)(?:  +#.*)?$", text, re.M)]
    assert len(full) >= 5
    for command in full:
        train.check(train.make_parser().parse_args(command.replace("--device cuda", "").split()[1:]))


def test_readme_other_commands(monkeypatch, capsys, tmp_path):
    Path("text.txt").write_text(PROSE * 40)
    monkeypatch.setattr(wikitext, "fetch", lambda folder: Path("text.txt"))
    [command] = readme_commands("wikitext.py")
    wikitext.main(command)
    assert "next: python train.py --data wikitext" in capsys.readouterr().out
    assert readme_commands("bench.py") == [[]]
    tests = Path(__file__).read_text(encoding="utf-8")
    for _, file, *flags in readme_commands("-m") or pytest.fail("no test command"):
        assert file == "test_all.py" and set(flags[::2]) <= {"-m", "-k"}
        assert all(re.search(rf"(def test_\w*|mark\.){name}", tests) for name in flags[1::2])
    demos = [script for script in readme_scripts() if readme_commands(script) == [[]]]
    assert set(demos) == {"markov.py", "laplace.py", "ssm.py", "mambazero.py", "transformer.py", "regression.py",
                          "single_index.py", "bench.py", "wikitext.py"}


def readme_scripts():
    """The files of the README's reading order, and how many lines it gives them."""
    return {name: int(lines.replace(",", "")) for name, lines in
            re.findall(r"^\| \[(\w+\.py)\].*?\| ([\d,]+) lines", README, re.M)}


def test_readme_reading_order_has_the_files_and_their_length():
    assert len(readme_scripts()) >= 12
    for name, lines in readme_scripts().items():
        assert lines == pytest.approx(len((HERE / name).read_text(encoding="utf-8").splitlines()), rel=0.1), name


def readme_places():
    """(what a row of the README's last two maps says, file, names in it)."""
    for row in re.findall(r"^\| (.*`\w+\.py: .*) \|$", README, re.M):
        about, places = row.split(" | ", 1)
        for file, names in re.findall(r"`(\w+\.py): ([\w, ]+)`", places):
            yield about, file, names.split(", ")


def test_readme_maps_name_what_exists():
    assert len(list(readme_places())) >= 24
    for about, file, names in readme_places():
        module = importlib.import_module(file[:-3])
        assert all(hasattr(module, name) for name in names), (file, names)


def test_readme_equations_stand_where_the_map_says():
    table = README.split("| in the paper | here |")[1].split("##")[0]
    rows = [(about.split(", "), file) for about, file, _ in readme_places() if f"| {about} |" in table]
    assert len(rows) >= 14
    for names, file in rows:
        code = (HERE / file).read_text(encoding="utf-8")
        for name in names:
            assert re.search(rf"(#|\"\"\").*\b{name}\b", code, re.I), (name, file)


@pytest.mark.parametrize("script", ["markov.py", "laplace.py", "ssm.py", "mambazero.py", "transformer.py",
                                    "regression.py", "single_index.py"])
def test_demos_run_quickly_and_end_well(script):
    done = subprocess.run([sys.executable, str(HERE / script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout.splitlines()) >= 8


# ----------------------------------------------------------------------------------------------------------------------
# Training claims, minutes each


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_mambazero_always_learns_add_one(seed, monkeypatch):
    monkeypatch.setattr(train.MarkovData, "held_out", 1024)
    assert run("--model", "mambazero", "--order", 1, "--seed", seed)["gap"] <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mamba", "mambazero"])
def test_without_convolution_it_does_not(model, monkeypatch):
    monkeypatch.setattr(train.MarkovData, "held_out", 1024)
    assert run("--model", model, "--no-conv", "--steps", 500)["gap"] > 0.03


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_mamba_learns_every_order(order, monkeypatch):
    monkeypatch.setattr(train.MarkovData, "held_out", 1024)
    assert run("--model", "mamba", "--order", order, *"--length 128 --batch 16 --steps 4000".split())["gap"] <= 2e-3


# ----------------------------------------------------------------------------------------------------------------------
# figures.py


def finished(model, flags=""):
    """A run as figures.py hands it to its measurements."""
    args = figures.parse(flags)
    log = [dict(step=step, gap=0.1, bayes=0.5, ms_per_step=1.0) | dict.fromkeys(
        ("token_perplexity", "word_perplexity", "bits_per_byte"), 3.0) for step in (0, 5, 10)]
    return types.SimpleNamespace(model=model, args=args, log=log, folder="")


def test_readout_finds_theorem_1_and_tells_predecessor_counts_apart():
    model = mambazero.laplace_first_order(2, 0.7)
    found = figures.readout_of(model)
    assert found == dict(on=1.0, off=0.0, beta=[pytest.approx(0.7)] * 2, distance=0.0, a=1.0)
    model.head.weight *= 3  # L1 does not see the scale of the logits
    again = figures.readout_of(model)
    assert again["beta"] == pytest.approx([0.7] * 2) and again["distance"] < 1e-12
    block = model.blocks[0]
    block.conv_weight[: block.E + 2] = block.conv_weight[: block.E + 2].flip(1)  # b of this token, x~ of the one before
    other = figures.readout_of(model)
    assert other["off"] == other["on"] == 0.5 and other["distance"] > 0.5


@torch.no_grad()
def test_gap_by_position_is_the_gap():
    torch.manual_seed(0)
    run_ = finished(Mamba(MambaConfig(**PRESETS["mamba"])), "--length 64")
    x = figures.chains(run_, 2000, 65)
    ours, best = figures.probabilities(run_, x)
    gap = -ours[:, :-1].gather(-1, x[:, 1:, None]).log().squeeze(-1) - bayes_loss(x, 2, 1)
    assert figures.kl(ours, best)[:, :-1].mean().item() == pytest.approx(gap.mean().item(), abs=5e-3)
    exact = figures.by_position(finished(mambazero.laplace_first_order(2, 1.0), "--length 16"))
    assert max(exact["gap"]) == pytest.approx(1e-6) and exact["T"][-1] == 1024


@torch.no_grad()
def test_measurements_of_the_exact_models():
    run_ = finished(mambazero.laplace_first_order(2, 1.0), "--length 50")
    prior = figures.other_prior(run_)
    assert max(prior["old"]) < 1e-9 and prior["new"] == pytest.approx(prior["between"], abs=1e-6)
    assert prior["between"][0] > 0.05 and max(figures.hold_out(run_)["mean"]) < 1e-6
    assert figures.outcome(run_)["distance"] < 1e-6 and figures.outcome(run_)["share"] == 0.2
    run_ = finished(mambazero.laplace_switching(2, 1.0, 0.05), "--switch 0.05")
    found = figures.switching(run_)
    assert found["at"] == 0 and found["elsewhere"] == 1 and abs(found["gap"]) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 4])
def test_quantised_states_obey_theorem_2(k):
    found = figures.quantised(finished(mambazero.laplace_any_order(2, k, 1.0), f"--order {k}"))
    assert found["eps"][0] > 0.03 and found["eps"][-1] < 2e-3
    for counts, whole, bound in zip(found["counts"], found["whole"], found["bound"]):
        assert bound <= counts < whole


def test_runs_have_the_defaults_of_their_task_and_untrained_ones_their_seeds():
    assert (figures.parse("--data linear").steps, figures.parse("--data single-index").length) == (2000, 64)
    assert figures.parse("--order 2").steps == 1000 and figures.parse("untrained --data linear --length 7").length == 7
    run_ = figures.finished_run("untrained --data linear", 3)
    assert run_.args.seed == 3 and run_.args.data == "linear"
    a = types.SimpleNamespace(flags="", seeds=None)
    assert {len(row["seeds"]) for row in figures.spec("gamma", a)} == {5}


@torch.no_grad()
def test_measurements_of_linear_regression_on_layers_set_by_hand(monkeypatch):
    monkeypatch.setattr(regression.LinearData, "held_out", 4096)
    found = figures.along_context(finished(online_gd(4, 0.02, 0.01).float(), "--data linear"))
    assert found["model"] == pytest.approx(found["formula"], rel=0.08) and found["k"][-1] == 160
    assert found["one step of GD"] == pytest.approx(found["best weights"], rel=0.08)  # a loss by k has an error of 2%
    assert all(best < own for best, own in zip(found["best weights"], found["formula"]))
    drift = finished(None, "--data linear --drift 0.95")
    losses_ = {}
    for a in (0.859, 0.99):
        drift.model = online_gd(4, 0.0919, 1 - a).float()
        losses_[a] = (found := figures.forgetting(drift))["loss"]
        assert found["a"] == pytest.approx(a) and found["best"] == pytest.approx(0.859)
    assert losses_[0.859] == pytest.approx(found["geometric"], rel=0.02) and losses_[0.99] > 1.2 * found["geometric"]
    r, R = regression.drift_moments(50, 0.95)
    scales = torch.linspace(0, 0.05, 501)
    best = min(loss_of_weights(s * torch.ones(50).double(), 4, drift=0.95) for s in scales)
    assert found["uniform"] == pytest.approx(best, rel=1e-4) and found["uniform"] > 1.2 * found["geometric"]
    steps = figures.population_descent(finished(None, figures.DESCENT.format(3, 10, 0.02)))
    assert steps["ratio"] == pytest.approx(1, abs=0.01)
    assert steps["gap"][-1] == pytest.approx(steps["line"][-1], rel=0.2)
    assert steps["gap"][0] > 0.1 and steps["gap"][-1] < 1e-9 and steps["step"][-1] == 1000


@torch.no_grad()
def test_measurements_of_single_index_targets(monkeypatch):
    gate, none = (figures.first_step(finished(None, figures.STEP.format(10) + f" --mixer {mixer}"))
                  for mixer in ("mamba", "linear"))
    assert gate["ratio"] > 10 and gate["found"] and none["ratio"] < 7 and not none["found"]
    assert len(gate["i"]) == len(gate["size"]) == 16 and max(gate["size"]) == 1 and min(gate["size"][:4]) > 0.5
    monkeypatch.setattr(figures, "PAIRS", (8, 40))
    model = types.SimpleNamespace(read=lambda x, y, xq: xq[..., 0] + y[:, :1])  # looks at what all widths share
    narrow, wide = (figures.against_kernels(finished(model, f"--data single-index --dim {d} --support 2"))
                    for d in (8, 24))
    for name in ("zero", "model", "kernel in the subspace", "difference"):
        assert narrow[name] == wide[name]  # the same prompts
    assert narrow["kernel ridge"] != wide["kernel ridge"]
    assert narrow["kernel in the subspace"][1] < 0.5 * wide["kernel ridge"][1]
    for model, kernel, difference in zip(wide["model"], wide["kernel in the subspace"], wide["difference"]):
        assert difference == pytest.approx(model - kernel, abs=1e-5) and difference > 0.5


def test_every_figure_names_runs_that_train_accepts():
    paper = "fig1a fig1b fig3a fig3b fig4 fig5a fig5b fig6 fig7 fig8 fig9 fig10 fig11 fig12 fig13"
    tables = "table1 table2 table3 table4"
    ours = "rates orders dynamics length theorem2 prior context drift descent gamma kernels ladder"
    assert {*paper.split(), *tables.split(), *ours.split()} <= set(figures.FIGURES)
    markov = dict(vocab=2, window=2, d=16, state=16, block=512)
    for flags in {flags for _, _, runs in figures.RUNS.values() for flags in runs.values()}:
        args = figures.parse(flags)
        train.check(args)
        if flags.startswith("--"):
            fields = markov if args.data in ("markov", "wikitext") else dict(vocab=1, inputs=args.dim + 1)
            train.make_model(args, types.SimpleNamespace(fields=fields))


def test_tables_of_language_models_compare_seed_by_seed():
    row = lambda line, x, *values: dict(line=line, x=x, values=[dict(token_perplexity=v) for v in values])
    more = figures.table1([row("Mamba", 0, 30.0, 44.0), row("Mamba", 1, 25.0, 40.0)])[1]["lines"]
    assert more["Mamba"][1][:, 0] == pytest.approx([20, 10]) and more["Mamba"][0] == [1]
    more = figures.table4([row("Mamba", 0, 25.0, 40.0), row("no SiLU", 1, 20.0, 44.0)])[1]["lines"]
    assert more["no SiLU"][1][:, 0] == pytest.approx([-20, 10]) and not more["Mamba"][1].any()


def test_every_figure_draws_what_it_prints(monkeypatch, capsys, tmp_path):
    models = {V: Mamba(MambaConfig(**PRESETS["mambazero"], vocab=V)) for V in (2, 3, 4, 6, 8)}

    def finished_run(flags, seed):
        run_ = finished(None, f"{flags} --seed {seed}")
        if run_.args.data in ("markov", "wikitext"):
            run_.model = mambazero.laplace_any_order(2, run_.args.order, 1.0) if "exact --order" in flags else \
                models[run_.args.states + (run_.args.switch > 0)]
        else:
            Model, Config, _ = train.find_model(run_.args)
            run_.model = Model(Config(inputs=run_.args.dim + 1))
        return run_

    monkeypatch.setattr(figures, "finished_run", finished_run)
    monkeypatch.setattr(figures, "PAIRS", (1, 3, 5))
    monkeypatch.setattr(train, "load_model", lambda *folder_and_step: models[2])
    figures.main(["--run", "--results", str(tmp_path), "--seeds", "2", "--flags", "--length 12 --accumulate 1"])
    out = capsys.readouterr().out
    for name in figures.FIGURES:
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert f"\n{name}: " in "\n" + out and all(row["line"] in out or name == "fig10" for row in rows
                                                  if name not in ("fig5a", "fig5b", "dynamics"))
        assert (tmp_path / f"{name}.png").exists() == (f"{tmp_path}/{name}.png" in out)
    figures.main(["--list", "--results", str(tmp_path)])
    assert capsys.readouterr().out.count(" runs, 0 minutes on one core") == len(figures.FIGURES)


def test_runs_are_shared_resumed_and_not_repeated(monkeypatch, capsys, tmp_path):
    argv = ["fig5a", "dynamics", "--results", str(tmp_path / "r"), "--seeds", "1",
            "--flags", "--steps 4 --batch 2 --length 16 --eval-every 2"]
    folder = figures.run_folder(figures.KEPT + " " + argv[-1], 0)
    run(*figures.KEPT.split(), *argv[-1].split(), "--steps", 2, "--out", folder)
    config = json.loads((folder / "config.json").read_text())
    config["args"]["steps"] = 4  # as if interrupted half way
    (folder / "config.json").write_text(json.dumps(config))
    figures.main([*argv, "--run"])
    assert [e["step"] for e in losses(folder)] == [0, 2, 4]
    assert sorted(p.name for p in folder.glob("model*")) == ["model-0.pt", "model-2.pt", "model-4.pt", "model.pt"]
    monkeypatch.setattr(figures, "launch", lambda *run_: pytest.fail(f"launched {run_}"))
    (tmp_path / "r/dynamics.json").unlink()
    capsys.readouterr()
    figures.main([*argv, "--run"])
    [row] = json.loads((tmp_path / "r/dynamics.json").read_text())["rows"]
    gaps = [abs(e["gap"]) for e in losses(folder)]
    assert row["seeds"] == [0] and [e["gap"] for e in row["values"][0]] == pytest.approx(gaps, rel=1e-4)
    assert len({e["distance"] for e in row["values"][0]}) == 3  # each checkpoint is its own model
    assert f"gap (1)  0: {gaps[0]:.3g}  2: {gaps[1]:.3g}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["figures.py fig1b", "figures.py --list", "train.py --steps 1 --length 8"])
def test_output_in_ascii_and_into_a_closed_pipe(command):
    words = [sys.executable, str(HERE / command.split()[0]), *command.split()[1:]]
    ascii_only = os.environ | dict(LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="")
    shutil.copytree(HERE / "results", "results")
    pipe = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ascii_only)
    if "fig1b" in command:
        out, err = pipe.communicate()
        assert pipe.returncode == 0 and b"\\xb1" in out and not err, err
    else:
        pipe.stdout.close()
        assert b"Error" not in pipe.stderr.read() and pipe.wait() == 1


def test_figures_without_matplotlib_print_the_numbers(monkeypatch, capsys, tmp_path):
    rows = [dict(line="Mamba", x=k, flags="", seeds=[0, 1], values=[dict(distance=0.1), dict(distance=0.3)], minutes=0)
            for k in (1, 2)]
    (tmp_path / "fig1b.json").write_text(json.dumps(dict(rows=rows)))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    figures.main(["--results", str(tmp_path)])
    out = capsys.readouterr().out
    assert "Mamba (2)  1: 0.2 ± 0.1  2: 0.2 ± 0.1" in out and "not installed" in out
    assert [p.name for p in tmp_path.iterdir()] == ["fig1b.json"]


@pytest.mark.parametrize("argv", [["fig2"], ["fig1a"], ["--seeds", "0"], ["--jobs", "0"], ["--results", ""],
                                  ["fig1a", "--run", "--flags", "--steps 2"], ["fig5a", "--list", "--nonsense"],
                                  ["fig5a", "--run", "--results", "r", "--flags", "--steps x"],
                                  ["fig5a", "--run", "--results", "r", "--seeds", "1", "--flags", "--lr 0"]])
def test_bad_input_to_figures_is_one_line(argv, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        figures.main(argv)
    err = capsys.readouterr().err.rstrip("\n").split("\r")[-1]
    assert stop.value.code == 2 and len([text for text in err.splitlines() if "error" in text]) == 1
    assert not list(tmp_path.iterdir())


def test_the_transformer_has_a_learning_rate_of_its_own(tmp_path):
    for name, flags, expected in [("mamba", [], [2e-2, 0.1]), ("transformer", [], [3e-3, 1.0]),
                                  ("transformer", ["--lr", "0.5", "--clip", "2"], [0.5, 2.0])]:
        out = tmp_path / "-".join([name, *flags])
        run(*TINY, "--steps", "1", "--model", name, *flags, "--out", out)
        args = json.loads((out / "config.json").read_text())["args"]
        assert [args["lr"], args["clip"]] == expected


# wikitext.py


PROSE = " = Heading = \n \n A word , a <unk> and <|endoftext|> .\r\n" \
        "  Two  spaces\tand a tab\u3000東京 は 日本 の 首都\n\nno end"


def corpus(text=PROSE * 40, **flags):
    """A corpus of one text; returns its table."""
    Path("text.txt").write_bytes(text.encode("utf-8"))
    wikitext.main(["--source", "text.txt"] + [str(a) for k, v in flags.items() for a in (f"--{k}", v)])
    return json.loads(Path(flags.get("out", "corpus"), "corpus.json").read_text())


def flat(split="train", out="corpus"):
    table = json.loads(Path(out, "corpus.json").read_text())
    tokenizer = wikitext.make_tokenizer(table["tokenizer"], table["words"])
    return np.fromfile(Path(out, f"{split}.bin"), table["dtype"]), tokenizer


class FakeTiktoken:
    """GPT-2's way of cutting, near enough, with a number for each piece; special tokens raise as tiktoken's do."""

    def __init__(self):
        self.table = []

    def get_encoding(self, name):
        return self

    def encode(self, text):
        assert "<|endoftext|>" not in text
        return self.encode_ordinary(text)

    def encode_ordinary(self, text):
        cut = re.findall(r"'[st]| ?[^\W\d_]+| ?\d+| ?(?:_|[^\s\w])+|\s+(?!\S)|\s+", text)
        self.table += sorted(set(cut) - set(self.table))
        return [self.table.index(piece) for piece in cut]

    def decode(self, ids):
        return "".join(self.table[i] for i in ids)


def fails(main, *argv):
    """The one line of an error that leaves nothing behind."""
    before = {p: p.read_bytes() for p in Path(".").rglob("*") if p.is_file()}, {*Path(".").rglob("*")}
    err = io.StringIO()
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", err)
        main([str(a) for a in argv])
    assert stop.value.code == 2 and err.getvalue().count("\n") == 1, err.getvalue()
    assert before == ({p: p.read_bytes() for p in Path(".").rglob("*") if p.is_file()}, {*Path(".").rglob("*")})
    return err.getvalue()


@pytest.mark.parametrize("name", wikitext.TOKENIZERS)
def test_tokenizers_give_the_text_back(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", FakeTiktoken())
    for text in (PROSE, PROSE.replace("\n", "\r\n"), "", "\n", " <unk><unk>", "<|endoftext|>", "東京"):
        Path("a.txt").write_bytes(text.encode())
        words = wikitext.learn_words(wikitext.Text(Path("a.txt")), 1000)
        tokenizer = wikitext.make_tokenizer(name, words)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids.tolist()) == text and all(0 <= i < tokenizer.vocab for i in ids)
    assert tokenizer.vocab == {"bytes": 256, "words": len(words), "gpt2": 50_304}[name]
    if name == "gpt2":
        assert tokenizer.decode([0, 50_300]) == tokenizer.decode([0])  # a row of the table that stands for nothing


def test_words_are_the_frequent_ones_and_unknown_ones_keep_their_space():
    Path("a.txt").write_text("b a a a b b b c \n")
    assert wikitext.learn_words(wikitext.Text(Path("a.txt")), 5) == ["<unk>", " <unk>", "\n", " a", " b"]
    tokenizer = wikitext.make_tokenizer("words", ["<unk>", " <unk>", "\n", " a", "b"])
    assert tokenizer.encode("zebra a y\nb").tolist() == [0, 3, 1, 2, 4]
    assert tokenizer.decode([0, 3, 1, 2, 4]) == "<unk> a <unk>\nb"


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_no_tokenizer_sees_where_a_text_was_cut(size, monkeypatch):
    monkeypatch.setattr(wikitext, "PIECE", size)
    Path("a.txt").write_bytes(PROSE.encode())
    cut = list(wikitext.pieces(wikitext.Text(Path("a.txt"))))
    assert "".join(cut) == PROSE and (len(cut) > 1 or size == 10_000)
    if size >= 64:  # shorter ones cut words, which a real piece of a MiB does only to a word of a MiB
        for encode in (wikitext.cut_words, lambda text: fake.decode(fake.encode_ordinary(text)),
                       FakeTiktoken().encode_ordinary):
            fake = FakeTiktoken()
            assert [t for piece in cut for t in encode(piece)] == list(encode(PROSE))
    Path("a.txt").write_bytes(b"\xff\xfe caf\xe9 " * 9)  # no UTF-8: bytes come through all the same
    encode = wikitext.make_tokenizer("bytes").encode
    corpus_bytes = b"".join(encode(p).tobytes() for p in wikitext.pieces(wikitext.Text(Path("a.txt"))))
    assert corpus_bytes == b"\xff\xfe caf\xe9 " * 9


@pytest.mark.parametrize("text", ["x" * 5_000_000, "words and more " * 300_000], ids=["one word", "words"])
def test_pieces_are_small(text):
    Path("a.txt").write_text(text)
    sizes = [len(piece) for piece in wikitext.pieces(wikitext.Text(Path("a.txt")))]
    assert sum(sizes) == len(text) and max(sizes) <= 2 * wikitext.PIECE and len(sizes) >= 3


def test_one_text_is_split_nine_to_one_between_lines():
    whole = "".join(f"line {i}\n" for i in range(1000))
    table = corpus(whole)
    train_, tokenizer = flat("train")
    held, _ = flat("validation")
    assert bytes(train_) + bytes(held) == whole.encode() and bytes(train_).endswith(b"\n")
    assert abs(len(train_) / len(whole) - 0.9) < 0.001
    assert table["splits"]["validation"] == dict(tokens=len(held), words=len(bytes(held).split()), bytes=len(held))
    assert [table["splits"][s]["words"] for s in ("train", "validation")] == [1804, 196]  # of 2,000
    corpus("東京 " * 10 + "x")
    assert len(flat("train")[0]) == 63 and len(flat("validation")[0]) == 8  # no line end near
    counts = corpus(PROSE * 50, tokenizer="words", vocab=300)["splits"]["train"]
    ids, tokenizer = flat("train")
    assert tokenizer.decode(ids).encode() == Path("text.txt").read_bytes()[: counts["bytes"]]
    assert len(ids) == counts["tokens"]


LAYOUTS = {"wikitext-103-raw/wiki.{}.raw": "raw", "wikitext-103/wiki.{}.tokens": "tokens", "wiki.{}.raw": "raw"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folders_and_archives_in_wikitexts_layout(layout):
    for kind in ("folder", "zip"):
        with zipfile.ZipFile("a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("__MACOSX/._wiki.train.raw", "\0")
            for split in ("test", "train", "valid"):
                archive.writestr(layout.format(split), f" = {split} = \r\n \n")
        if kind == "folder":
            zipfile.ZipFile("a.zip").extractall("folder")
        wikitext.main(["--source", "a.zip" if kind == "zip" else "folder", "--out", kind])
        for split, name in wikitext.SPLITS.items():
            assert bytes(flat(name, kind)[0]) == f" = {split} = \r\n \n".encode()
    (p := next(Path("folder").rglob("wiki.valid.*"))).unlink()  # what is there decides
    Path(p.parent, "wiki.valid.txt").write_text("no split")
    wikitext.main(["--source", "folder", "--out", "two"])
    assert set(json.loads(Path("two/corpus.json").read_text())["splits"]) == {"train", "test"}
    next(Path("folder").rglob("wiki.test.*")).unlink()
    assert "wiki.valid.raw or wiki.test.raw" in fails(wikitext.main, "--source", "folder", "--out", "three")


def test_splits_by_name():
    for split in ("train", "validation", "test"):
        Path(split).write_text(f"{split} text")
    wikitext.main(["--train", "train", "--test", "test"])
    assert bytes(flat("train")[0]) == b"train text" and bytes(flat("test")[0]) == b"test text"
    args = train.parse(["--data", "wikitext", "--length", "4"])[0]
    assert wikitext.WikitextData(args, torch.device("cpu")).split == "test"
    wikitext.main(["--train", "train", "--validation", "validation", "--test", "test"])
    assert wikitext.WikitextData(args, torch.device("cpu")).split == "validation"


def test_bad_text_is_one_line_and_leaves_nothing():
    Path("page.zip").write_text("<!DOCTYPE html><title>404</title>")
    with zipfile.ZipFile("whole.zip", "w") as archive:
        archive.writestr("wiki.train.raw", "x" * 5000)
    Path("cut.zip").write_bytes(Path("whole.zip").read_bytes()[:1000])
    Path("renamed.txt").write_bytes(Path("whole.zip").read_bytes()[:1000])
    Path("empty").touch()
    Path("one").write_text("x")
    Path("folder").mkdir()
    for argv, expected in {
        "--source page.zip": "web page", "--source cut.zip": "cut short", "--source renamed.txt": "NUL",
        "--source empty": "too short",
        "--source nowhere": "No such file", "--source nowhere.zip": "No such file", "--source one": "too short",
        "--source whole.zip": "wiki.valid.raw", "--source folder": "wiki.train.raw", "--train one": "--test",
        "--test one": "--train",
        "--train one --test empty": "leaves nothing for test", "--train folder --test one": "directory",
        "--source one --train one --test one": "only --source", "--bogus 1": "bogus",
        "--source one --tokenizer bpe": "bytes", "--source one --vocab 2": "--vocab",
        "--source one --vocab 1e9": "--vocab"}.items():
        assert expected in fails(wikitext.main, *argv.split(), "--out", "new"), argv


def test_gpt2_without_tiktoken_or_network(monkeypatch):
    Path("text.txt").write_text(PROSE)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert "pip install tiktoken" in fails(wikitext.main, "--source", "text.txt", "--tokenizer", "gpt2")
    broken = ConnectionError("no route\nto host")
    offline = types.SimpleNamespace(get_encoding=lambda name: (_ for _ in ()).throw(broken))
    monkeypatch.setitem(sys.modules, "tiktoken", offline)
    assert "TIKTOKEN_CACHE_DIR" in fails(wikitext.main, "--source", "text.txt", "--tokenizer", "gpt2")


@pytest.fixture
def mirror(monkeypatch):
    """A server of a small archive under /good, and of all the ways in which a download fails."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wikitext-103-raw/wiki.{split}.raw", f"{split} text " * 500)
    good, seen = buffer.getvalue(), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path)
            body = dict(page=b"<html>moved</html>", same=b"x" * len(good)).get(self.path[1:], good)
            refused = self.path == "/403" or "urllib" in self.headers["User-Agent"]
            self.send_response(403 if refused else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:1000] if self.path == "/short" else body)

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(wikitext, "SIZE", len(good))
    monkeypatch.setattr(wikitext, "AT", f"http://127.0.0.1:{server.server_port}/", raising=False)
    use = lambda *names: monkeypatch.setattr(wikitext, "URLS", [wikitext.AT + name for name in names])
    yield use, seen, good
    server.shutdown()
    server.server_close()


def test_copies_are_tried_in_turn_until_one_is_whole(mirror):
    use, seen, good = mirror
    use("403", "short", "page", "same", "good", "never")
    wikitext.main([])
    assert seen == ["/403", "/short", "/page", "/same", "/good"]
    assert sorted(p.name for p in Path("corpus").iterdir()) == [
        "corpus.json", "test.bin", "train.bin", "validation.bin", "wikitext-103-raw-v1.zip"]
    assert bytes(flat("test")[0]) == b"test text " * 500
    use("403")
    wikitext.main(["--tokenizer", "words"])  # from the archive that is there, without asking again
    assert len(seen) == 5 and flat("test")[1].vocab == 7
    cached = Path("corpus/wikitext-103-raw-v1.zip")
    cached.write_bytes(good[:1000])
    use("good")
    wikitext.main([])
    assert len(seen) == 6 and cached.read_bytes() == good


def test_no_live_copy_is_one_line_that_says_what_to_do(mirror):
    use, seen, good = mirror
    use("403", "short", "page", "same")
    message = fails(wikitext.main)
    assert all(wikitext.AT + name in message for name in ("403", "short", "page", "same"))
    assert "HTTP Error 403" in message and "18 bytes" in message and "corpus/wikitext-103-raw-v1.zip" in message
    assert "--source" in message and not Path("corpus").exists()


def test_a_stopped_tokenizer_leaves_the_corpus_that_was_there_or_none(monkeypatch):
    Path("text.txt").write_text("some words\n" * 1000)
    real = wikitext.pieces

    def stopped(text):
        yield next(real(text))
        raise KeyboardInterrupt

    for before in (False, True):
        held = {p.name: p.read_bytes() for p in Path("corpus").glob("*")}
        monkeypatch.setattr(wikitext, "pieces", stopped)
        with pytest.raises(SystemExit) as stop:
            wikitext.main(["--source", "text.txt", *["--tokenizer", "words"] * before])
        assert stop.value.code == 130 and held == {p.name: p.read_bytes() for p in Path("corpus").glob("*")}
        assert Path("corpus").exists() == before
        monkeypatch.setattr(wikitext, "pieces", real)
        wikitext.main(["--source", "text.txt"])
    real = os.replace

    def killed(a, b):  # between two renames: the old table must not describe new arrays
        if "validation" in str(a):
            raise RuntimeError
        real(a, b)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(RuntimeError):
        wikitext.main(["--source", "text.txt", "--tokenizer", "words"])
    assert "is no corpus" in fails(train.main, "--data", "wikitext", "--length", "8")


def test_windows_reach_the_last_token():
    tokens, seeds = np.arange(10, dtype=np.uint16), range(100)
    with pytest.raises(ValueError, match="10 .* 10"):
        wikitext.random_windows(tokens, 10, seeds)
    x = wikitext.random_windows(tokens, 9, seeds)
    assert x.dtype == torch.int64 and torch.equal(x, torch.arange(10).expand(100, -1))
    x = wikitext.random_windows(tokens, 8, seeds)
    assert set(x[:, 0].tolist()) == {0, 1} and torch.equal(x[:, 1:], x[:, :-1] + 1)
    assert wikitext.random_windows(np.array([65_000], np.uint16).repeat(2), 1, [0]).tolist() == [[65_000] * 2]


def wikitext_data(*argv):
    return wikitext.WikitextData(train.parse(["--data", "wikitext", *map(str, argv)])[0], torch.device("cpu"))


def test_batches_do_not_depend_on_how_an_update_is_cut_up():
    corpus()
    whole, parts = wikitext_data("--length", 9, "--batch", 12), wikitext_data("--length", 9, "--batch", 3)
    assert torch.equal(whole.batch(2), torch.cat([parts.batch(i) for i in range(8, 12)]))
    assert not torch.equal(whole.batch(0), whole.batch(1)) and whole.batch(0).shape == (12, 10)
    assert not torch.equal(whole.batch(0), wikitext_data("--length", 9, "--batch", 12, "--seed", 1).batch(0))


@pytest.mark.parametrize("length, batch", [(2, 1), (7, 3), (16, 16), (512, 1), (5000, 2)])
def test_every_held_out_token_is_predicted_once(length, batch):
    table, seen = corpus(PROSE * 100), []
    log_probs = torch.randn(256, 256, generator=generator()).log_softmax(-1)

    def bigram(x):
        seen.append(x)
        assert x.shape[0] <= batch and x.shape[1] == length
        return log_probs[x]

    data = wikitext_data("--length", length, "--batch", batch)
    held = flat("validation")[0].astype(np.int64)
    nll = -sum(log_probs[a, b].item() for a, b in zip([10, *held[:-1]], held))
    result = data.evaluate(bigram)
    assert result["val"] == pytest.approx(nll / len(held), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(nll / len(held) / math.log(2), rel=1e-5)
    assert torch.cat([x.flatten() for x in seen])[: len(held)].tolist() == [10, *held[:-1].tolist()]


def test_perplexities_say_what_they_divide_by():
    got = wikitext.perplexities(6.0, 3, 2, 10)
    right = dict(val=2, token_perplexity=7.389056, word_perplexity=20.085537, bits_per_byte=0.8656170)
    assert got == pytest.approx(right, abs=1e-6)
    assert math.isfinite(wikitext.perplexities(1e6, 1e6, 0, 1e6)["word_perplexity"])  # no word at all


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow_while_reading():
    corpus()
    with open("corpus/train.bin", "wb") as f:
        f.truncate(200 * 2**20)
    table = json.loads(Path("corpus/corpus.json").read_text())
    table["splits"]["train"]["tokens"] = 200 * 2**20
    Path("corpus/corpus.json").write_text(json.dumps(table))
    data = wikitext_data("--length", 64, "--batch", 8)
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    before, most = resident(), 0
    for i in range(3000):
        data.batch(i)
        most = max(most, resident() - before)
    assert most < 60 * 2**20


def test_text_is_utf8_whatever_the_locale(tmp_path):
    Path("text.txt").write_bytes(PROSE.encode() * 20)
    env = os.environ | dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = subprocess.run([sys.executable, str(HERE / "wikitext.py"), "--source", "text.txt", "--tokenizer", "words"],
                          capture_output=True, text=True, env=env)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    ids, tokenizer = flat("train")
    assert PROSE in tokenizer.decode(ids) and done.stdout.startswith("train")


def loss_at_start(V, d):
    """Of a new tied model: logits are normal of spread 0.02 sqrt(768), sqrt(d) times that for the word just read."""
    spread = 0.02 * 768**0.5
    return math.log((V - 1) * math.exp(spread**2 / 2) + math.exp(spread * d**0.5))


TEXT = ["--data", "wikitext", "--d", 8, "--layers", 1, "--heads", 2, *TINY]


@pytest.mark.parametrize("flags", ["", "--no-conv", "--no-decay", "--act none", "--model wikitext-transformer",
                                   "--model wikitext-transformer --conv qkv", "--dropout 0.2 --dtype bfloat16"])
def test_language_models_of_tables_1_and_4_train(flags, capsys):
    corpus()
    metrics = run(*TEXT, *flags.split(), "--out", "a", "--sample", "The 東京")
    out = capsys.readouterr().out
    assert metrics["val"] < losses("a")[0]["val"] and losses("a")[0]["train"] == pytest.approx(loss_at_start(256, 8),
                                                                                              abs=0.2)
    names = ("val", "token perplexity", "word perplexity", "bits per byte")
    reports = [text for text in out.splitlines() if text.startswith(("step ", "done "))]
    assert all(f" {name} " in text for name in names for text in reports)
    assert set(losses("a")[0]) == {"step", "train", "ms_per_step", *(name.replace(" ", "_") for name in names)}
    assert "\nThe 東京" in out and "validation: " in out and " gap " not in out
    model = train.load_model("a")
    config = vars(model.config)
    assert "window" not in flags and config["tie"] and config["window"] == 4 and model.head.weight is model.embed.weight
    assert (config["conv"], config.get("decay"), config.get("act")) == {
        "": ("xbc", True, "silu"), "--no-conv": ("none", True, "silu"), "--no-decay": ("xbc", False, "silu"),
        "--act none": ("xbc", True, "none"), "--model wikitext-transformer": ("none", None, None),
        "--model wikitext-transformer --conv qkv": ("qkv", None, None)}.get(flags, ("xbc", True, "silu"))


def test_a_language_model_resumes_and_is_evaluated_on_the_test_split(monkeypatch, capsys):
    Path("valid.txt").write_text("other words\n" * 50)
    Path("text.txt").write_text("some words\n" * 50)
    wikitext.main(["--train", "text.txt", "--validation", "valid.txt", "--test", "text.txt"])
    monkeypatch.setattr(train, "learning_rate", lambda step, args: 1e-3)  # so that 5 and 10 steps begin alike
    run(*TEXT, "--out", "whole")
    run(*TEXT, "--steps", 5, "--out", "parts")
    run("--resume", "--out", "parts", "--steps", 10, "--sample", "A")
    assert same(weights("whole"), weights("parts")) and without_time(losses("whole")) == without_time(losses("parts"))
    capsys.readouterr()
    test = run("--eval", "--out", "whole", "--split", "test", "--sample", "A word")
    first = capsys.readouterr().out
    assert test["val"] != losses("whole")[-1]["val"] and "\nA word" in first and "\ntest: " in first
    run("--eval", "--out", "whole", "--split", "test", "--sample", "A word")
    assert capsys.readouterr().out.splitlines()[3:-1] == first.splitlines()[3:-1]  # the sample, too, follows --seed
    assert run("--eval", "--out", "whole")["val"] == losses("whole")[-1]["val"]
    corpus(tokenizer="words")
    assert "256 symbols" in fails(train.main, "--eval", "--out", "whole")


def test_bad_corpora_and_flags_are_one_line():
    Path("text.txt").write_text("short")
    assert "python wikitext.py --out corpus" in fails(train.main, "--data", "wikitext")
    wikitext.main(["--train", "text.txt", "--test", "text.txt"])
    assert "5 tokens hold no window of 8 + 1" in fails(train.main, "--data", "wikitext", "--length", 8)
    assert "has only train and test" in fails(train.main, "--data", "wikitext", "--length", 4, "--split", "validation")
    for flags in (["--sample", "a"], ["--split", "test"]):
        assert "--data wikitext" in fails(train.main, *flags)
    assert "--split" in fails(train.main, "--data", "wikitext", "--split", "train")
    Path("corpus/train.bin").write_bytes(b"cut")
    assert "damaged" in fails(train.main, "--data", "wikitext", "--length", 4)
    for text in ("", "[]", "{}", '{"tokenizer": "bytes", "words": null, "splits": {"train": 1}}'):
        Path("corpus/corpus.json").write_text(text)
        assert "damaged" in fails(train.main, "--data", "wikitext", "--length", 4), text


def test_parameter_counts_of_table_1():
    count = lambda model: sum(p.numel() for p in model.parameters())
    mamba = lambda **f: count(Mamba(MambaConfig(vocab=50_304, **PRESETS["wikitext-mamba"] | f)))
    preset = transformer.PRESETS["wikitext-transformer"]
    gpt = lambda **f: count(Transformer(TransformerConfig(vocab=50_304, block=512, **preset | f)))
    assert (mamba(), mamba(conv="none")) == (14_538_560, 14_527_040)  # 14.54 M and 14.53 M
    assert (gpt() - 512 * 256, gpt(conv="qkv") - 512 * 256) == (14_457_856, 14_464_000)  # without the position table
    assert mamba(decay=False) == mamba() - 4 * 8 and mamba(act="none") == mamba()


def test_a_tied_model_prefers_only_the_word_just_read_at_first():
    torch.manual_seed(0)
    small = dict(vocab=500, d=64, layers=2)
    for model in (Mamba(MambaConfig(**PRESETS["wikitext-mamba"] | small)),
                  Transformer(TransformerConfig(**transformer.PRESETS["wikitext-transformer"] | small))):
        x = tokens(4, 65, 500)
        loss = -model(x[:, :-1]).gather(-1, x[:, 1:, None]).mean()
        assert loss.item() == pytest.approx(loss_at_start(500, 64), abs=0.1)


@pytest.mark.skipif(not torch.distributed.is_available() or sys.platform == "win32", reason="needs gloo")
def test_two_processes_reproduce_one():
    corpus()
    flags = [str(a) for a in (*TEXT, "--batch", 6, "--accumulate", 2)]
    run(*flags, "--out", "one")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", "localhost:0", "--", str(HERE / "train.py")]
    done = subprocess.run([*torchrun, *flags, "--out", "two"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = [text.split(" | ")[0] for text in done.stdout.splitlines() if text.startswith("step")]
    assert steps == ["step 0/10", "step 5/10", "step 10/10"]
    for a, b in zip(losses("one"), losses("two"), strict=True):
        assert all(abs(a[name] - b[name]) < 1e-5 for name in ("train", "val", "bits_per_byte"))
    assert sorted(p.name for p in Path("two").iterdir()) == ["config.json", "log.jsonl", "model.pt"]
    assert run("--eval", "--out", "two")["val"] == pytest.approx(losses("two")[-1]["val"], abs=1e-6)


@cuda
def test_a_language_model_on_cuda_in_bfloat16():
    corpus()
    metrics = run(*TEXT, "--device", "cuda", "--dtype", "bfloat16", "--out", "a", "--sample", "The")
    assert abs(metrics["val"] - run(*TEXT, "--device", "cpu", "--out", "b")["val"]) < 0.05


# regression.py, single_index.py and their tasks in train.py


@pytest.fixture(autouse=True)
def few_held_out_prompts(monkeypatch):
    monkeypatch.setattr(regression.LinearData, "held_out", 16)
    monkeypatch.setattr(single_index.SingleIndexData, "held_out", 16)


def close_to_mean(errors, exact, sigmas=4):
    errors = errors.double()
    return abs(errors.mean().item() - exact) <= sigmas * errors.std().item() / len(errors) ** 0.5


@pytest.mark.parametrize("d, N, decay", [(1, 1, 0.5), (4, 50, 0.014), (5, 20, 0.2), (3, 100, 0.9), (10, 40, 1e-3)])
def test_state_set_by_hand_is_online_gradient_descent_after_every_pair(d, N, decay):
    tokens = linear_prompts(3, N, d, generator=generator())[0].double()
    layer, w, by_hand = online_gd(d, 0.07, decay), step_weights(tokens, 0.07, decay), torch.zeros(3, d).double()
    for i in range(N):
        by_hand = (1 - decay) * by_hand + 0.07 * tokens[:, i, d:] * tokens[:, i, :d]
        assert (w[:, i] - by_hand).abs().max() < 1e-12 > (layer.state(tokens[:, : i + 1]) - by_hand).abs().max()
    assert (layer(tokens) - (by_hand * tokens[:, -1, :d]).sum(-1)).abs().max() < 1e-12


def test_layer_computes_its_equations():
    torch.manual_seed(0)
    layer, tokens = OneLayerS6(3, 7, half_life=5).double(), torch.randn(2, 6, 4).double()
    assert torch.sigmoid(-layer.gate.bias).item() ** 5 == pytest.approx(0.5)
    for p in layer.parameters():
        p.data.normal_()
    tokens[:, -1, -1] = 0
    h = torch.zeros(2, 7).double()
    for e in tokens.unbind(1):
        s = torch.sigmoid(layer.gate(e))
        h = (1 - s) * h + s * e[:, -1:] * (e @ layer.write.weight.T + layer.write.bias)
    assert (layer(tokens) - (h * layer.read(tokens[:, -1])).sum(-1)).abs().max() < 1e-12


@pytest.mark.parametrize("d, N, noise", [(4, 50, 0.0), (5, 20, 0.0), (3, 8, 1.0)])
def test_references_have_their_exact_losses(d, N, noise):
    tokens, target = linear_prompts(10_000, N, d, noise, generator=generator(1))
    loss = lambda guess: (guess - target) ** 2
    one_step = regression.predict_one_step_gd(tokens, 1 / (N + d + 1 + noise))
    assert close_to_mean(loss(regression.predict_zero(tokens)), d)
    assert close_to_mean(loss(one_step), optimal_loss(N, d, noise))
    if not noise:
        assert torch.equal(one_step, regression.predict_one_step_gd(tokens))
        assert close_to_mean(loss(regression.predict_lms(tokens)), d * (1 - 1 / (d + 2)) ** N)
        assert close_to_mean(loss(regression.predict_nlms(tokens)), d * (1 - 1 / d) ** N)
        assert loss(regression.predict_ridge(tokens)).max() < 1e-6
    else:  # the Bayes estimator is better than other penalties and all other references
        best = loss(regression.predict_ridge(tokens, noise)).mean()
        for other in (regression.predict_ridge(tokens), regression.predict_ridge(tokens, 4.0), one_step,
                      regression.predict_lms(tokens), regression.predict_nlms(tokens)):
            assert loss(other).mean() > best + 0.01


@pytest.mark.parametrize("noise, drift", [(0.0, None), (0.5, None), (0.0, 0.9), (0.5, 0.6)])
def test_loss_of_weights_is_what_prompts_say(noise, drift):
    d, N = 3, 6
    tokens, target = linear_prompts(40_000, N, d, noise, drift, generator(2))
    g = torch.rand(N, generator=generator(3)) / 5
    w = (g[:, None] * tokens[:, :-1, d:] * tokens[:, :-1, :d]).sum(1)
    assert close_to_mean(((w * tokens[:, -1, :d]).sum(-1) - target) ** 2, loss_of_weights(g, d, noise, drift))
    best = optimal_loss(N, d, noise, drift)
    assert best < loss_of_weights(g, d, noise, drift)
    if drift is None:
        assert loss_of_weights([1 / (N + d + 1 + noise)] * N, d, noise) == pytest.approx(best)
        assert optimal_loss(N, d, noise, 1.0) == pytest.approx(best)
    else:
        a, geometric = regression.optimal_forgetting(N, d, drift, noise)
        assert best <= geometric < 1.001 * best and a < 0.99
        bayes = ((regression.predict_ridge(tokens, noise, drift) - target) ** 2).mean()
        assert bayes < 0.97 * best and bayes < ((regression.predict_ridge(tokens, noise) - target) ** 2).mean()
        still = linear_prompts(50, N, d, noise, generator=generator())[0]
        same = regression.predict_ridge(still, 0.5, 1.0) - regression.predict_ridge(still, 0.5)
        assert same.abs().max() < 1e-5


def test_optimal_forgetting_under_drift():
    for drift, a, loss in [(0.9, 0.7942, 2.665), (0.95, 0.8590, 2.120), (0.98, 0.9128, 1.491), (0.99, 0.9408, 1.115)]:
        found = regression.optimal_forgetting(50, 4, drift)
        assert found == (pytest.approx(a, abs=1e-4), pytest.approx(loss, abs=1e-3))


def test_tables_of_the_paper():
    def half_life(N, d):  # half-loss of the best step under the gate 2^(-1/N)
        q = 2 ** (-torch.arange(N).double() / N)
        return min(loss_of_weights(s * q / q.sum(), d) for s in torch.linspace(0, 1, 2001).tolist()) / 2

    rows = {10: (2.6671, 2.6190), 80: (0.6254, 0.6044)}
    for N, (table, best) in rows.items():
        assert half_life(N, 10) == pytest.approx(table, abs=5e-5)
        assert optimal_loss(N, 10) / 2 == pytest.approx(best, abs=5e-5)
    assert half_life(4, 20) == pytest.approx(8.4484, abs=5e-5) and half_life(20, 20) == pytest.approx(5.2190, abs=5e-5)
    assert half_life(30, 4) == pytest.approx(0.2954, abs=5e-5)


def test_population_loss_and_its_descent():
    d, N, a, g = 3, 5, 0.8, generator(4)
    F_, f, B, C, b = (torch.randn(s, generator=g).double() / 2 for s in ((d, d), (d,), (8, d), (8, d), (8,)))
    tokens, target = linear_prompts(100_000, N, d, generator=g)
    x, y = tokens[:, :-1, :d].double(), tokens[:, :-1, d:].double()
    G = ((1 - a) * a ** torch.arange(N, 0, -1.0).double())[:, None]
    guess = ((G * y * (x @ F_.T + y * f)).sum(1) * tokens[:, -1, :d]).sum(-1)
    assert close_to_mean((guess - target) ** 2, regression.population_loss(a, F_, f, N))

    W = [p.clone().requires_grad_() for p in (B, C, b)]
    G1, G2 = G.sum(), (G * G).sum()
    F_, f = W[1].T @ W[0], W[1].T @ W[2]
    half = (d + (G1**2 + (d + 1) * G2) * F_.square().sum() - 2 * G1 * F_.trace()
            + d * (d + 2) * (G1**2 + 2 * G2) * f.square().sum()) / 2
    half.backward()
    gaps, *new = regression.population_gd(B, C, b, a, N, 0.01, 1)
    for before, p, after in zip((B, C, b), W, new):
        assert (before - 0.01 * p.grad - after).abs().max() < 1e-12
    best = loss_of_weights(G[:, 0] * (G1 / (G1**2 + (d + 1) * G2)), d)
    assert 2 * gaps[0].item() == pytest.approx(2 * half.item() - best)


@pytest.mark.parametrize("start, state, eta", [
    ("orthonormal", 80, 0.02), ("orthonormal", 9, 0.02), ("gaussian", 80, 1e-3)])
def test_exponential_convergence_at_the_predicted_rate(start, state, eta):
    d, N = 4, 50
    a, W = 2 ** (-1 / N), torch.randn(state, 2 * d + 1, generator=generator(5)).double()
    W = torch.linalg.qr(W)[0] if start == "orthonormal" else W
    gap, B, C, _ = regression.population_gd(W[:, :d], W[:, d:-1], W[:, -1], a, N, eta, 1400)
    t = ((gap > 1e-20) & (gap < 1e-10)).nonzero()[:, 0]
    slope = (gap[t[-1]].log() - gap[t[0]].log()).item() / (len(t) - 1)
    if start == "orthonormal":
        assert slope == pytest.approx(regression.predicted_rate(a, N, d, eta), rel=0.01)
    else:
        assert slope == pytest.approx(regression.predicted_rate(a, N, d, eta, B, C), rel=0.07)
        assert slope < -eta * regression.moments(N, d, a)[0] * state  # what the paper guarantees


def test_least_squares_with_fewer_points_than_dimensions():
    ridge = regression.predict_ridge
    prompt = lambda X, y, q: torch.tensor([[*row, label] for row, label in zip(X, y)] + [[*q, 0]])[None]
    assert ridge(prompt([[1.0, 0]], [2.0], [0.0, 1])).item() == 0
    assert ridge(prompt([[1.0, 0]], [2.0], [1.0, 0])).item() == 2
    A = [[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]
    for i, row in enumerate([(0.833333, 0.333333, -0.166667), (0.333333, 0.333333, 0.333333)]):
        for j, value in enumerate(row):
            guess = ridge(prompt(A, [r[j] for r in A], torch.eye(3)[i].tolist()))
            assert guess.item() == pytest.approx(value, abs=1e-5)
    none = torch.tensor([[[1.0, 2.0, 0.0]]])
    for predict in (ridge, regression.predict_lms, regression.predict_nlms, regression.predict_one_step_gd):
        assert predict(none).tolist() == [0]
    tokens, _ = linear_prompts(500, 4, 4, generator=generator())  # N = d: the peak
    assert ridge(tokens).isfinite().all()
    tokens, _ = linear_prompts(50, 3, 5, generator=generator())
    assert (ridge(tokens, 1e-10) - ridge(tokens)).abs().max() < 1e-3


@cuda
def test_least_squares_on_cuda():
    tokens, _ = linear_prompts(64, 3, 5, generator=generator())
    assert (regression.predict_ridge(tokens.cuda()).cpu() - regression.predict_ridge(tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("Model, config", [
    (Mamba, MambaConfig(vocab=1, inputs=4, d=8, norm=True, act="silu", predict="value")),
    (Transformer, TransformerConfig(vocab=1, inputs=4, d=8, layers=2, predict="value"))], ids=["mamba", "transformer"])
def test_where_predictions_are_read(Model, config):
    torch.manual_seed(0)
    model = Model(config).double()  # in float32 what a new layer writes may be lost in rounding
    tokens = linear_prompts(2, 5, 3, generator=generator())[0].double()
    predict = lambda tokens: model(regression.interleave(tokens))[:, ::2, 0]  # (B, N+1)
    before = predict(tokens)
    assert before.shape == (2, 6)
    for i in range(5):
        label, point = tokens.clone(), tokens.clone()
        label[:, i, -1] += 1
        point[:, i, 0] += 1
        assert torch.equal(predict(label)[:, : i + 1], before[:, : i + 1])  # blind to y_i where x_i asks for it
        assert (predict(label)[:, i + 1] != before[:, i + 1]).all()
        assert torch.equal(predict(point)[:, :i], before[:, :i]) and (predict(point)[:, i] != before[:, i]).all()


def test_loss_is_on_label_positions_only():
    class Echo(torch.nn.Module):  # says at each token the largest entry it sees
        def forward(self, tokens):
            return tokens.amax(-1, keepdim=True)

    args = train.parse(["--data", "linear", "--model", "mamba", "--length", "3", "--dim", "2"])[0]
    data = regression.LinearData(args, torch.device("cpu"))
    tokens, target = data.batch(0)
    labels = torch.cat([tokens[:, :-1, 2], target[:, None]], 1)
    guess = tokens[:, :, :2].amax(-1).clamp(min=0)
    assert data.loss(Echo(), (tokens, target)).item() == pytest.approx((guess - labels).square().mean().item())
    assert data.predict(Echo(), tokens).tolist() == guess[:, -1].tolist()


def test_a_trained_layer_is_online_gradient_descent_and_needs_selection():
    torch.manual_seed(0)
    d, N = 3, 12
    layer = regression.train_layer(OneLayerS6(d, 8), N, steps=300, batch=128, lr=3e-2)
    a, F_, f = layer.read_off()
    tokens, target = linear_prompts(2000, N, d, generator=generator(7))
    w = step_weights(tokens, a * (1 - a) * F_.trace().item() / d, 1 - a)[:, -1]
    with torch.no_grad():
        ours = layer(tokens)
    assert torch.corrcoef(torch.stack([ours, (w * tokens[:, -1, :d]).sum(-1)]))[0, 1] > 0.99
    assert optimal_loss(N, d) < regression.population_loss(a, F_, f, N) < 1.1 * optimal_loss(N, d)
    constant = regression.train_layer(OneLayerS6(d, 8, selective=False), N, steps=300, batch=128, lr=3e-2)
    with torch.no_grad():
        assert (constant(tokens) - target).square().mean() > 0.97 * target.square().mean()


@pytest.mark.parametrize("link", sorted(single_index.LINKS))
def test_single_index_prompts(link):
    x, y, xq, yq, zq = single_index_prompts(300, 7, 5, [1, 4], link, 0.3, queries=9, generator=generator())
    assert (x.shape, y.shape, xq.shape, yq.shape, zq.shape) == ((300, 7, 5), (300, 7), (300, 9, 5), (300, 9), (300, 9))
    g = single_index.LINKS[link]
    assert ((yq - g(zq)).abs() - 0.3).abs().max() < 1e-4
    beta = torch.linalg.lstsq(xq, zq[..., None]).solution[..., 0]
    assert (beta.norm(dim=1) - 1).abs().max() < 1e-3 and beta[:, [0, 2, 3]].abs().max() < 1e-4
    assert (((y - g((x @ beta[..., None])[..., 0])).abs() - 0.3).abs() < 1e-2).all()  # the context has the same beta
    z = torch.randn(200_000, generator=generator(1)).double()
    values = torch.stack([f(z) for f in single_index.LINKS.values()])
    assert (values @ values.T / len(z) - torch.eye(4)).abs().max() < 0.1


def test_hermite_features_are_orthonormal_and_in_order():
    x = torch.randn(200_000, 3, generator=generator())
    phi = hermite_features(x)
    assert phi.shape[1] == 1 + 3 + 6 and (phi.T @ phi / len(x) - torch.eye(10)).abs().max() < 0.03
    a, b, c = 0.5, -1.0, 3.0
    expected = [1, a, b, c, *((v * v - 1) / 2**0.5 for v in (a, b, c)), a * b, a * c, b * c]
    assert hermite_features(torch.tensor([a, b, c])).tolist() == pytest.approx(expected)
    x, w = torch.randn(2, 6, 3).double(), torch.randn(2, 6).double()
    assert (single_index.hermite_sum(w, x) - (w[..., None] * hermite_features(x)).sum(1)).abs().max() < 1e-12
    assert single_index.squares_mask(3).tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("rho, rate", [(0.5, 1.0), (-0.5, 1.0), (0.2, 0.05)])
def test_gate_weights_are_what_the_scan_does(rho, rate):
    x, y, xq, *_ = (v.double() for v in single_index_prompts(3, 40, 4, 2, generator=generator()))
    bias, gamma = -2 * math.log(4), torch.randn(15, generator=generator(1)).double()
    G = single_index.gate_weights(y, rho, bias, rate)
    label, tokens = F.pad(y, (0, 1)), torch.cat([x, xq], 1)
    log_a = -rate * F.softplus(label / rho + bias)[..., None]
    phi = hermite_features(tokens)[:, :, None]
    M = scan((-torch.expm1(log_a) * label[..., None])[..., None], log_a, gamma * phi, phi)[0][:, -1, 0]
    formula = hermite_features(xq) @ (gamma * single_index.hermite_sum(G * y, x))[..., None]
    assert (M - formula[:, 0]).abs().max() < 1e-12
    if rate == 1:  # exactly discretised the gain is a sigmoid, the gate of the paper
        assert (G[:, -1] - torch.sigmoid(y[:, -1] / rho + bias) * (1 - 4**-2 / (1 + 4**-2))).abs().max() < 1e-12


def test_stage_one_is_one_step_of_autograd():
    x, y, xq, yq, _ = (v.double() for v in single_index_prompts(20, 30, 4, 2, queries=4, generator=generator()))
    G, mask = single_index.gate_weights(y, 0.5, -2.77), single_index.squares_mask(4).double()
    gamma = (1e-9 * mask).requires_grad_()
    M = hermite_features(xq) @ (gamma * single_index.hermite_sum(G * y, x))[..., None]
    loss = (F.relu(M[..., 0] / 30) - yq).square().mean() / 2
    loss.backward()
    ours = single_index.gamma_step(G, x, y, xq, yq, mask)
    assert (ours + gamma.grad).abs().max() < 1e-6 * ours.abs().max()


def test_stage_one_finds_the_subspace_only_through_the_gate():
    d, support, N = 12, [2, 5, 7], 48
    inside = torch.zeros(d, dtype=torch.bool)
    inside[support] = True

    def linear(**settings):
        gamma = stage_one(d, support, N, 4000, generator=generator(), **settings)
        return gamma, gamma[1 : 1 + d]

    def ratio(linear):
        return (linear[inside].abs().mean() / linear[~inside].abs().mean()).item()

    gamma, own = linear()
    assert ratio(own) > 10
    assert (gamma.abs() > gamma.abs().max() / 2).nonzero()[:, 0].tolist() == [1 + i for i in support]
    _, opposite = linear(rho=-0.5)  # the gate of negative labels sees -z
    assert (opposite[inside].sign() == -own[inside].sign()).all()
    _, none = linear(gate=False)
    assert ratio(none) < 7  # even noise is larger inside, but of random sign
    even, _ = linear(link="he2")  # parity: even links live on degree 2
    assert even[1 : 1 + d].abs().max() < 0.02 * even.abs().max() and even.abs().argmax() > d
    degree_two = F.pad(torch.ones(d * (d + 1) // 2), (1 + d, 0))  # a mask that does not cancel its own noise
    _, wrong = linear(mask=degree_two)
    assert ratio(own) > 2 * ratio(wrong)


def test_stage_two_learns_in_the_subspace():
    d, r, N = 8, 2, 128
    gamma = F.pad(torch.ones(r), (1, 44 - r))  # what Stage I finds
    heads = [(gamma, (0.1, -0.1), -t / 0.1) for t in (0.6, 1.2)]
    predict = single_index.stage_two(d, r, N, heads, rate=0.02, contexts=1500, generator=generator())
    x, y, xq, yq, _ = single_index_prompts(400, N, d, r, queries=8, generator=generator(1))
    errors = [(guess - yq).square().mean(1) for guess in
              (predict(x, y, xq), torch.zeros_like(yq), single_index.best_kernel_ridge(x, y, xq, yq))]
    for other in errors[1:]:
        difference = errors[0] - other
        assert difference.mean() < -3 * difference.std() / 20 and difference.mean() < -0.1


def test_readout_is_the_scan_read_by_the_query():
    x, y, xq, *_ = (v.double() for v in single_index_prompts(3, 20, 3, 2, queries=2, generator=generator()))
    gamma, v = torch.randn(2, 10, generator=generator(1)).double(), torch.tensor([[3.0], [-4.0]]).double()
    gate, phi, phi_q = single_index.gate_weights, hermite_features(x), hermite_features(xq)
    M = [torch.einsum("bn,bnf,f,bqf->bq", g * y, phi, c, phi_q)
         for g, c in zip((gate(y, 0.3, -2) + gate(y, -0.3, -2), gate(y, 0.1, -9)), gamma)]
    s = single_index.readout(x, y, xq, [(gamma[0], (0.3, -0.3), -2), (gamma[1], (0.1,), -9)], v, normalise=False)
    assert (s[..., 0] - (3 * M[0] - 4 * M[1]) / 20).abs().max() < 1e-12


def test_kernel_ridge():
    x, y, xq, yq, _ = single_index_prompts(3, 6, 2, 1, queries=2, generator=generator())
    guess = single_index.kernel_ridge(x, y, xq, 1.5, 0.1)
    k = lambda u, v: math.exp(-((u - v) ** 2).sum().item() / (2 * 1.5**2))
    K = torch.tensor([[k(u, v) for v in x[1]] for u in x[1]]) + 0.1 * torch.eye(6)
    by_hand = torch.tensor([k(xq[1, 1], v) for v in x[1]]) @ K.inverse() @ y[1]
    assert guess[1, 1].item() == pytest.approx(by_hand.item(), abs=1e-3)
    fits = single_index.kernel_ridge(x.double(), y.double(), x.double(), 0.3, 1e-9)
    assert (fits - y).abs().max() < 1e-3 and single_index.kernel_ridge(x, y, xq, 1.0, 1e9).abs().max() < 1e-6
    best = single_index.best_kernel_ridge(x, y, xq, yq, (0.5, 1.5), (0.1, 1))
    assert (best - yq).square().mean() <= (guess - yq).square().mean()


def test_one_layer_is_a_scan_and_an_mlp():
    torch.manual_seed(0)
    x, y, xq, *_ = (v.double() for v in single_index_prompts(2, 9, 3, 2, queries=5, generator=generator()))
    model = single_index.OneLayer(single_index.OneLayerConfig(inputs=4, heads=3, norm=False)).double()
    for p in model.parameters():
        p.data.normal_()
    log_a = -model.log_rate.exp() * F.softplus(model.w * y[..., None] + model.bias)  # (B, N, H)
    values = torch.stack([y, torch.ones_like(y)], -1)[:, :, None] * -torch.expm1(log_a)[..., None]  # (B, N, H, P)
    phi = F.pad(x, (1, 0), value=1.0)[:, :, None]
    h = scan(values, log_a, phi, phi)[1]  # (B, H, P, 4)
    s = torch.einsum("bqn,bhpn,phn->bqph", F.pad(xq, (1, 0), value=1.0), h, model.gamma.view(2, 3, 4))
    assert (model.read(x, y, xq) - model.mlp(s.flatten(2))[..., 0]).abs().max() < 1e-10
    tokens = torch.cat([torch.cat([x, y[..., None]], -1), F.pad(xq[:, :1], (0, 1), value=9.0)], 1)
    assert torch.allclose(model(tokens), model.read(x, y, xq)[:, 0])  # the query's label is not read


@pytest.mark.parametrize("command", [
    "--data linear", "--data linear --drift 0.9 --noise 0.5", "--data linear --no-selective",
    "--data linear --model mamba", "--data linear --model transformer", "--data single-index",
    "--data single-index --mixer softmax --heads 1",
    "--data single-index --mixer linear --no-norm --link he2",
    "--data single-index --model mamba --no-mlp --curriculum 0.5",
    "--data single-index --model transformer --curriculum 0.5"])
def test_regression_tasks_train_resume_and_come_back(command, capsys):
    small = [*command.split(), "--steps", 4, "--eval-every", 2, "--batch", 3, "--length", 6, "--dim", 5, "--out", "a"]
    metrics = run(*small)
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("done") and f"gap {metrics['gap']:+.4f}" in out[-1]
    assert any(text.startswith("model - reference") for text in out)
    assert metrics["gap"] == pytest.approx(metrics["val"] - metrics["bayes"]) and len(losses("a")) == 3
    assert run("--eval", "--out", "a")["val"] == metrics["val"]
    if command in ("--data linear --model mamba", "--data single-index"):
        run(*small[:-1], "b", "--steps", 2)
        run("--resume", "--out", "b", "--steps", 4)
        assert losses("b")[-1]["step"] == 4
    train.load_model("a")
    before = sorted(Path(".").rglob("*"))
    for other in ("--dim 6", "--length 9" if "transformer" in command else "--dim 4"):
        with pytest.raises(SystemExit) as stop:
            capsys.readouterr()
            run("--eval", "--out", "a", *other.split())
        err = capsys.readouterr().err
        assert stop.value.code == 2 and err.count("\n") == 1 and other.split()[1] in err
    assert sorted(Path(".").rglob("*")) == before


def test_curriculum_turns_the_link_and_ends():
    args = train.parse("--data single-index --model mamba --curriculum 0.5 --steps 10 --dim 4 --noise 0".split())[0]
    data = single_index.SingleIndexData(args, torch.device("cpu"))
    without = types.SimpleNamespace(**vars(args) | dict(curriculum=0.0))
    plain = single_index.SingleIndexData(without, torch.device("cpu"))
    assert torch.equal(data.batch(5)[0], plain.batch(5)[0]) and not torch.equal(data.batch(4)[0], plain.batch(4)[0])
    tokens, target = data.batch(0)  # he1: linear in x
    assert (regression.predict_ridge(torch.cat([tokens[:, :-1], tokens[:, -1:]], 1)) - target).abs().max() < 1e-3


WRONG = """--data linear --dim 0 | --data linear --dim -2 | --data linear --length 0 | --data linear --noise -1
--data linear --noise inf | --data linear --drift 1.5 | --data linear --drift -0.1
--data linear --drift nan | --data linear --state 0 | --data linear --half-life 0
--data linear --model mambazero --predict l1 | --data linear --heads 2
--data linear --model transformer --block 8 | --data single-index --dim 0
--data single-index --length 0 | --data single-index --support 17 | --data single-index --support 0
--data single-index --link he9 | --data single-index --noise -0.1 | --data single-index --curriculum 2
--data single-index --heads 0 | --data single-index --mixer relu | --data single-index --no-selective
--model s6 | --data markov --model s6 | --data linear --length 1000000000
--data linear --dim 1000000000 --length 5""".replace("\n", " | ").split(" | ")


@pytest.mark.parametrize("command", WRONG)
def test_bad_regression_input_is_one_line_and_exit_code_2(command, capsys):
    test_bad_input_is_one_line_and_exit_code_2(command, capsys)


def test_regression_functions_reject_what_cannot_be_meant():
    for call in (lambda: linear_prompts(1, 0, 2), lambda: linear_prompts(1, 1, 0),
                 lambda: linear_prompts(1, 1, 1, -1.0), lambda: linear_prompts(1, 1, 1, 0.0, 1.5),
                 lambda: online_gd(2, 0.1, 0.0), lambda: online_gd(2, 0.1, 1.0),
                 lambda: single_index_prompts(1, 1, 3, 4), lambda: single_index_prompts(1, 1, 3, [3]),
                 lambda: single_index_prompts(1, 1, 3, [1, 1]), lambda: single_index_prompts(1, 1, 3, []),
                 lambda: single_index_prompts(1, 1, 3, 1, "he5"), lambda: single_index_prompts(1, 1, 3, 1, noise=-1),
                 lambda: single_index_prompts(1, 1, 3, 1, queries=0), lambda: OneLayerS6(0, 4),
                 lambda: OneLayerS6(2, 0)):
        with pytest.raises(ValueError) as error:
            call()
        assert "\n" not in str(error.value) and "got" in str(error.value)


# ----------------------------------------------------------------------------------------------------------------------
# Input that random attacks found


def test_counting_takes_no_flat_sequence_no_switch_and_any_empty_batch():
    with pytest.raises(ValueError, match=r"\(B, T\)"):
        add_beta(torch.tensor([0, 1, 1]), 2, 1)
    with pytest.raises(ValueError, match="below 2, got 2"):
        oracle_loss(torch.tensor([[0, 2, 1]]), torch.full((1, 2, 2), 0.5))
    assert add_beta(torch.zeros(0, 5, dtype=torch.long), 2, 1).shape == (0, 5, 2)


def test_a_target_that_drifts_with_rho_1_stands_still():
    tokens, target = linear_prompts(8, 9, 4, drift=1.0, generator=generator())  # N > d: its kernel matrix is singular
    guess = regression.predict_ridge(tokens, 0.0, 1.0)
    assert torch.equal(guess, regression.predict_ridge(tokens)) and (guess - target).abs().max() < 1e-4


def test_a_half_life_too_short_for_floats_is_one_line():
    assert "half_life of at least 0.001" in fails(train.main, "--data", "linear", "--half-life", "1e-4")
    assert OneLayerS6(2, 2, 1e-3).gate.bias.isfinite().all()


@pytest.mark.parametrize("change", [("order", 1.5), ("order", "1"), ("seed", [0]), ("beta", None), ("prior", [0.0]),
                                    ("prior", ["0", "1"]), ("lr", {}), ("warmup", "x"), ("keep", 0), ("steps", 1e3)])
def test_other_types_in_config_json_are_one_line(change):
    run(*TINY, "--steps", "0", "--out", "a")
    config = json.loads(Path("a/config.json").read_text())
    config["args"][change[0]] = change[1]
    Path("a/config.json").write_text(json.dumps(config))
    for how in ("--eval", "--resume"):
        assert change[0] in fails(train.main, how, "--out", "a", "--batch", "4")


def test_a_checkpoint_without_its_optimizer_is_damaged():
    run(*TINY, "--steps", "0", "--out", "a")
    checkpoint = torch.load("a/model.pt", weights_only=True)
    torch.save({key: checkpoint[key] for key in ("model", "step")}, "a/model.pt")
    assert "damaged" in fails(train.main, "--resume", "--out", "a", "--steps", "3")


@pytest.mark.parametrize("last", ["null", '{"step": "x"}', '{"gap": 1}'])
def test_figures_launch_a_run_with_a_damaged_log_again(last, monkeypatch):
    run(*TINY, "--steps", "0", "--out", "a")
    monkeypatch.setattr(figures, "run_folder", lambda flags, seed: Path("a"))
    assert figures.finished_run("--steps 0", 0)
    Path("a/log.jsonl").write_text(last)
    assert figures.finished_run("--steps 0", 0) is None


@pytest.mark.parametrize("rows", [[], 3, "rows", [3], [{}], [dict(values=[{}])], [dict(values=[{}], minutes="x")]])
def test_figures_call_damaged_results_damaged(rows, capsys):
    Path("fig1b.json").write_text(json.dumps(dict(rows=rows)))
    assert "damaged" in fails(figures.main, "fig1b", "--results", ".")
    figures.main(["fig1b", "--results", ".", "--list"])
    assert "not run yet" in capsys.readouterr().out
    assert "between 1 and 1000" in fails(figures.main, "--seeds", 10**12, "--list")  # a list of them fills the memory


def test_a_corpus_with_damaged_counts_is_one_line():
    Path("text.txt").write_text("words and more " * 20)
    wikitext.main(["--source", "text.txt"])
    table = json.loads(Path("corpus/corpus.json").read_text())
    for counts in (dict(tokens=30, words=6), dict(tokens=30, words="6", bytes=30)):
        table["splits"]["validation"] = counts
        Path("corpus/corpus.json").write_text(json.dumps(table))
        assert "damaged" in fails(train.main, "--data", "wikitext", "--length", 4)


def test_bad_text_leaves_no_parent_folder_and_no_path_is_too_long():
    Path("empty").touch()
    for out in ("x/y", "x" * 300):
        fails(wikitext.main, "--train", "empty", "--test", "empty", "--out", out)


@pytest.mark.parametrize("argv", ["--bogus", "--threads x", "--threads 99999999999", "scan --out file/b.json",
                                  "scan --out ."])
def test_bad_input_to_bench_is_one_line_before_anything_is_measured(argv, monkeypatch):
    Path("file").touch()
    monkeypatch.setattr(bench, "bench_scan", lambda *args: pytest.fail("measured"))
    assert fails(bench.main, *argv.split()).startswith("bench.py: error: ")


# What a plausible slip would change, in all files


def test_k_tokens_after_a_switch_are_free_and_no_more(monkeypatch):
    always_0 = lambda n, S, k, *_: F.one_hot(torch.zeros(n, S**k, dtype=torch.long), S).float()
    monkeypatch.setattr("markov.sample_kernel", always_0)  # over random kernels every token is uniform
    x = sample_switching(4000, 12, 3, 2, p_switch=0.1, generator=generator())
    t = torch.arange(12)
    since = t - torch.where(x == 3, t, -1).cummax(1).values  # 1 for the first token, also of the chain
    for n in range(1, 6):
        here = x[(since == n) & (x < 3)]
        assert (F.one_hot(here, 3).double().mean(0) - 1 / 3).abs().max() < 0.03 if n <= 2 else not here.any()


def test_neighbouring_heads_share_a_group():
    x, log_a, b, c = random_inputs(H=4, G=2)
    b[:, :, 1] = 0
    for form in (scan_chunked, scan_sequential):
        y, h = form(x, log_a, b, c)
        assert y[:, :, :2].all() and h[:, :2].all() and not y[:, :, 2:].any() and not h[:, 2:].any()


@pytest.mark.parametrize("conv", ["xbc", "xb", "x", "none"])
def test_the_switch_names_what_is_convolved(conv):
    model, x = random_model(conv=conv, act="none", decay=False), tokens()
    before, after = model.internals(x), model.internals(torch.cat([(x[:, :1] + 1) % 3, x[:, 1:]], 1))
    changed = {name for name in "xbc" if not torch.equal(before[name][0][:, 1], after[name][0][:, 1])}
    assert changed == set(conv.replace("none", ""))


@pytest.mark.parametrize("name", ["mamba", "transformer"])
def test_dropout_is_off_in_evaluation_and_on_again_after_it(name):
    args = train.parse([*TINY, "--model", name, "--dropout", "0.5"])[0]
    data = train.MarkovData(args, torch.device("cpu"))
    model = train.make_model(args, data)
    off = [train.evaluate(model, data, train.autocast(args, data.device))["val"] for _ in range(2)]
    assert off[0] == off[1] and model.training and data.loss(model, data.test) != data.loss(model, data.test)


@pytest.mark.parametrize("task", ["markov", "linear", "single-index"])
def test_no_batch_comes_twice_and_none_is_held_out(task, monkeypatch):
    monkeypatch.setattr(train.MarkovData, "pool", 16)  # a batch is a pool, and as large as the held-out set
    monkeypatch.setattr(train.DATA[task], "held_out", 16)
    data = train.DATA[task](train.parse(["--data", task, "--batch", "16"])[0], torch.device("cpu"))
    drawn = [(part if task == "markov" else part[0]).clone() for part in (data.test, *map(data.batch, range(3)))]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


@pytest.mark.parametrize("flags", ["--beta 0.3", "--order 2", "--states 3 --beta 5", "--beta 0.3 --switch 0.1"])
def test_bayes_is_the_optimum_of_the_chains_that_are_drawn(flags):
    args = train.parse([*TINY, *flags.split()])[0]
    exact = mambazero.laplace_switching(args.states, args.beta, args.switch) if args.switch else \
        mambazero.laplace_any_order(args.states, args.order, args.beta)
    assert abs(train.MarkovData(args, torch.device("cpu")).evaluate(exact)["gap"]) < 1e-6


def test_every_update_has_its_own_batches_a_clipped_gradient_and_its_rates(monkeypatch):
    batch, step, asked, seen = train.MarkovData.batch, torch.optim.AdamW.step, [], []

    def watched(optimizer, *args):
        groups = optimizer.param_groups
        grads = torch.cat([p.grad.flatten() for group in groups for p in group["params"]])
        seen.append(([group["lr"] for group in groups], [group["weight_decay"] for group in groups], grads.norm()))
        return step(optimizer, *args)

    monkeypatch.setattr(train.MarkovData, "batch", lambda data, index: asked.append(index) or batch(data, index))
    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    run(*TINY, "--model", "mamba", "--accumulate", 2, "--lr", 0.01, "--weight-decay", 0.3, "--clip", 1e-3)
    rates, decays, norms = zip(*seen)
    assert asked == [0, *range(20)] and len(seen) == 10  # step 0 shows the first batch
    assert rates[0][0] == 0.01 and all(rate == [rate[0], rate[0], 0.1 * rate[0]] for rate in rates)
    assert set(map(tuple, decays)) == {(0.3, 0.0, 0.0)} and max(norms) < 1.001e-3


def test_initial_weights_follow_the_seed():
    first, again, other = (train.make_model(train.parse(["--seed", s])[0], types.SimpleNamespace(fields={}))
                           for s in "001")
    assert same(first.state_dict(), again.state_dict()) and not same(first.state_dict(), other.state_dict())


def test_val_is_a_mean_over_chains_whatever_parts_they_come_in(monkeypatch):
    monkeypatch.setattr(train.MarkovData, "held_out", 3)
    data, model = train.MarkovData(train.parse(TINY)[0], torch.device("cpu")), random_model(vocab=2)
    data.args.length = 2**16  # as if: then a part is two chains
    assert data.evaluate(model)["val"] == pytest.approx(data.loss(model, data.test).item(), rel=1e-12)


def test_words_are_learned_on_the_training_text_only():
    for split, text in dict(train="a b", validation="c c c", test="d d d").items():
        Path(split).write_text(text)
    wikitext.main([f"--{split}={split}" for split in ("train", "validation", "test")] + ["--tokenizer", "words"])
    assert json.loads(Path("corpus/corpus.json").read_text())["words"] == ["<unk>", " <unk>", "\n", "a", " b"]


def test_step_and_forgetting_are_read_off_a_layer_set_by_hand():
    run_ = finished(online_gd(4, 0.1, 0.2).float(), "--data linear")  # w <- 0.8 w + 0.1 y x
    found, weights_ = figures.along_context(run_), 0.1 * 0.8 ** torch.arange(7, -1, -1)
    assert found["formula"][found["k"].index(8)] == pytest.approx(loss_of_weights(weights_, 4), rel=1e-5)
    [line] = regression.LinearData(run_.args, torch.device("cpu")).explain(run_.model)
    assert "a = 0.8000" in line and "eta = 0.1000" in line


@pytest.mark.parametrize("command, prompts", [("linear --noise 1 --length 4", 2000), ("single-index", 64)])
def test_the_gap_counts_from_the_best_reference(command, prompts, monkeypatch):
    args = train.parse(["--data", *command.split()])[0]
    monkeypatch.setattr(train.DATA[args.data], "held_out", prompts)
    data = train.DATA[args.data](args, torch.device("cpu"))
    *others, best = (data.error(guess).mean().item() for guess in data.guesses.values())
    assert data.bayes == best < 0.95 * min(others)


def test_report_has_model_and_references_on_the_same_pairs():
    data = regression.LinearData(train.parse(["--data", "linear"])[0], torch.device("cpu"))
    data.explain = lambda model: ()
    rows = [text.split() for text in data.report(regression.predict_lms)][1:-2]  # pairs, model, zero, one step, LMS, ..
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16, 32, 50] and all(row[1] == row[4] for row in rows)


def test_without_selection_only_labels_reach_the_state():
    tokens, other = torch.randn(2, 4, 6, 4, generator=generator())
    other[..., -1] = tokens[..., -1]
    for selective in (True, False):
        layer = OneLayerS6(3, 7, selective=selective)
        assert torch.equal(layer.state(tokens), layer.state(other)) != selective
        layer(tokens).square().mean().backward()
        assert layer.state(tokens).any() and layer.write.bias.grad.any() and layer.read.bias.grad.any()


def test_mixers_and_norm_of_one_layer():
    x, y, xq, *_ = (v.double() for v in single_index_prompts(2, 9, 3, 2, queries=5, generator=generator()))
    phi, phi_q = F.pad(x, (1, 0), value=1.0), F.pad(xq, (1, 0), value=1.0)

    def read(**fields):
        torch.manual_seed(0)
        model = single_index.OneLayer(single_index.OneLayerConfig(inputs=4, heads=3, **fields)).double()
        for p in model.parameters():
            p.data.normal_()
        model.mlp = torch.nn.Unflatten(-1, (-1, 1))  # instead of the MLP's output the readouts themselves
        return model.gamma.detach(), model.w.detach(), model.read(x, y, xq).detach()  # (B, Q, 3 or 6)

    gamma, w, s = read(mixer="softmax")
    for h in range(3):
        A = (phi_q @ (gamma[h] * phi).mT + w[h] * y[:, None]).softmax(-1)  # (B, Q, N)
        assert (s[..., h] - (A @ y[..., None])[..., 0]).abs().max() < 1e-12
    gamma, _, s = read(mixer="linear", norm=False)
    for h, values in enumerate([y / 9] * 3 + [torch.ones_like(y) / 9] * 3):
        state = gamma[h] * (values[..., None] * phi).sum(1)  # (B, 4)
        assert (s[..., h] - (phi_q @ state[..., None])[..., 0]).abs().max() < 1e-12
    plain, normed = read(norm=False)[2], read(norm=True)[2]
    size = torch.linalg.lstsq(phi_q, plain).solution.norm(dim=1, keepdim=True)  # (B, 1, 6), of the states
    assert (normed * size - plain).abs().max() < 1e-10


def test_stage_two_does_not_depend_on_the_scale_of_its_readouts(monkeypatch):
    (x, y, xq, *_), real = single_index_prompts(3, 20, 4, 2, generator=generator()), single_index.readout
    heads, guesses = [(torch.ones(15), (0.3, -0.3), -2.0)], []
    for factor in (1, 2**10):
        monkeypatch.setattr(single_index, "readout", lambda *a, factor=factor: factor * real(*a))
        predict = single_index.stage_two(4, 2, 20, heads, contexts=500, width=32, generator=generator(1))
        guesses.append(predict(x, y, xq))
    assert torch.equal(*guesses)


def test_lines_hold_their_own_rows_and_spread_over_seeds():
    rows = [dict(line=line, x=x, values=[dict(gap=10 * x + seed), dict(gap=10 * x - seed)])
            for line, x, seed in (("a", 1, 1), ("b", 2, 2), ("a", 3, 3))]
    lines = figures.over_x(rows, "gap")
    assert {line: (x, y.tolist()) for line, (x, y) in lines.items()} == \
        {"a": ([1, 3], [[11, 33], [9, 27]]), "b": ([2], [[22], [18]])}
    rows = [dict(line="a", values=[dict(t=[1, 2], p=[3, 4]), dict(t=[1, 2], p=[5, 6])])]
    assert figures.within(rows, "t", "p") == {"a": ([1, 2], [[3, 4], [5, 6]])}
    assert "  b (2)  2: 20 ± 3" in figures.table([figures.panel("", "", "", lines)])  # 2 sqrt 2


def test_runs_are_told_apart_by_what_they_count():
    values = {kind: [dict(distance=1.0), dict(distance=d)] for kind, d in (("successors", 0.1), ("predecessors", 0.9))}
    assert figures.by_solution([dict(values=list(values.values()))]) == {kind: [v] for kind, v in values.items()}


def test_every_seed_is_measured(monkeypatch, tmp_path):
    monkeypatch.setitem(figures.RUNS, "fig4", (3, lambda run_: run_.args.seed, {("a", 0): "untrained"}))
    figures.compute(["fig4"], figures.make_parser().parse_args(["--results", str(tmp_path)]))
    assert json.loads((tmp_path / "fig4.json").read_text())["rows"][0]["values"] == [0, 1, 2]


def test_distance_of_a_coin_is_a_quarter():
    coin = finished(lambda x: torch.full((*x.shape, 2), math.log(0.5)))  # E |p - 1/2| = 1/4 for p uniform
    assert figures.outcome(coin)["distance"] == pytest.approx(0.25, abs=0.03)
    one, [x] = figures.one_chain(coin), figures.chains(coin, 1)
    assert not x[[t - 1 for t in one["t"]]].any() and len(one["t"]) == (x == 0).sum() == len(one["p"])
