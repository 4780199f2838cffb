"""
Speed and memory, measured in one run beside the alternatives.

    time / floor,   floor = max(FLOPs / matmul rate, bytes / copy bandwidth)             # Roofline

Both rates are measured here, on this machine. Alternatives take turns, 5 to 15 rounds; the median and the best are
kept, the first call (with compilation, where there is any) apart; ratios are of best times. Compare ratios within one
run, not milliseconds between machines. Letters and shapes are those of ssm.py.

Sections:
    scan     ssm.py's forms against the Mamba-2 paper's Listing 1 at three shapes, and linear growth with T
    train    one training step of each preset, eager and compiled, and what its parts take
    data     the pooled sampler against a multinomial draw per step
    decode   `step` early and late, batches 1 and 64
    memory   peak of forward+backward, ours and Listing 1

Run me:     python bench.py [scan train data decode memory] [--device cuda] [--threads 2] [--peers]
Change me:  another peer is a function beside `fla` and its line in PEERS.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import time
from collections import namedtuple
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F

import train
from mambazero import causal_conv
from markov import sample_chain, sample_kernel, stream
from ssm import scan_chunked, scan_inside, scan_sequential

SHAPES = [(64, 256, 1, 32, 16), (4, 2048, 8, 64, 64), (1, 8192, 8, 64, 128)]  # B, T, H, P, N; G = 1
ROWS = []  # everything printed, for the JSON file
Times = namedtuple("Times", "first median best")  # ms


def compare(forms, repeats=7, device="cpu"):
    """{name: Times} of the functions in forms {name: f}, `repeats` rounds over all of them, so that a busy moment of
    the machine meets each alike; the device is synchronised after each call."""
    def once(f):
        start = time.perf_counter()
        f()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    first = {name: once(f) for name, f in forms.items()}
    for f in forms.values():
        once(f)
    times = [{name: once(f) for name, f in forms.items()} for _ in range(repeats)]
    return {name: Times(first[name], statistics.median(t[name] for t in times), min(t[name] for t in times))
            for name in forms}


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
        on_or_above = torch.ones(Q, Q, dtype=torch.bool, device=v.device).triu()
        sums = v[..., None].expand(*v.shape, Q).masked_fill(on_or_above, 0).cumsum(-2)
        return sums.masked_fill(on_or_above.triu(1), -torch.inf)

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


def fla(x, log_a, b, c):
    """flash-linear-attention's scan; peers are imported where they are called, since hardly a machine has both."""
    from fla.ops.simple_gla import chunk_simple_gla

    expand = lambda v: v.expand(-1, -1, x.shape[2], -1)
    return chunk_simple_gla(expand(c), expand(b), x, log_a, scale=1.0, output_final_state=True)


def mamba_ssm(x, log_a, b, c):
    """The Mamba authors' scan. Its decay is exp(A dt): A = -1 and dt = -log_a, with x divided by dt."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    A = -torch.ones(x.shape[2], device=x.device)
    return mamba_chunk_scan_combined(x / -log_a[..., None], -log_a, A, b, c, 64), None


PEERS = {"flash-linear-attention, Triton": fla, "mamba_ssm, Triton": mamba_ssm}


def inputs(shape, device):
    """Random scan inputs that need gradients, one group."""
    B, T, H, P, N = shape
    g = torch.Generator(device).manual_seed(0)
    r = lambda *s: torch.randn(*s, generator=g, device=device)
    log_a = -0.1 * torch.rand(B, T, H, generator=g, device=device)
    return [v.requires_grad_() for v in (r(B, T, H, P), log_a, r(B, T, 1, N), r(B, T, 1, N))]


def both_ways(f, args):
    """f forward and backward, gradients dropped."""
    def run():
        y, _ = f(*args)
        torch.autograd.grad(y, args, torch.ones_like(y))

    return run


def rates(device):
    """(FLOP/s of a large float32 product, bytes/s of a large copy) on this device, at best."""
    a = torch.randn(1024, 1024, device=device)
    big = torch.randn(2**25, device=device)
    out = torch.empty_like(big)
    times = compare(dict(product=lambda: a @ a, copy=lambda: out.copy_(big)), 9, device)
    return 1e3 * 2 * 1024**3 / times["product"].best, 1e3 * 2 * 4 * 2**25 / times["copy"].best


def floor_ms(shape, device, rate, bandwidth):
    """Least time of forward+backward: the chunk length with the fewest FLOPs, each input and gradient moved once.

    A token costs a head Q P multiply-adds inside its chunk, Q N for scores that all heads share, and P N each to write
    and to read the state; a multiply-add is two FLOPs, and backward is twice forward.
    """
    B, T, H, P, N = shape
    flops = min(3 * 2 * B * T * H * (Q * P + Q * N / H + 2 * P * N) for Q in (1, 2, 4, 8, 16, 32, 64, 128))
    moved = 4 * B * T * (4 * H * P + 3 * H + 6 * N)
    return 1e3 * max(flops / rate, moved / bandwidth)  # Roofline


def bench_scan(device, peers):
    """Our forms, Listing 1 and peers at each shape; the sequential loop; growth with T."""
    rate, bandwidth = rates(device)
    row("scan", "this machine", gflops=rate / 1e9, gbytes_per_s=bandwidth / 1e9)
    for shape in SHAPES:
        torch._dynamo.reset()
        args, name = inputs(shape, device), str(shape).replace(" ", "")
        compiled = torch.compile(scan_inside, fullgraph=True)
        forms = {f"Listing 1, chunk {Q}": lambda *a, Q=Q: listing_1(*a, Q) for Q in (32, 64, 128, 256)}
        forms |= {"chunked, eager": scan_chunked, "chunked, compiled": lambda *a: scan_chunked(*a, inside=compiled)}
        forms |= PEERS if peers else {}
        y0, difference = scan_chunked(*args)[0], {}
        for label, f in list(forms.items()):
            try:
                difference[label] = ((f(*args)[0] - y0).abs().max() / y0.abs().max()).item()
            except Exception as failure:  # a peer that is not installed, a machine without a compiler
                row("scan", f"{name} {label}", failed=str(failure).strip().splitlines()[0][:60])
                del forms[label]
        forward = compare({label: lambda f=f: f(*args) for label, f in forms.items()}, 5, device)
        total = compare({label: both_ways(f, args) for label, f in forms.items()}, 9, device)
        listing = min(total[f"Listing 1, chunk {Q}"].best for Q in (64, 128, 256))
        for label, t in total.items():
            row("scan", f"{name} {label}", first_ms=t.first, forward_ms=forward[label].best, median_ms=t.median,
                best_ms=t.best, over_floor=t.best / floor_ms(shape, device, rate, bandwidth), speedup=listing / t.best,
                difference=difference[label])
    args = inputs((1, 512, 1, 16, 16), device)
    forms = {"sequential": scan_sequential, "chunked": scan_chunked}
    for label, t in compare({label: both_ways(f, args) for label, f in forms.items()}, 5, device).items():
        row("scan", f"T=512, {label}", median_ms=t.median, best_ms=t.best)
    lengths = {T: both_ways(scan_chunked, inputs((1, T, 4, 64, 64), device)) for T in (1024, 2048, 4096, 8192, 16384)}
    times = compare(lengths, 7, device)
    for T, t in times.items():
        row("scan", f"growth, T={T}", best_ms=t.best, ratio=t.best / times[T // 2].best if T > 1024 else 1.0)


def bench_train(device):
    """A training step of each preset, eager and compiled, and what its parts take."""
    for preset in ("mambazero", "mamba"):
        args = train.make_parser().parse_args(["--model", preset])
        data = train.MarkovData(args, torch.device(device))
        model = train.make_model(args, data).to(device)
        train.settle(args, model.config)
        optimizer = train.make_optimizer(model, args)
        params, x, fast = list(model.parameters()), data.batch(0), torch.compile(model)
        block, cfg = model.blocks[0], model.config
        u = torch.randn(64, 257, block.conv_width, device=device, requires_grad=True)
        scan_args = inputs((64, 256, 1, block.E, cfg.state), device)

        def update():
            torch.nn.utils.clip_grad_norm_(params, args.clip)
            optimizer.step()

        def step(forward):
            data.loss(forward, x).backward()
            update()
            optimizer.zero_grad(set_to_none=True)

        pool = lambda: data.sample(64 * data.pool_batches, stream(0, "bench", 0, device))
        conv = lambda: causal_conv(u, block.conv_weight, block.conv_bias).sum().backward()
        times = compare({"eager": lambda: step(model), "compiled": lambda: step(fast), "pool": pool}, 15, device)
        row("train", f"{preset}, ms a step, best", eager=times["eager"].best, compiled=times["compiled"].best,
            compile_s=times["compiled"].first / 1e3, data=times["pool"].best / data.pool_batches)
        for p in params:
            p.grad = torch.zeros_like(p)
        parts = compare(dict(scan=both_ways(scan_chunked, scan_args), conv=conv, clip_and_adamw=update), 15, device)
        parts = {name: t.best for name, t in parts.items()}
        row("train", f"{preset}, of which", **parts, rest=times["eager"].best - sum(parts.values()))


def bench_data(device):
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

        times = compare(dict(slow=naive, pooled=lambda: sample_chain(P, 257, g)), 9, device)
        slow, pooled = 64 * 257 / times["slow"].best / 1e3, 4096 * 257 / times["pooled"].best / 1e3
        row("data", f"order {k}, million tokens/s", multinomial=slow, pooled=pooled, ratio=pooled / slow)


@torch.no_grad()
def bench_decode(device):
    """Milliseconds per token of `step`, early and late in a sequence."""
    args = train.make_parser().parse_args(["--model", "mamba"])
    model = train.make_model(args, train.MarkovData(args, torch.device("cpu"))).to(device).eval()

    def steps(x, state):
        for t in range(50):
            _, state = model.step(x[:, t], state)

    for B in (1, 64):
        x = torch.randint(2, (B, 8192), device=device)
        states = {position: model.prefill(x[:, :position])[1] for position in (128, 8192)}
        times = compare({p: lambda s=s: steps(x, s) for p, s in states.items()}, 9, device)
        early, late = times[128].best / 50, times[8192].best / 50
        row("decode", f"batch {B}", ms_at_128=early, ms_at_8192=late, ratio=late / early, tokens_per_s=1e3 * B / late)


def _peak(form, device, queue):
    """In a process of its own: peak memory of one forward+backward above what stood before, in MiB."""
    torch.set_num_threads(1)
    f = scan_chunked if form == "ours" else lambda *a: listing_1(*a, 64)
    both_ways(f, inputs((1, 128, 1, 4, 4), device))()  # libraries loaded
    args = inputs(SHAPES[-1], device)

    def now():
        if device == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        status = Path("/proc/self/status").read_text()  # Linux; getrusage would count the parent's peak
        return int(status.split("VmHWM:")[1].split()[0]) / 2**10

    before = now()
    both_ways(f, args)()
    queue.put(now() - before)


def bench_memory(device):
    """Peak memory of one forward+backward at the last shape, ours and Listing 1."""
    context, peak = multiprocessing.get_context("spawn"), {}
    for form in ("Listing 1, chunk 64", "ours"):
        queue = context.Queue()
        process = context.Process(target=_peak, args=(form, device, queue))
        process.start()
        peak[form] = queue.get()
        process.join()
    name = f"{str(SHAPES[-1]).replace(' ', '')}, peak MiB"
    row("memory", name, **peak, ratio=peak["ours"] / peak["Listing 1, chunk 64"])


def main(argv=None):
    """Run the sections named (all if none) and write results/bench_DEVICE.json."""
    sections = dict(scan=lambda device: bench_scan(device, args.peers), train=bench_train, data=bench_data,
                    decode=bench_decode, memory=bench_memory)
    parser = train.Parser(prog="bench.py", description=__doc__.strip().splitlines()[0], allow_abbrev=False)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(sections)}; default all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; 1: ratios hold on a shared machine")
    parser.add_argument("--peers", action="store_true", help="also flash-linear-attention and mamba_ssm")
    parser.add_argument("--out", type=Path, default=None, help="JSON file (default results/bench_DEVICE.json)")
    args = parser.parse_args(argv)
    if unknown := set(args.sections) - set(sections):
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(sections)}")
    if not 1 <= args.threads <= 1024:
        parser.error(f"--threads must be between 1 and 1024, got {args.threads}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device")
    out = args.out or Path(__file__).parent / "results" / f"bench_{args.device}.json"
    try:  # rather now than after minutes of measuring
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    except OSError as error:
        parser.error(str(error))
    torch.set_num_threads(args.threads)
    train.keep_freed_memory()  # for all forms alike
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    print(f"{machine}, {args.threads} threads, torch {torch.__version__}, {date.today()}")
    for name in args.sections or sections:
        sections[name](args.device)
    table = dict(machine=machine, threads=args.threads, torch=torch.__version__, date=str(date.today()), rows=ROWS)
    out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"written to {out}")


if __name__ == "__main__":
    train.as_program(main)
