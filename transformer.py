"""
A small GPT-2, the model that Mamba is compared with: softmax or linear attention, and convolution where you want it.

    u_t = e[x_t] + p_t                                                                # Embedding, position
    q_t, k_t, v_t = W_Q n_t, W_K n_t, W_V n_t,  n_t = LayerNorm(u_t); any convolved # Convolution
    o_t = sum_{s <= t} A_ts v_s,   A_ts = exp(<q_t, k_s> / sqrt P) / sum_{r <= t} exp(<q_t, k_r> / sqrt P)   # Attention
                             or    A_ts = <phi(q_t), phi(k_s)> / <phi(q_t), sum_{r <= t} phi(k_r)>    # Linear attention
    u_t <- u_t + W_O o_t,  then  u_t <- u_t + W_2 GELU(W_1 LayerNorm(u_t))            # Residual, MLP
    P(x_{t+1}) = softmax(W_l LayerNorm(u_t))                                          # Prediction

The rows of A sum to 1: attention averages where a state adds up. Averaging one-hot successors of equal contexts gives
n_j / n, add-beta without its beta, and needs keys that know the token *before*: from a layer below, or a convolution.

Glossary (code: paper):
    d: embedding width    heads: H of width P = d / H    layers    block: longest sequence, rows of the table p
    phi: elu + 1, the positive feature map of linear attention    window: w    conv: which of q, k, v are convolved
    conv weight (channels, w): the last column multiplies the current token, the first the one w-1 steps back

Run me:     python transformer.py   (attention as an average, causality)
Change me:  a new ablation is one field of TransformerConfig and one visible `if` in Attention.forward.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class TransformerConfig:
    """Sizes and switches, flags of train.py but for vocab and inputs. ValueError if they contradict each other."""

    vocab: int = 2  # symbols predicted; set by the data
    d: int = 16  # embedding width
    heads: int = 1  # H, of width d / H each
    layers: int = 1  # blocks of attention and MLP; the paper compares one and two
    block: int = 1024  # longest sequence, one learned position each; train.py: --length
    attention: str = "softmax"  # "softmax", or "linear": feature map elu + 1, normalised
    conv: str = "none"  # which of q, k, v are convolved: "q", "kv", "qkv", ..., "none"
    window: int = 2  # convolution window w: k + 1 is what an order-k chain needs
    bias: bool = True  # biases of projections, LayerNorm and convolution, as in GPT-2
    conv_bias: bool = True  # that of the convolution, if there are biases
    predict: str = "softmax"  # or "value": the head's output as it is (regression)
    tie: bool = False  # one matrix for embedding and head
    dropout: float = 0.0  # on embeddings, softmax attention and outputs, in training
    inputs: int = None  # None: token ids; n: real vectors of width n, through a Linear

    def __post_init__(self):
        options = dict(attention="softmax linear", predict="softmax value", conv="q k v qk qv kv qkv none")
        for name, value in vars(self).items():
            if name in options and value not in options[name].split():
                raise ValueError(f"{name} must be one of {options[name].replace(' ', ', ')}, got {value}")
            if name in ("vocab", "d", "heads", "layers", "block", "window") or name == "inputs" and value is not None:
                if not (isinstance(value, int) and value >= 1):
                    raise ValueError(f"{name} must be a whole number of at least 1, got {value}")
        if self.d % self.heads:
            raise ValueError(f"heads must divide the width d = {self.d}, got {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.tie and self.inputs is not None:
            raise ValueError("tie needs token ids: real inputs have no embedding to share with the head")


PRESETS = {
    "transformer": dict(attention="softmax", conv="none"),  # PAPER: the baseline; Figures 7 and 11 are switches
    "wikitext-transformer": dict(d=256, layers=2, heads=4, window=4, conv_bias=False, tie=True),  # PAPER: Table 1
}


def phi(u):
    """elu(u) + 1, as max(u, 0) + exp(min(u, 0)): adding 1 to elu would round to 0 below -17, and then 0 / 0. The floor
    e^-30 does the same for what exp itself would round to 0."""
    return F.relu(u) + u.clamp(-30, 0).exp()


def linear_attention_quadratic(q, k, v):
    """Linear attention as it is written: q, k, v (B, H, T, P) -> (B, H, T, P), with A in memory. The reference."""
    A = (phi(q) @ phi(k).mT).tril()  # (B, H, T, T)
    return A @ v / A.sum(-1, keepdim=True)


def linear_attention(q, k, v, chunk=64):
    """The same in O(T) memory: what earlier chunks wrote is one matrix sum_s phi(k_s) v_s^T, as in ssm.py with a_t = 1.
    At least float32 inside, under autocast too, since sums grow with T. Returns (B, H, T, P) in the dtype of v."""
    dtype, T = torch.promote_types(v.dtype, torch.float32), q.shape[2]
    chunk = min(chunk, T)
    with torch.autocast(v.device.type, enabled=False):
        v1 = F.pad(v.to(dtype), (0, 1), value=1.0)  # (B, H, T, P+1): a value of 1 adds up to the normaliser
        # Padding comes after phi, which is 1 at 0: padded keys write nothing.
        qc, kc, vc = (F.pad(z, (0, 0, 0, -T % chunk)).unflatten(2, (-1, chunk))  # (B, H, n, C, P or P+1)
                      for z in (phi(q.to(dtype)), phi(k.to(dtype)), v1))
        written = (kc.mT @ vc).cumsum(2)  # (B, H, n, P, P+1), up to the end of each chunk
        before = F.pad(written[:, :, :-1], (0, 0, 0, 0, 1, 0))  # up to its start
        y = ((qc @ kc.mT).tril() @ vc + qc @ before).flatten(2, 3)[:, :, :T]  # (B, H, T, P+1)
        return (y[..., :-1] / y[..., -1:]).to(v.dtype)


def causal_conv(u, weight, bias=None):
    """Depthwise over time: u (B, T, C), weight (C, w), bias (C,) -> (B, T, C) = sum_i weight_i u_{t-w+1+i} + bias,
    from zeros before the start (mambazero.py's, which can go on, is given what came before)."""
    T, w = u.shape[1], weight.shape[1]
    past = F.pad(u, (0, 0, w - 1, 0))  # (B, w-1+T, C)
    out = sum(past[:, i : i + T] * weight[:, i] for i in range(w))
    return (out if bias is None else out + bias).to(u.dtype)


class Attention(nn.Module):
    """Causal attention over H heads: projections, convolution of some, weighted average of v, projection."""

    def __init__(self, config):
        super().__init__()
        self.config, d = config, config.d
        self.qkv = nn.Linear(d, 3 * d, bias=config.bias)
        if config.conv != "none":
            self.conv_weight = nn.Parameter(torch.empty(len(config.conv) * d, config.window))
            bias = config.bias and config.conv_bias
            self.conv_bias = nn.Parameter(torch.empty(len(config.conv) * d)) if bias else None
        self.out_proj = nn.Linear(d, d, bias=config.bias)

    def forward(self, u):
        """u (B, T, d) -> (B, T, d)."""
        cfg, (B, T, d) = self.config, u.shape
        part = dict(zip("qkv", self.qkv(u).split(d, dim=-1)))  # three of (B, T, d)
        if cfg.conv != "none":  # Convolution
            chosen = torch.cat([part[name] for name in cfg.conv], dim=-1)  # (B, T, len(conv) d)
            chosen = causal_conv(chosen, self.conv_weight, self.conv_bias)
            part |= zip(cfg.conv, chosen.split(d, dim=-1))
        q, k, v = (part[name].view(B, T, cfg.heads, -1).transpose(1, 2) for name in "qkv")  # (B, H, T, P)
        if cfg.attention == "linear":  # Linear attention
            y = linear_attention(q, k, v)
        else:  # Attention; the function drops whenever it is told to, so that eval mode has to be looked up here
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=cfg.dropout * self.training)
        return self.out_proj(y.transpose(1, 2).reshape(B, T, d))


class Transformer(nn.Module):
    """Language model on attention layers: tokens (B, T) to log-probabilities of the next token (B, T, V)."""

    def __init__(self, config):
        super().__init__()
        self.config, d = config, config.d
        self.embed = nn.Linear(config.inputs, d) if config.inputs else nn.Embedding(config.vocab, d)
        self.position = nn.Embedding(config.block, d)
        self.attentions = nn.ModuleList(Attention(config) for _ in range(config.layers))
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(d, 4 * d, config.bias), nn.GELU(),
                                                nn.Linear(4 * d, d, config.bias)) for _ in range(config.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(d, bias=config.bias) for _ in range(2 * config.layers + 1))
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(d, config.vocab, bias=False)
        if config.tie:
            self.head.weight = self.embed.weight
        _init_weights(self)

    def forward(self, tokens):
        """tokens (B, T), or real vectors (B, T, inputs) -> log P(x_{t+1} | x_1..x_t) as (B, T, V), at least float32.
        Raises ValueError for empty tokens and for T > block."""
        if 0 in tokens.shape[:2]:
            raise ValueError(f"need at least one sequence and one token, got {tuple(tokens.shape)}")
        T = tokens.shape[1]
        if T > self.config.block:
            raise ValueError(f"{T} tokens are more than block = {self.config.block}, the positions this model has")
        u, norms = self.dropout(self.embed(tokens) + self.position.weight[:T]), iter(self.norms)  # (B, T, d)
        for attention, mlp in zip(self.attentions, self.mlps):
            u = u + self.dropout(attention(next(norms)(u)))  # Residual
            u = u + self.dropout(mlp(next(norms)(u)))  # MLP
        logits = self.head(next(norms)(u))  # (B, T, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.log_softmax(-1) if self.config.predict == "softmax" else logits  # Prediction

    @torch.no_grad()
    def generate(self, tokens, n, temperature=1.0, generator=None):
        """tokens (B, T) continued by n sampled ones: (B, T + n). temperature 0 takes the most likely token.
        Each one recomputes the last `block` tokens, which then stand at positions 0, 1, ...; there is no cache."""
        if n < 0 or not 0 <= temperature < math.inf:
            raise ValueError(f"need n >= 0 and temperature >= 0, got n={n}, temperature={temperature}")
        for _ in range(n):
            log_probs = self(tokens[:, -self.config.block :])[:, -1]  # (B, V)
            token = log_probs.argmax(-1, keepdim=True) if temperature == 0 else \
                torch.multinomial((log_probs / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, token], 1)  # (B, T+1)
        return tokens


@torch.no_grad()
def _init_weights(model):
    """GPT-2's initial values, in one place: normal of spread 0.02, biases 0. The two outputs of a layer start smaller,
    since 2 * layers of them add up in the residual stream. Convolutions start wider, for the signal to pass, and so
    does a tied embedding (see mambazero.py: _init_weights)."""
    cfg = model.config
    for name, p in model.named_parameters():
        if name.endswith("conv_weight"):
            p.uniform_(-(cfg.window**-0.5), cfg.window**-0.5)
        elif name.endswith("bias"):
            p.zero_()
        elif "norms" not in name:
            residual = name.endswith(("out_proj.weight", ".2.weight"))  # W_O, W_2
            p.normal_(std=0.02 / math.sqrt(2 * cfg.layers) if residual else 0.02)
    if cfg.tie:
        model.embed.weight.normal_(std=0.02 * math.sqrt(768 / cfg.d))


if __name__ == "__main__":
    x = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 0])
    now = F.one_hot(x, 2).double()[None, None]  # (1, 1, T, 2)
    previous = causal_conv(now[0], torch.tensor([[1.0, 0.0]] * 2).double())[None]  # window 2, all weight on the past
    mean = linear_attention(0 * now, 0 * now, now)[0, 0, :, 1]
    after = F.scaled_dot_product_attention(100 * now, previous, now, is_causal=True)[0, 0, :, 1]
    print("P(next = 1) by one attention over one-hot values:\n\n   t   x_t   all keys equal   key = token before")
    for t in range(2, 10):
        seen = [int(x[s]) for s in range(1, t + 1) if x[s - 1] == x[t]]
        print(f"  {t + 1:2d} {x[t]:5d} {mean[t]:16.4f} {after[t]:20.4f}   n_1 / n = {sum(seen)}/{len(seen)}")
    print("\nEqual keys give a running mean, convolved keys n_1 / n:\nan average cannot add the beta of add-beta.")
    model, tokens = Transformer(TransformerConfig(block=16)), torch.randint(2, (1, 16))
    other = tokens.index_fill(1, torch.tensor([9]), 1 - int(tokens[0, 9]))
    changed = (model(tokens) != model(other)).any(-1)[0].nonzero()[:, 0] + 1
    print(f"{sum(p.numel() for p in model.parameters())} parameters; another token 10 changes {changed.tolist()}.")
