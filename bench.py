"""
Speed and memory, measured in one run beside the alternatives.

    achieved / floor,   floor = max(FLOPs / matmul rate, bytes / copy bandwidth)         # Roofline

Both rates are measured here, on this machine. Times are medians of the repeats stated, after a warm-up whose time (with
compilation, where there is any) stands in its own column; forward and forward+backward apart. Compare ratios between
rows of one run, not milliseconds between machines.

Sections:
    scan     ssm.py's forms against the Mamba-2 paper's Listing 1 at three shapes, and linear growth with T
    train    one training step of each preset, eager and compiled, and the share of its parts
    data     the pooled sampler against a multinomial draw per step
    decode   `step` early and late, batches 1 and 64
    memory   peak of forward+backward, ours and Listing 1

Run me:     python bench.py [scan train data decode memory] [--device cuda] [--threads 2] [--peers]
Change me:  another peer is another row in `bench_scan`.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F

import train
from markov import sample_chain, sample_kernel
from ssm import scan_chunked, scan_inside, scan_sequential

SHAPES = [(64, 256, 1, 32, 16), (4, 2048, 8, 64, 64), (1, 8192, 8, 64, 128)]  # B, T, H, P, N; G = 1
ROWS = []  # everything printed, for the JSON file


def measure(f, repeats=7, device="cpu"):
    """(milliseconds of the first call, median of the repeats) of f(), the device synchronised around each."""
    def once():
        start = time.perf_counter()
        f()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    first = once()
    return first, statistics.median(once() for _ in range(repeats))


def row(section, name, **numbers):
    """Print one line of the table and keep it."""
    ROWS.append(dict(section=section, name=name, **numbers))
    shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
    print(f"{section:7s} {name:40s} {shown}", flush=True)


def listing_1(x, log_a, b, c, chunk):
    """The form of the Mamba-2 paper's Listing 1, in our words: b and c copied to all heads, and every decay matrix,
    inside and between chunks, the exponential of a cumulative sum masked row by row (Q x Q sums of Q terms)."""
    def segment_sum(v):  # (..., Q) -> (..., Q, Q)
        Q = v.shape[-1]
        lower = torch.ones(Q, Q, dtype=torch.bool, device=v.device).tril(-1)
        sums = v[..., None].expand(*v.shape, Q).masked_fill(~lower, 0).cumsum(-2)
        return sums.masked_fill(~lower.logical_or(torch.eye(Q, dtype=torch.bool, device=v.device)), -torch.inf)

    (B, T, H, P), R = x.shape, x.shape[2] // b.shape[2]
    cut = lambda v: v.unflatten(1, (T // chunk, chunk))
    x, b, c = cut(x), cut(b.repeat_interleave(R, 2)), cut(c.repeat_interleave(R, 2))  # (B, K, Q, H, P or N)
    log_a = cut(log_a).permute(0, 3, 1, 2)  # (B, H, K, Q)
    sums = log_a.cumsum(-1)  # (B, H, K, Q)
    y = torch.einsum("bkihn,bkjhn,bhkij,bkjhp->bkihp", c, b, segment_sum(log_a).exp(), x)
    states = torch.einsum("bkjhn,bhkj,bkjhp->bkhpn", b, (sums[..., -1:] - sums).exp(), x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    states = torch.einsum("bhzk,bkhpn->bzhpn", segment_sum(F.pad(sums[..., -1], (1, 0))).exp(), states)
    y = y + torch.einsum("bkihn,bkhpn,bhki->bkihp", c, states[:, :-1], sums.exp())
    return y.flatten(1, 2), states[:, -1]


def inputs(shape, device, dtype=torch.float32):
    """Random scan inputs that need gradients, one group."""
    B, T, H, P, N = shape
    g = torch.Generator(device).manual_seed(0)
    r = lambda *s: torch.randn(*s, generator=g, device=device)
    log_a = -0.1 * torch.rand(B, T, H, generator=g, device=device)
    return [v.to(dtype).requires_grad_() for v in (r(B, T, H, P), log_a, r(B, T, 1, N), r(B, T, 1, N))]


def both_ways(f, args):
    """f forward and backward, gradients dropped."""
    def run():
        y, _ = f(*args)
        torch.autograd.grad(y, args, torch.ones_like(y))

    return run


def rates(device):
    """(FLOP/s of a large float32 product, bytes/s of a large copy) on this device."""
    a = torch.randn(1024, 1024, device=device)
    big = torch.randn(2**25, device=device)
    out = torch.empty_like(big)
    product = measure(lambda: a @ a, 9, device)[1] / 1e3
    copy = measure(lambda: out.copy_(big), 9, device)[1] / 1e3
    return 2 * 1024**3 / product, 2 * 4 * 2**25 / copy


def floor_ms(shape, device, rate, bandwidth):
    """Least time of forward+backward: the chunk length with the fewest FLOPs, each input and gradient moved once."""
    B, T, H, P, N = shape
    flops = min(3 * 2 * B * T * H * (Q * P + Q * N / H + 2 * P * N) for Q in (1, 2, 4, 8, 16, 32, 64, 128))
    moved = 4 * B * T * (4 * H * P + 3 * H + 6 * N)
    return 1e3 * max(flops / rate, moved / bandwidth)


def bench_scan(device, peers):
    """Our forms, Listing 1 and peers at each shape; the sequential loop; growth with T."""
    rate, bandwidth = rates(device)
    row("scan", "this machine", gflops=rate / 1e9, gbytes_per_s=bandwidth / 1e9)
    compiled = torch.compile(scan_inside, fullgraph=True)
    for shape in SHAPES:
        args, name = inputs(shape, device), str(shape).replace(" ", "")
        floor = floor_ms(shape, device, rate, bandwidth)
        forms = {f"Listing 1, chunk {Q}": lambda *a, Q=Q: listing_1(*a, Q) for Q in (32, 64, 128, 256)}
        forms |= {"chunked, eager": scan_chunked, "chunked, compiled": lambda *a: scan_chunked(*a, inside=compiled)}
        if peers:
            forms |= peer_forms(device)
        y0, best = scan_chunked(*args)[0], None
        for label, f in forms.items():
            try:
                error = ((f(*args)[0] - y0).abs().max() / y0.abs().max()).item()
                _, forward = measure(lambda: f(*args), 5, device)
                first, total = measure(both_ways(f, args), 5, device)
            except Exception as failure:
                row("scan", f"{name} {label}", failed=str(failure).strip().splitlines()[0][:60])
                continue
            if label.startswith("Listing"):
                best = min(best or total, total)
            row("scan", f"{name} {label}", first_ms=first, forward_ms=forward, total_ms=total, over_floor=total / floor,
                speedup=best / total, difference=error)
    args = inputs((1, 512, 1, 16, 16), device)
    row("scan", "sequential, T=512", total_ms=measure(both_ways(scan_sequential, args), 3, device)[1])
    row("scan", "chunked, T=512", total_ms=measure(both_ways(scan_chunked, args), 7, device)[1])
    before = None
    for T in (1024, 2048, 4096, 8192, 16384):
        _, ms = measure(both_ways(scan_chunked, inputs((1, T, 4, 64, 64), device)), 5, device)
        row("scan", f"growth, T={T}", total_ms=ms, ratio=ms / before if before else 1.0)
        before = ms


def peer_forms(device):
    """Public scans, where installed: name -> f(x, log_a, b, c) -> (y, h)."""
    found = {}
    try:
        from fla.ops.simple_gla import chunk_simple_gla

        def fla(x, log_a, b, c):
            expand = lambda v: v.expand(-1, -1, x.shape[2], -1)
            return chunk_simple_gla(expand(c), expand(b), x, log_a, scale=1.0, output_final_state=True)

        found["flash-linear-attention, Triton"] = fla
    except ImportError:
        row("scan", "flash-linear-attention", failed="not installed")
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        def mamba_ssm(x, log_a, b, c):  # its decay is exp(A dt): A = -1 and dt = -log_a, with x divided by dt
            A = -torch.ones(x.shape[2], device=x.device)
            return mamba_chunk_scan_combined(x / -log_a[..., None], -log_a, A, b, c, 64), None

        found["mamba_ssm, Triton"] = mamba_ssm
    except ImportError:
        row("scan", "mamba_ssm", failed="not installed")
    return found


def bench_train(device, peers):
    """A training step of each preset, eager and compiled, and what its parts take."""
    for preset in ("mambazero", "mamba"):
        args = train.make_parser().parse_args(["--model", preset])
        data = train.MarkovData(args, torch.device(device))
        model = train.make_model(args, data).to(device)
        optimizer = train.make_optimizer(model, args)
        params, x = list(model.parameters()), data.batch(0)

        def step(forward):
            data.loss(forward, x).backward()
            torch.nn.utils.clip_grad_norm_(params, args.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        _, eager = measure(lambda: step(model), 15, device)
        first, compiled = measure(lambda: step(fast), 15, device) if (fast := torch.compile(model)) else (0, 0)
        row("train", f"{preset}, B=64 T=256 d=16, step", eager_ms=eager, compiled_ms=compiled, compile_s=first / 1e3)
        block, cfg = model.blocks[0], model.config
        E, N = block.E, block.GN
        u = torch.randn(64, 257, E + 2 * N, device=device, requires_grad=True)
        from mambazero import causal_conv

        conv = lambda: causal_conv(u, block.conv_weight, block.conv_bias).sum().backward()
        scan_args = inputs((64, 256, 1, E, cfg.state), device)
        draw = lambda: data.sample(64 * data.pool_batches, train.stream(0, "bench", 0, device))

        def update():
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

        for p in params:
            p.grad = torch.zeros_like(p)
        parts = dict(scan=measure(both_ways(scan_chunked, scan_args), 9, device)[1], conv=measure(conv, 9, device)[1],
                     clip_and_adamw=measure(update, 9, device)[1],
                     data=measure(draw, 3, device)[1] / data.pool_batches)
        row("train", f"{preset}, parts in ms", **parts, rest=eager - sum(parts.values()))
        optimizer.zero_grad(set_to_none=True)


def bench_data(device, peers):
    """Tokens per second of the pooled sampler and of one multinomial draw per step."""
    g = torch.Generator(device).manual_seed(0)
    for k in (1, 3):
        P = sample_kernel(4096, 2, k, generator=g, device=device)

        def naive():  # one multinomial draw per step and batch of 64
            rows, context = P[:64].reshape(-1, 2), torch.zeros(64, dtype=torch.long, device=device)
            base = torch.arange(64, device=device) * 2**k
            for _ in range(257):
                token = torch.multinomial(rows[base + context], 1, generator=g)[:, 0]
                context = (2 * context + token) % 2**k

        _, slow = measure(naive, 5, device)
        _, pooled = measure(lambda: sample_chain(P, 257, g), 5, device)
        slow, pooled = 64 * 257 / slow / 1e3, 4096 * 257 / pooled / 1e3
        row("data", f"order {k}, million tokens/s", multinomial=slow, pooled=pooled, ratio=pooled / slow)


def bench_decode(device, peers):
    """Milliseconds per token of `step`, early and late in a sequence."""
    args = train.make_parser().parse_args(["--model", "mamba"])
    model = train.make_model(args, train.MarkovData(args, torch.device("cpu"))).to(device).eval()
    for B in (1, 64):
        x = torch.randint(2, (B, 8192), device=device)
        with torch.no_grad():
            ms = {}
            for position in (128, 8192):
                _, state = model.prefill(x[:, :position])

                def steps():
                    s = state
                    for t in range(50):
                        _, s = model.step(x[:, t], s)

                ms[position] = measure(steps, 9, device)[1] / 50
        row("decode", f"batch {B}", ms_at_128=ms[128], ms_at_8192=ms[8192], ratio=ms[8192] / ms[128],
            tokens_per_s=1e3 * B / ms[8192])


def _peak(form, shape, device, queue):
    """In a process of its own: peak memory of one forward+backward above what stood before, in MiB."""
    import resource

    torch.set_num_threads(1)
    f = scan_chunked if form == "ours" else lambda *a: listing_1(*a, 64)
    both_ways(f, inputs((1, 128, 1, 4, 4), device))()  # libraries loaded
    args = inputs(shape, device)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        both_ways(f, args)()
        queue.put((torch.cuda.max_memory_allocated() - before) / 2**20)
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        both_ways(f, args)()
        queue.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10)


def bench_memory(device, peers):
    """Peak memory of one forward+backward, ours and Listing 1."""
    context = multiprocessing.get_context("spawn")
    for shape in SHAPES:
        peak = {}
        for form in ("Listing 1, chunk 64", "ours"):
            queue = context.Queue()
            process = context.Process(target=_peak, args=(form, shape, device, queue))
            process.start()
            peak[form] = queue.get()
            process.join()
        ratio = peak["ours"] / peak["Listing 1, chunk 64"]
        row("memory", f"{str(shape).replace(' ', '')}, peak MiB", **peak, ratio=ratio)


def main(argv=None):
    """Run the sections named (all if none) and write results/bench_DEVICE.json."""
    sections = dict(scan=bench_scan, train=bench_train, data=bench_data, decode=bench_decode, memory=bench_memory)
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(sections)}; default all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; 1: ratios hold on a shared machine")
    parser.add_argument("--peers", action="store_true", help="also flash-linear-attention and mamba_ssm")
    parser.add_argument("--out", type=Path, default=None, help="JSON file (default results/bench_DEVICE.json)")
    args = parser.parse_args(argv)
    unknown = set(args.sections) - set(sections)
    if unknown or args.threads < 1 or (args.device == "cuda" and not torch.cuda.is_available()):
        wrong = (f"no section {', '.join(unknown)}; there are {', '.join(sections)}" if unknown else
                 "--threads must be at least 1" if args.threads < 1 else "--device cuda needs a CUDA device")
        print(f"bench.py: error: {wrong}", file=sys.stderr)
        raise SystemExit(2)
    torch.set_num_threads(args.threads)
    train.keep_freed_memory()  # for all forms alike
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    print(f"{machine}, {args.threads} threads, torch {torch.__version__}, {date.today()}")
    for name in args.sections or sections:
        sections[name](args.device, args.peers)
    out = args.out or Path(__file__).parent / "results" / f"bench_{args.device}.json"
    out.parent.mkdir(exist_ok=True)
    table = dict(machine=machine, threads=args.threads, torch=torch.__version__, date=str(date.today()), rows=ROWS)
    out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
