"""
The one driver: data, model, loop, evaluation, checkpoint, log.

A run is three choices, all visible below: DATA (what is predicted, and what the best predictor loses on the very same
tokens), MODELS (presets, whose fields are flags), and the loop in `train`.

    loss = mean of -log P_model(x_{t+1} | x_1..x_t), in nats; squared error in regression     # Loss
    gap  = loss - bayes, bayes = loss of the best reference (add-beta) on the same tokens     # Gap: 0 = the optimum

Glossary:
    batch: B sequences a micro-batch    accumulate: micro-batches an update    length: T    states: S    order: k
    switch: p_switch    prior: LOW HIGH, a narrower prior for binary kernels; bayes stays add-1, then not the optimum,
    so that the gap may be negative. Table 2 is a run with --prior 0 0.5 and then --eval with --prior 0.5 1.

A run leaves config.json, log.jsonl (a line each evaluation) and model.pt (weights, optimizer, step) in its folder.
Every random stream is a function of (--seed, its name, its index), never of what was drawn before: evaluating more
often changes nothing, and a resumed run sees the same batches.

Real text (wikitext.py) has no known optimum: its runs log perplexities instead of bayes and gap.

Run me:     python train.py --model mambazero --order 1   (two processes: torchrun --nproc_per_node=2 -- train.py ...)
Change me:  new data is a class with models, defaults, fields, batch, loss, evaluate and report, as MarkovData has them,
            and a line in DATA; a new model is a line in MODELS.
"""

import argparse
import ctypes
import dataclasses
import functools
import inspect
import json
import math
import os
import random
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import mambazero
import regression
import single_index
import transformer
from laplace import add_beta, bayes_loss
from markov import sample_chain, sample_kernel, sample_switching, stream
from wikitext import WikitextData


class MarkovData:
    """Random Markov chains (markov.py) against add-beta (laplace.py)."""

    models, defaults = {}, {}  # of --model and of other flags, for this task only
    held_out = 1024  # chains in the evaluation set, the same at every evaluation
    pool = 4096  # training chains drawn at once: a batch at a time would cost more than the model

    def __init__(self, args, device):
        self.args, self.device = args, device
        S, k = args.states, args.order
        self.vocab = S + (args.switch > 0)
        if k * math.log2(S) > 40:
            raise ValueError(f"S^k = {S}^{k} contexts do not fit in memory; lower --order or --states")
        # Bytes of one chain while it is drawn, its kernel and its tokens with their temporaries; a pool may take 1 GiB.
        chain = 40 * S**k * S + 24 * (args.length + 1)
        if chain * max(args.batch, self.held_out) > 2**33:
            raise ValueError(f"chains of length {args.length} with S^k = {S}^{k} contexts do not fit in memory; "
                             f"lower --order, --states, --length or --batch")
        self.pool_batches = max(1, min(self.pool, 2**30 // chain) // args.batch)
        # A state channel for each context can represent the optimum; with four times as many, training finds it.
        self.fields = dict(vocab=self.vocab, window=k + 1, d=max(16 if k == 1 else 32, 2 * S**k),
                           state=max(16 if k == 1 else 32, 4 * S**k), block=args.length)
        self.drawn, self.chains = None, None  # number of the pool at hand, and its chains
        self.test = self.sample(self.held_out, stream(args.seed, "eval", 0, device))
        self.bayes = self.bayes_loss(self.test)

    def sample(self, B, generator):
        """B chains of length T + 1 (B, T+1): the model reads T tokens and predicts T."""
        a = self.args
        if a.switch:
            return sample_switching(B, a.length + 1, a.states, a.order, a.beta, a.switch, generator, self.device)
        P = sample_kernel(B, a.states, a.order, a.beta, generator, self.device, *a.prior)
        return sample_chain(P, a.length + 1, generator)

    def bayes_loss(self, x):
        """Mean loss of the optimum on x, in nats."""
        a = self.args
        return bayes_loss(x, a.states, a.order, a.beta, a.switch or None).double().mean().item()

    def batch(self, index):
        """Training batch number `index`: tokens (B, T+1)."""
        pool, i = divmod(index, self.pool_batches)
        if pool != self.drawn:
            x = self.sample(self.args.batch * self.pool_batches, stream(self.args.seed, "data", pool, self.device))
            self.drawn, self.chains = pool, x.view(self.pool_batches, self.args.batch, -1)
        return self.chains[i]

    def loss(self, model, x):
        """Cross-entropy of x (B, T+1), mean over sequences and positions, in nats."""
        return -model(x[:, :-1]).gather(-1, x[:, 1:, None]).mean()

    def evaluate(self, model):
        """val, bayes and gap = val - bayes on the held-out chains."""
        chunks = self.test.split(max(1, 2**17 // self.args.length))  # no more memory than training
        val = sum(self.loss(model, x).item() * len(x) for x in chunks) / len(self.test)
        return dict(val=val, bayes=self.bayes, gap=val - self.bayes)

    def report(self, model):
        """Lines of a small table: P(next = 1) of model and optimum along the first held-out chain."""
        a, x = self.args, self.test[:1, :-1]
        ours = model(x)[0, :, 1].exp().tolist()
        best = add_beta(x, a.states, a.order, a.beta, a.switch or None)[0, :, 1].tolist()
        yield f"P(next = 1) along one held-out chain:   t   x_t    model    add-{a.beta:g}   difference"
        for t in sorted({min(t, a.length) - 1 for t in (1, 2, 3, 5, 10, 20, 50, 100, 200, a.length)}):
            yield f"{t + 1:40d} {x[0, t]:5d} {ours[t]:8.4f} {best[t]:8.4f}   {ours[t] - best[t]:+.4f}"


DATA = {"markov": MarkovData, "linear": regression.LinearData, "single-index": single_index.SingleIndexData,
        "wikitext": WikitextData}
MODELS = {name: (mambazero.Mamba, mambazero.MambaConfig, preset) for name, preset in mambazero.PRESETS.items()}
MODELS |= {name: (transformer.Transformer, transformer.TransformerConfig, p) for name, p in transformer.PRESETS.items()}


def train(args, data, model, optimizer, scaler, start, out, device):
    """The loop: exactly args.steps updates, evaluated at 0, every --eval-every and at the end. Returns the last."""
    amp = autocast(args, device)
    params = list(model.parameters())
    forward = compiled(model, data, amp) if args.compile else model
    losses, metrics, clock = [], None, time.perf_counter()
    rank, world = processes()
    forward = torch.nn.parallel.DistributedDataParallel(forward) if world > 1 else forward
    terminal = bool(sys.stderr and sys.stderr.isatty()) and rank == 0
    bar = tqdm(total=args.steps, initial=start, disable=not terminal, leave=False)

    for step in range(start, args.steps + 1):
        due = step % args.eval_every == 0 or step == args.steps
        if due and (step > start or step == 0):  # a resumed run has logged the step it starts from
            if not losses:  # step 0: no update yet, show the first batch
                with torch.no_grad(), amp:
                    losses = [data.loss(forward, data.batch(step * args.accumulate)[rank::world])]
            history = over_processes(torch.stack(losses)).double().cpu()
            ms = 1e3 * (time.perf_counter() - clock) / len(losses)
            metrics = dict(step=step, train=history.mean().item(), **evaluate(forward, data, amp))
            metrics["ms_per_step"] = round(ms, 2)
            if not math.isfinite(metrics["train"] + metrics["val"]):  # keep the last good checkpoint
                first = (~history.isfinite()).nonzero().flatten().tolist()
                bad = step - len(losses) + 1 + first[0] if first and step else step
                kept = rank == 0 and (out / "model.pt").exists()
                raise SystemExit(f"train.py: the loss is not finite at step {bad}; a lower --lr may help"
                                 + (f"; the last good checkpoint is in {out}" if kept else ""))
            if rank == 0:
                log(out, metrics)
                save(out, model, optimizer, scaler, step, args.keep)
                bar.write(line(metrics, args.steps), file=sys.stdout)
                bar.set_postfix_str(numbers(metrics))
            losses, clock = [], time.perf_counter()
        if step == args.steps:
            break

        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args) * group["scale"]
        torch.manual_seed(random.Random(f"{args.seed}/dropout/{step + rank * 10**9}").getrandbits(63))
        total = 0.0
        for micro in range(args.accumulate):
            forward.require_backward_grad_sync = micro == args.accumulate - 1  # processes meet once an update
            with amp:
                x = data.batch(step * args.accumulate + micro)[rank::world]
                loss = data.loss(forward, x) / args.accumulate
            scaler.scale(loss).backward()
            total = total + loss.detach()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, args.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        bar.update()
    bar.close()
    return metrics


def processes():
    """(rank, number) of torchrun's processes, each of which takes its share of every micro-batch; (0, 1) without it."""
    dist = torch.distributed
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def over_processes(x):
    """Mean of a tensor over the processes."""
    if processes()[1] > 1:
        torch.distributed.all_reduce(x)
    return x / processes()[1]


def join_processes(args):
    """The device of this process; if torchrun started it, after meeting the others. Only rank 0 prints and writes."""
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        rank, world = processes()
        if args.batch % world:
            raise ValueError(f"--batch must be a multiple of the {world} processes that share it, got {args.batch}")
        if rank:
            sys.stdout = open(os.devnull, "w")
    return device


def autocast(args, device):
    """Mixed precision of --dtype; weights, decays, states and the loss stay float32."""
    return torch.autocast(device.type, dtype=getattr(torch, args.dtype), enabled=args.dtype != "float32")


@torch.no_grad()
def evaluate(model, data, amp):
    """data.evaluate in eval mode, then back to training mode."""
    model.eval()
    with amp:
        metrics = data.evaluate(model)
    model.train()
    return metrics


def learning_rate(step, args):
    """Linear warm-up over the share args.warmup of the steps, then a cosine to 0."""
    warm = max(1, round(args.warmup * args.steps))
    if step < warm:
        return args.lr * (step + 1) / warm
    return args.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, args.steps - warm)))


def settle(args, config):
    """The defaults that depend on the model, as measured: a slow start brought more L1 seeds below 1e-4, but left
    softmax at order 3, seed 0, at a gap of 1e-2 where a fast one reached 3e-4. Two transformer layers end at 3.5e-2
    with Mamba's lr and clip, at 5.9e-3 with their own (order 1, seed 0); 1e-2 did as well there, worse at order 2."""
    attention = args.model in transformer.PRESETS
    args.lr = args.lr or (3e-3 if attention else 2e-2)
    args.clip = args.clip or (1.0 if attention else 0.1)
    if args.warmup is None:
        args.warmup = 0.1 if getattr(config, "predict", "value") == "l1" else 0.02


def make_optimizer(model, args):
    """AdamW with weight decay on matrices only: 0 means nothing special for biases, a_log and delta_bias.

    Convolution biases learn at a tenth of the rate: early on they all sink together, and then the ReLU behind them is
    dead in most channels of b or c (see mambazero.py: _init_weights).
    """
    groups = dict(matrix=[], vector=[], conv_bias=[])
    for name, p in model.named_parameters():
        groups["conv_bias" if name.endswith("conv_bias") else "matrix" if p.dim() >= 2 else "vector"].append(p)
    groups = [dict(params=groups["matrix"], weight_decay=args.weight_decay, scale=1.0),
              dict(params=groups["vector"], weight_decay=0.0, scale=1.0),
              dict(params=groups["conv_bias"], weight_decay=0.0, scale=0.1)]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)  # the rate is set at every step


def compiled(model, data, amp):
    """The model through torch.compile, or itself after one warning: what fails, fails at the first call, made here."""
    try:
        forward = torch.compile(model)
        with amp:
            data.loss(forward, data.batch(0)).backward()
        model.zero_grad(set_to_none=True)
        return forward
    except Exception as error:
        model.zero_grad(set_to_none=True)
        reason = str(error).strip().splitlines()[0]
        print(f"warning: torch.compile failed, training runs eagerly: {reason}", file=sys.stderr)
        return model


def save(out, model, optimizer, scaler, step, keep=False):
    """model.pt, written under another name and renamed: a crash while writing leaves the previous one."""
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(), step=step)
    torch.save(state, out / "model.pt.tmp")
    os.replace(out / "model.pt.tmp", out / "model.pt")
    if keep:
        shutil.copy(out / "model.pt", out / f"model-{step}.pt")


def write(path, text):
    """A text file, likewise."""
    path.with_name(path.name + ".tmp").write_text(text, encoding="utf-8")
    os.replace(path.with_name(path.name + ".tmp"), path)


def log(out, metrics):
    """One more line of log.jsonl."""
    with open(out / "log.jsonl", "a", encoding="utf-8") as f:
        f.write(json.dumps(metrics, allow_nan=False) + "\n")


def line(metrics, steps):
    """What a run prints at an evaluation."""
    m = metrics
    return f"step {m['step']}/{steps} | train {m['train']:.4f} | {numbers(m)} | {m['ms_per_step']:.0f} ms/step"


def numbers(metrics):
    """What an evaluation measured, each number with its name."""
    own = {name: value for name, value in metrics.items() if name not in ("step", "train", "ms_per_step")}
    return " | ".join(f"{name.replace('_', ' ')} {value:{'+.4f' if name == 'gap' else '.4f' if value < 1e4 else '.4g'}}"
                      for name, value in own.items())


def load_checkpoint(out, name="model.pt"):
    """The contents of out/name and out/config.json. Raises ValueError if either is missing or damaged."""
    try:
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        checkpoint = torch.load(out / name, map_location="cpu", weights_only=True)
        Model, Config, _ = find_model(argparse.Namespace(**config["args"]))
        model = Model(Config(**config["model"]))
        model.load_state_dict(checkpoint["model"])
        assert isinstance(checkpoint["step"], int) and {"optimizer", "scaler"} <= checkpoint.keys()
        assert {"steps", "eval_every"} <= config["args"].keys()
        return model, checkpoint, config
    except FileNotFoundError as error:
        raise ValueError(f"{out} holds no run: {Path(error.filename).name} is missing") from None
    except Exception as error:
        raise ValueError(f"{out}: {name} or config.json is damaged ({type(error).__name__}); restore it or start "
                         f"another run") from None


def load_model(out, step=None):
    """The trained model of a run folder, on the CPU, in eval mode; with --keep also that of an earlier evaluation.
    Raises ValueError if there is none."""
    return load_checkpoint(Path(out), "model.pt" if step is None else f"model-{step}.pt")[0].eval()


# ----------------------------------------------------------------------------------------------------------------------
# Command line


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def make_parser():
    """All flags: the run's own, then one for each field of the models' dataclasses, its comment being the help."""
    p = Parser(prog="train.py", description="Train a model to predict in context, and measure its gap to the optimum.",
               allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    g = p.add_argument_group("what to train on")
    g.add_argument("--data", choices=DATA, default="markov", help="the task; defaults shown here are those of markov")
    g.add_argument("--order", type=int, default=1, help="k, tokens of context that decide the next one")
    g.add_argument("--states", type=int, default=2, help="S, symbols in the alphabet")
    g.add_argument("--beta", type=float, default=1.0, help="Dirichlet concentration of the kernels")
    g.add_argument("--switch", type=float, default=0.0, help="probability per token of a switch to a fresh kernel")
    g.add_argument("--prior", type=float, nargs=2, metavar=("LOW", "HIGH"), default=[0.0, 1.0],
                   help="binary hold-out prior: P(1 | context) uniform between these")
    g.add_argument("--corpus", default="corpus", help="wikitext: folder that wikitext.py made")
    g.add_argument("--split", choices=("validation", "test"), default=None,
                   help="wikitext: what is held out (default: validation, or test if there is none)")
    g.add_argument("--length", type=int, default=256,
                   help="T, tokens read and predicted per sequence; N, pairs in a prompt of linear and single-index")
    g.add_argument("--dim", type=int, default=4, help="linear, single-index: d, width of x")
    g.add_argument("--noise", type=float, default=0.0, help="linear: variance of the labels; single-index: their tau")
    g.add_argument("--drift", type=float, default=None, help="linear: rho of a drifting target (default: none)")
    g.add_argument("--support", type=int, default=4, help="single-index: r, dimensions that the targets depend on")
    g.add_argument("--link", choices=single_index.LINKS, default="he3", help="single-index: g of y = g(<beta, x>)")
    g.add_argument("--curriculum", type=float, default=0.0,
                   help="single-index: share of the steps in which the link turns from he1 to --link")
    g = p.add_argument_group("how to train")
    g.add_argument("--steps", type=int, default=1000, help="updates")
    g.add_argument("--batch", type=int, default=64, help="sequences per micro-batch, shared by all processes")
    g.add_argument("--accumulate", type=int, default=1, help="micro-batches per update")
    g.add_argument("--lr", type=float, default=None, help="peak learning rate (default: 2e-2; transformer: 3e-3)")
    g.add_argument("--warmup", type=float, default=None,
                   help="share of the steps with rising learning rate (default: 0.1 for L1, 0.02 for softmax)")
    g.add_argument("--weight-decay", type=float, default=1e-3, help="AdamW's, on matrices only")
    g.add_argument("--clip", type=float, default=None, help="largest gradient norm (default: 0.1; transformer: 1)")
    g.add_argument("--seed", type=int, default=0, help="of weights, data and evaluation")
    g = p.add_argument_group("the run")
    g.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    g.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
                   help="of autocast; weights, decay, state and loss stay float32")
    g.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False, help="torch.compile the model")
    g.add_argument("--threads", type=int, default=1, help="CPU threads of PyTorch")
    g.add_argument("--out", type=folder, default=None, help="run folder (default: out/DATA-MODEL-ORDER-SEED, numbered)")
    g.add_argument("--eval-every", type=int, default=100, help="steps between evaluations, each with a checkpoint")
    g.add_argument("--keep", action=argparse.BooleanOptionalAction, default=False,
                   help="keep every checkpoint, also as model-STEP.pt")
    g.add_argument("--sample", metavar="TEXT", default=None, help="wikitext: show how the model continues TEXT")
    only = g.add_mutually_exclusive_group()
    only.add_argument("--resume", action="store_true", help="continue the run in --out")
    only.add_argument("--eval", action="store_true", help="only evaluate the run in --out, also on other data")
    g = p.add_argument_group("the model (default: from the preset and the data)")
    g.add_argument("--model", choices=sorted({name for name, _ in all_models()}), default="mambazero",
                   help="preset; s6: one layer, made for linear and single-index")
    for name, (field, text) in model_fields().items():
        flag, kind = "--" + name.replace("_", "-"), type(field.default)
        if kind is bool:
            g.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            g.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=text)
    g.add_argument("--no-conv", dest="conv", action="store_const", const="none", default=argparse.SUPPRESS,
                   help="the same as --conv none")
    return p


def folder(text):
    """A path that is not the empty string, which would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must name a folder, got an empty string")
    return Path(text)


def all_models():
    """(name, (Model, Config, preset)), those for every task and each task's own."""
    return [*MODELS.items(), *(item for data in DATA.values() for item in data.models.items())]


def find_model(args):
    """(Model, Config, preset) of args.model for args.data."""
    found = DATA[args.data].models.get(args.model) or MODELS.get(args.model)
    if not found:
        raise ValueError(f"--model {args.model} cannot read --data {args.data}; use one of {', '.join(MODELS)}")
    return found


@functools.cache  # reading the source takes longer than all the rest of a parser
def model_fields():
    """name -> (dataclass field, its trailing comment), over all models; what the data decides is no flag."""
    found = {}
    for name, (_, Config, _) in all_models():
        reasons = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.M))
        for f in dataclasses.fields(Config):
            if f.name not in ("vocab", "inputs"):
                known, text = found.get(f.name, (f, ""))[1], reasons[f.name]
                found[f.name] = f, known if text in known else f"{known}; {name}: {text}" if known else text
    return found


def check(args):
    """Raises ValueError, naming the flag, for values that cannot be meant."""
    a, finite = args, math.isfinite
    for flag, ok, right in [
        ("order", a.order >= 1, "at least 1"),
        ("states", a.states >= 2, "at least 2"),
        ("beta", 1e-3 <= a.beta <= 1e3, "between 0.001 and 1000"),
        ("switch", 0 <= a.switch < 1, "at least 0 and below 1"),
        ("prior", 0 <= a.prior[0] < a.prior[1] <= 1, "LOW HIGH with 0 <= LOW < HIGH <= 1"),
        ("length", a.length >= a.order + 1 or a.data in ("linear", "single-index") and a.length >= 1,
         f"at least order + 1 = {a.order + 1}, for prompts at least 1"),
        ("dim", a.dim >= 1, "at least 1"),
        ("noise", 0 <= a.noise and finite(a.noise), "at least 0 and finite"),
        ("drift", a.drift is None or 0 <= a.drift <= 1, "between 0 and 1"),
        ("support", 1 <= a.support <= a.dim or a.data != "single-index", f"between 1 and --dim {a.dim}"),
        ("curriculum", 0 <= a.curriculum <= 1, "between 0 and 1"),
        ("steps", 0 <= a.steps <= 10**9, "between 0 and 10^9"),
        ("batch", 1 <= a.batch <= 10**9, "between 1 and 10^9"),
        ("accumulate", 1 <= a.accumulate <= 10**6, "between 1 and 10^6"),
        ("lr", a.lr is None or finite(a.lr) and a.lr > 0, "a positive number"),
        ("warmup", a.warmup is None or 0 <= a.warmup <= 1, "between 0 and 1"),
        ("weight_decay", finite(a.weight_decay) and a.weight_decay >= 0, "a number of at least 0"),
        ("clip", a.clip is None or a.clip > 0, "a positive number"),
        ("threads", 1 <= a.threads <= 1024, "between 1 and 1024"),
        ("eval_every", a.eval_every >= 1, "at least 1"),
    ]:
        if not ok:
            value = " ".join(map(str, getattr(a, flag))) if flag == "prior" else getattr(a, flag)
            raise ValueError(f"--{flag.replace('_', '-')} must be {right}, got {value}")
    if a.prior != [0.0, 1.0] and (a.states != 2 or a.beta != 1 or a.switch):
        raise ValueError("--prior is for binary chains: it needs --states 2 --beta 1 and no --switch")
    if a.data != "wikitext" and (a.sample is not None or a.split):
        raise ValueError("--sample and --split are for --data wikitext")
    if a.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine or this PyTorch has no CUDA; use --device cpu")
    if a.dtype == "float16" and (a.device == "cpu" or not torch.cuda.is_available()):
        raise ValueError("--dtype float16 needs CUDA and its loss scaling; use bfloat16 or float32 on a CPU")


def make_model(args, data):
    """The model of args.model: its dataclass defaults, then what the data asks for, the preset, and the flags given."""
    Model, Config, preset = find_model(args)
    own, flags = {f.name for f in dataclasses.fields(Config)}, model_fields()
    given = {k: v for k, v in vars(args).items() if k in flags}
    for name in given.keys() - own:
        raise ValueError(f"--{name} is not a switch of --model {args.model}")
    asked = {k: v for k, v in data.fields.items() if k in own}
    config = Config(**asked | preset | {k: v for k, v in asked.items() if k == "predict"} | given)
    size = dict(d=1, expand=4, state=0, layers=1, window=1, block=0, predict="value") | vars(config)  # GPT-2's MLP: 4d
    if (size["predict"] == "value") != bool(config.inputs):
        raise ValueError(f"--predict {size['predict']}: regression data needs value; tokens need softmax or l1")
    inner, state, layers = size["d"] * size["expand"], size["state"], size["layers"]
    activations = 4 * args.batch * args.length * max(inner, state) * layers
    weights = size["d"] * (inner + config.vocab + state + size["window"] + size["block"]) * layers
    if activations > 2**35 or weights > 2**31:
        raise ValueError(f"this model on {args.batch} x {args.length} tokens does not fit in memory; "
                         f"lower --batch, --length, --d, --expand, --state or --layers")
    torch.manual_seed(random.Random(f"{args.seed}/init").getrandbits(63))
    return Model(config)


def run_folder(args):
    """The folder of a new run: --out, or out/DATA-MODEL-ORDER-SEED or its first free sibling -2, -3, ..."""
    if args.out is not None:
        started = {"config.json", "log.jsonl", "model.pt.tmp"}  # all that a run leaves before its first checkpoint
        if args.out.exists() and (not args.out.is_dir() or {p.name for p in args.out.iterdir()} - started):
            raise ValueError(f"--out {args.out} exists already; use --resume to continue it, or another folder")
        return args.out
    base = Path("out") / f"{args.data}-{args.model}-{args.order}-{args.seed}"
    i = 2
    out = base
    while out.exists():
        out, i = base.with_name(f"{base.name}-{i}"), i + 1
    return out


# What may differ in a resumed run
FREE = {"steps", "eval_every", "device", "threads", "compile", "out", "resume", "eval", "sample"}


def task_args(argv):
    """The args of a new run, unchecked: what argv leaves open is the task's default."""
    parser = make_parser()
    parser.set_defaults(**DATA[parser.parse_args(argv).data].defaults)
    return parser.parse_args(argv)


def parse(argv):
    """argv -> args, model, checkpoint; the last two None for a new run. Other runs begin with the flags they had."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        if not (args.resume or args.eval):
            args = task_args(argv)
            check(args)
            return args, None, None
        if args.out is None:
            raise ValueError("--resume and --eval need --out, the folder of the run")
        model, checkpoint, config = load_checkpoint(args.out)
        kind = lambda value: [*map(type, value)] if isinstance(value, list) else type(value)
        for name in vars(args).keys() - model_fields().keys():
            default = parser.get_default(name)
            value = config["args"].get(name, default)
            if kind(value) not in ([float, str, type(None)] if default is None else [kind(default)]):
                raise ValueError(f"{args.out / 'config.json'} is damaged: {name} is {value!r}")
        saved = {k: v for k, v in config["args"].items() if k not in FREE}
        parser.set_defaults(**saved | {k: config["args"][k] for k in ("steps", "eval_every")})
        args = parser.parse_args(argv)
        check(args)
        fixed = {"model", "data", *model_fields()} if args.eval else vars(args).keys() - FREE
        was = vars(make_parser().parse_args([])) | config["model"] | saved  # a flag newer than the run had its default
        for name in sorted(fixed & vars(args).keys()):
            value = was.get(name)
            if value != getattr(args, name):
                raise ValueError(f"--{name.replace('_', '-')} is {value} in {args.out} and cannot change in a run "
                                 f"that is {'resumed' if args.resume else 'evaluated'}")
        if args.resume and checkpoint["step"] >= args.steps:
            raise ValueError(f"{args.out} is finished at step {checkpoint['step']}; give a larger --steps to go on")
        return args, model, checkpoint
    except ValueError as error:
        parser.error(str(error))


def main(argv=None):
    """One run from the command line argv; returns its last metrics. Bad input: one line on stderr and exit code 2."""
    args, model, checkpoint = parse(argv)
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    clock, out = time.perf_counter(), args.out
    try:
        try:
            device = join_processes(args)
            rank, world = processes()
            data = DATA[args.data](args, device)
            model = (model or make_model(args, data)).to(device)
            if model.config.vocab != data.fields["vocab"]:
                raise ValueError(f"the model in {out} has {model.config.vocab} symbols, not {data.fields['vocab']}")
            if model.config.inputs != data.fields.get("inputs"):
                raise ValueError(f"the model in {out} reads --dim {model.config.inputs - 1}, not {args.dim}")
            if data.fields.get("block", 0) > getattr(model.config, "block", data.fields.get("block", 0)):
                raise ValueError(f"--length {args.length} is more than the model's --block {model.config.block}")
            settle(args, model.config)
            optimizer, start = make_optimizer(model, args), 0
            scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")  # a no-op but for float16
            if checkpoint:
                start = checkpoint["step"]
                optimizer.load_state_dict(checkpoint["optimizer"])
                scaler.load_state_dict(checkpoint["scaler"])
            elif rank == 0:
                out = run_folder(args)
                out.mkdir(parents=True, exist_ok=True)
            if not args.eval and rank == 0:
                prepare_folder(args, model, device, start, out)
        except (ValueError, MemoryError, OSError) as error:
            make_parser().error(str(error) or "not enough memory")
        print_header(args, model, device, out, sys.argv[1:] if argv is None else argv)
        if args.eval:
            metrics = evaluate(model, data, autocast(args, device))
        else:
            if checkpoint:
                print(f"resumed at step {start}; the schedule now ends at step {args.steps}")
            metrics = train(args, data, model, optimizer, scaler, start, out, device)
        model.eval()
        with torch.no_grad():
            for text in data.report(model):
                print(text)
        if world > 1:
            torch.distributed.destroy_process_group()
    except KeyboardInterrupt:
        resumable = not args.eval and out and (out / "model.pt").exists()
        again = f"; continue with: python train.py --resume --out {shlex.quote(str(out))}" if resumable else ""
        print(f"\ninterrupted{again}", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a folder that became read-only
        raise SystemExit(f"train.py: {error}; what was saved before is in {out}") from None
    print(f"done in {time.perf_counter() - clock:.0f} s | {numbers(metrics)} | {out}")
    return metrics


def print_header(args, model, device, out, argv):
    """Command, config, size, device, versions and folder of a run."""
    n = sum(p.numel() for p in model.parameters())
    print(f"$ python train.py {shlex.join(map(str, argv))}")
    print("model: " + " ".join(f"{k}={v}" for k, v in dataclasses.asdict(model.config).items()))
    print(f"{n:,} parameters | {device} {args.dtype}, {args.threads} threads | torch {torch.__version__} | {out}")


def prepare_folder(args, model, device, start, out):
    """config.json, and log.jsonl without what lies beyond the checkpoint (it comes again) or cannot be read."""
    kept = []
    for text in (out / "log.jsonl").read_text(encoding="utf-8", errors="replace").splitlines() if start else []:
        try:
            kept += [text + "\n"] if json.loads(text)["step"] <= start else []
        except (ValueError, TypeError, KeyError):
            continue
    write(out / "log.jsonl", "".join(kept))
    config = dict(args=vars(args) | dict(out=str(out)), model=dataclasses.asdict(model.config), torch=torch.__version__,
                  parameters=sum(p.numel() for p in model.parameters()), device=str(device))
    write(out / "config.json", json.dumps(config, indent=1) + "\n")


def keep_freed_memory():
    """Ask glibc to keep what tensors free. It would hand it back to the kernel and pay for every page again at the next
    tensor, once a step for each activation: about a quarter of a training step on a CPU. Elsewhere, do nothing."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never trim the heap
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block outside the heap
    except (OSError, AttributeError):
        pass


def as_program(main):
    """A script's main(): lines at once, also into a file; no stop at a letter that the encoding lacks, or at | head."""
    for output in (sys.stdout, sys.stderr):
        if output:
            output.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        main()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


if __name__ == "__main__":
    as_program(main)
