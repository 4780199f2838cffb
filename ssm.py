"""
The linear recurrence of Mamba, three ways.

    h_t = a_t h_{t-1} + x_t b_t^T,    y_t = h_t c_t                                   # State recurrence

Three functions compute it and agree to rounding: `scan_sequential` is the definition, one loop over time;
`scan_chunked` is the same in parallel, as matrix products over chunks of Q tokens; `scan_step` is one position with a
carried state, for decoding. Models call `scan`: eager on a CPU, one fused graph through torch.compile on a GPU.

Why chunks: unrolled, y_i = sum_{j<=i} L_ij (c_i . b_j) x_j with L_ij = a_{j+1} ... a_i. That is attention without a
softmax: quadratic in T, but all matrix products. Inside short chunks we pay that; between chunks the state h carries
everything (state space duality, Mamba-2, Section 6). The states at the chunk borders obey the same recurrence with
T/Q steps, so they are solved by the same trick one level up.

Glossary (code: paper, Section 2)
    x      (B, T, H, P)   x~_t, the input, already times Delta_t      B batch, T length, H heads, P head width
    log_a  (B, T, H)      log a_t = -a Delta_t <= 0, the log of the decay; -inf is a hard reset
    b, c   (B, T, G, N)   b_t, c_t: what to write, what to read       N state width, G groups: head h reads h // (H//G)
    h      (B, H, P, N)   H_t, the state; h0 is the state before the first token, zero if not given
    y      (B, T, H, P)   y_t
    L      (..., Q, Q)    the decay from column to row, lower triangular

Run me:     python ssm.py
Change me:  another recurrence (say a vector decay) is another `scan_step`, and `scan_inside` must agree with it.
"""

import math
import warnings

import torch
import torch.nn.functional as F


def scan_sequential(x, log_a, b, c, h0=None):
    """The recurrence as it is written, one step a token: the reference for the others. Returns y, the final h."""
    _check(x, log_a, b, c, h0)
    ys, h = [], h0
    for t in range(x.shape[1]):
        y, h = scan_step(x[:, t], log_a[:, t], b[:, t], c[:, t], h)
        ys.append(y)
    return torch.stack(ys, 1), h


def scan_step(x, log_a, b, c, h=None):
    """One position: x (B, H, P), log_a (B, H), b and c (B, G, N), h (B, H, P, N) -> y (B, H, P), the new h.

    The state is float32 for half-precision inputs, float64 for float64; the h passed in is left as it was.
    """
    if h is not None and h.shape != (*x.shape, b.shape[-1]):
        raise ValueError(f"h must be {(*x.shape, b.shape[-1])}, got {tuple(h.shape)}")
    dtype = x.dtype
    x, log_a, b, c = (v.to(_precise(dtype)) for v in (x, log_a, b, c))
    b, c = (v.repeat_interleave(x.shape[1] // v.shape[1], dim=1) for v in (b, c))  # (B, H, N)
    xb = x[..., :, None] * b[..., None, :]  # (B, H, P, N)
    h = xb if h is None else log_a.exp()[..., None, None] * h + xb  # State recurrence
    return (h * c[..., None, :]).sum(-1).to(dtype), h


def scan_chunked(x, log_a, b, c, h0=None, chunk=None, inside=None):
    """The same recurrence as matrix products over chunks of Q = chunk tokens; any T, any chunk. Returns y, final h.

    chunk=None picks a good length; inside=None is `scan_inside`, or pass its compiled form. y has the dtype of x; what
    happens inside is float32 (float64 if x is float64). Raises ValueError if the shapes do not fit.
    """
    _check(x, log_a, b, c, h0)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    (B, T, H, P), (G, N), dtype, on_gpu = x.shape, b.shape[2:], x.dtype, x.device.type == "cuda"
    Q = min(T, chunk or _chunk_length(P, N, on_gpu))
    with torch.autocast(x.device.type, enabled=False):  # autocast would round the products to half precision
        # Cut time into K chunks. The tail is padded with steps that do nothing: x = 0 and a = 1.
        x, log_a, b, c = (_cut(v.to(_precise(dtype)), Q) for v in (x, log_a, b, c))  # each (B, K, Q, ..)
        parts = x.unflatten(3, (G, -1)), log_a.unflatten(3, (G, -1)), b.transpose(2, 3), c.transpose(2, 3)
        h = None if h0 is None else h0.to(x.dtype).unflatten(1, (G, -1)).permute(0, 1, 4, 2, 3)  # (B, G, N, R, P)
        # A GPU takes all chunks at once; on a CPU what 256 tokens need stays in the cache.
        ys, size = [], x.shape[1] if on_gpu else max(1, 256 // Q)
        for part in zip(*(v.split(size, dim=1) for v in parts)):
            y, h = (inside or scan_inside)(*part, h)
            ys.append(y)
        y = (ys[0] if len(ys) == 1 else torch.cat(ys, 1)).reshape(B, -1, H, P)[:, :T]
    return y.to(dtype), h.permute(0, 1, 3, 4, 2).reshape(B, H, P, N)


def scan_inside(x, log_a, b, c, h0=None):
    """The parallel scan itself, in four stages; Mamba-2 (Dao & Gu 2024), Section 6. R = H/G heads share b and c.

    x (B, K, Q, G, R, P), log_a (B, K, Q, G, R), b and c (B, K, G, Q, N), h0 (B, G, N, R, P) -> y like x, h like h0.
    Heads that share b and c stand side by side as the R P columns of one large product: few large products are faster
    than many small ones.
    """
    R, P = x.shape[4:]
    L, from_start = _decays(log_a.movedim(2, -1))  # (B, K, G, R, Q, Q), (B, K, G, R, Q)
    to_end, total = L[..., -1, :], from_start[..., -1]

    # 1. Inside a chunk: y_i = sum_{j<=i} L_ij (c_i . b_j) x_j
    y = (L * (c @ b.mT)[:, :, :, None]) @ x.permute(0, 1, 3, 4, 2, 5)  # (B, K, G, R, Q, P)
    y = y.permute(0, 1, 4, 2, 3, 5)  # (B, K, Q, G, R, P)
    # 2. What a chunk adds to the state: sum_j b_j (a_{j+1} ... a_Q x_j)^T
    decayed = x * to_end.movedim(-1, 2)[..., None]  # (B, K, Q, G, R, P)
    added = b.mT @ decayed.transpose(2, 3).flatten(4)  # (B, K, G, N, R P)
    # 3. The state that enters each chunk: the same recurrence, with a chunk for a step
    h, final = _carry(added.unflatten(4, (R, P)), total[:, :, :, None, :, None], h0)
    # 4. Its part of the output: y_i += a_1 ... a_i h c_i
    read = (c @ h.flatten(4)).unflatten(4, (R, P)).transpose(2, 3)  # (B, K, Q, G, R, P)
    return (from_start.movedim(-1, 2)[..., None] * read).add_(y), final


GROUP = 16  # steps of one loop of _carry


def _carry(added, a, h=None):
    """The state before each of K steps of h_k = a_k h_{k-1} + added_k, and after the last; added (B, K, ..), h (B, ..).

    Up to GROUP steps are one loop. More are cut into groups, and the states between the groups are the same problem
    again, GROUP times shorter: a GPU needs one short loop at each of a few levels, over all groups at once.
    """
    K = added.shape[1]
    h = torch.zeros_like(added[:, 0]) if h is None else h
    size = GROUP if K > GROUP else K
    if torch.compiler.is_compiling() and K < GROUP:  # powers of two: a handful of graphs serves every K
        size = next(n for n in (1, 2, 4, 8, 16) if n >= K)
    if pad := -K % size:
        pad = (0, 0) * (added.dim() - 2) + (0, pad)
        added, a = F.pad(added, pad), F.pad(a, pad, value=1.0)
    if added.shape[1] <= GROUP:
        before, h = _steps(added, a, h, dim=1)
        return before[:, :K], h
    added, a = added.unflatten(1, (-1, GROUP)), a.unflatten(1, (-1, GROUP))  # (B, K/GROUP, GROUP, ..)
    total, decay = added[:, :, 0], a[:, :, 0]  # what a group does to a state: h -> decay h + total
    for added_j, a_j in list(zip(added.unbind(2), a.unbind(2)))[1:]:
        total, decay = torch.addcmul(added_j, a_j, total), a_j * decay
    before, h = _carry(total, decay, h)
    return _steps(added, a, before, dim=2)[0].flatten(1, 2)[:, :K], h


def _steps(added, a, h, dim):
    """h before each step along dim, stacked there, and h after the last. Slices by unbind: indexing added[:, k] would
    give each step a gradient of the size of all."""
    before = []
    for added_k, a_k in zip(added.unbind(dim), a.unbind(dim)):
        before.append(h)
        h = torch.addcmul(added_k, a_k, h)  # State recurrence, over chunks
    return torch.stack(before, dim), h


def _cut(v, Q):
    """(B, T, ..) -> (B, K, Q, ..), T padded with zeros to K Q."""
    if pad := -v.shape[1] % Q:  # padding by 0 would copy
        v = F.pad(v, (0, 0) * (v.dim() - 2) + (0, pad))
    return v.unflatten(1, (-1, Q))


def _decays(log_a):
    """From log_a (.., Q): L (.., Q, Q) and from_start (.., Q) = a_1 ... a_i.

    L_ij = exp(sum of log_a over j+1..i), 0 above the diagonal: the mask comes before exp, since masking inf afterwards
    turns gradients into NaN. The sum is a difference of cumulative sums, which would lose decays of 1e-3 behind a reset
    of -1e6. Two remedies: log_a is cut off where exp is exactly 0 anyway, and split into multiples of 1/16, whose sums
    are exact in float32, and a rest whose sums stay small.
    """
    log_a = log_a.clamp(min=-750.0 if log_a.dtype == torch.float64 else -110.0)
    coarse = (log_a.detach() * 16).round() / 16
    fine = (log_a - coarse).cumsum(-1)
    coarse = coarse.cumsum(-1)
    Q = log_a.shape[-1]
    above = torch.full((Q, Q), -math.inf, dtype=log_a.dtype, device=log_a.device).triu(1)
    L = (coarse[..., :, None] - coarse[..., None, :]).add_(above)
    L = (L + fine[..., :, None]).sub_(fine[..., None, :]).exp_()  # in place where autograd allows
    return L, (coarse + fine).exp()


def _chunk_length(P, N, on_gpu):
    """A power of two in 16..64, larger for larger states: Q x Q work inside chunks against P x N work between them."""
    if on_gpu:
        return 64  # large enough for the tensor cores
    return min(64, max(16, 2 ** round(math.log2(P * N / 4) / 2)))  # sqrt(P N) / 2, the fastest where measured


def _precise(dtype):
    """Half-precision inputs compute in float32: a decay rounded to 8 bits is wrong by 20% after 256 steps."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(x, log_a, b, c, h0):
    fits = x.dim() == b.dim() == 4 and 0 not in (*x.shape, *b.shape) and x.is_floating_point()
    if fits:
        (B, T, H, P), (G, N) = x.shape, b.shape[2:]
        fits = H % G == 0 and log_a.shape == (B, T, H) and b.shape == c.shape == (B, T, G, N)
    if not fits:
        raise ValueError(f"need x (B, T, H, P), log_a (B, T, H), b and c (B, T, G, N), no size 0, H a multiple of G; "
                         f"got {x.dtype} {tuple(x.shape)}, {tuple(log_a.shape)}, {tuple(b.shape)}, {tuple(c.shape)}")
    if h0 is not None and h0.shape != (B, H, P, N):
        raise ValueError(f"h0 must be {(B, H, P, N)}, got {tuple(h0.shape)}")


_compiled = None  # scan_inside through torch.compile, made at the first call on a GPU; or itself, once that failed


def scan(x, log_a, b, c, h0=None):
    """What models call: `scan_chunked`, on CUDA with its inside compiled (if that fails: one warning, then eager)."""
    global _compiled
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return scan_chunked(x, log_a, b, c, h0)
    _check(x, log_a, b, c, h0)  # before the try, where a wrong shape would pass for a failed compilation
    _compiled = _compiled or torch.compile(scan_inside, fullgraph=True, dynamic=True)
    try:  # compilation is lazy: what fails, fails at the first call, not where torch.compile wraps
        return scan_chunked(x, log_a, b, c, h0, inside=_compiled)
    except Exception as error:
        if _compiled is scan_inside:
            raise
        warnings.warn(f"torch.compile failed, the scan runs eagerly: {str(error).strip().splitlines()[0]}")
        _compiled = scan_inside
        return scan_chunked(x, log_a, b, c, h0)


if __name__ == "__main__":
    import time

    torch.manual_seed(0)
    B, T, H, P, G, N = 4, 1000, 4, 8, 2, 16
    x, log_a = torch.randn(B, T, H, P).double(), -torch.rand(B, T, H).double()
    b, c = torch.randn(B, T, G, N).double(), torch.randn(B, T, G, N).double()
    log_a[:, 500] = -math.inf  # a hard reset
    print(f"{B} sequences of {T} tokens, {H} heads of {P}, state {N}, reset half way, float64:\n")
    print(f"{'':32s}     time   largest difference to the definition")

    def report(name, f):
        f()
        start = time.perf_counter()
        y, h = f()
        ms = 1e3 * (time.perf_counter() - start)
        print(f"  {name:30s} {ms:8.1f} ms   y: {(y - y0).abs().max():.1e}   h: {(h - h0).abs().max():.1e}")

    y0, h0 = scan_sequential(x, log_a, b, c)
    report("sequential, the definition", lambda: scan_sequential(x, log_a, b, c))
    for chunk in (None, 1, 7, 64, 1000):
        report(f"chunked, chunk={chunk}", lambda: scan_chunked(x, log_a, b, c, chunk=chunk))

    def pieces():
        y1, h = scan_chunked(x[:, :300], log_a[:, :300], b[:, :300], c[:, :300])
        y2, h = scan_chunked(x[:, 300:], log_a[:, 300:], b[:, 300:], c[:, 300:], h)
        return torch.cat([y1, y2], 1), h

    report("in two pieces, state carried", pieces)
