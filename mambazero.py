"""
Mamba, its stripped form MambaZero, and Mambas whose weights were set by hand to the optimum.

One model, one switch for each component; the presets are points in that space. For tokens x_t = e[token]:

    a_t = exp(-a Delta_t),  Delta_t = softplus(<w_Delta, x_t> + delta)                # Input selectivity
    x~_t, b_t, c_t = act(conv(W_X x)_t) Delta_t,  act(conv(W_B x)_t),  act(conv(W_C x)_t)    # Convolution
    h_t = a_t h_{t-1} + x~_t b_t^T,  y_t = h_t c_t                                    # State recurrence (ssm.py)
    u_t = x_t + W_o (y_t * ReLU(W_z x_t))                                             # Gate, residual
    v_t = u_t + W_2 (ReLU(W_1 u_t) * W_3 u_t)                                         # MLP
    P(x_{t+1}) = softmax(W_l v_t)  or  |W_l v_t| / ||W_l v_t||_1                      # Prediction

MambaZero keeps only embedding, convolution, recurrence and head, without ReLU, gate and MLP, and predicts by L1: then
W_l u_t is linear in the counts, and add-beta is a ratio of counts, which softmax cannot express.

Glossary (code: paper, Sections 2 and 3):
    d: embedding width    expand: e, inner width E = e d    heads: H of width P = E/H    state: N    window: w
    groups: G, how many (b, c) pairs the heads share        delta_bias: delta
    u: what a layer reads, x_t above, and u_t, v_t after it     x: x~_t, as in ssm.py
    a_log: log of the rate a; log_a: log of the decay a_t = exp(-a Delta_t)
    conv weight (channels, w): the last column multiplies the current token, the first the one w-1 steps back

Run me:     python mambazero.py   (the exact models against add-beta)
Change me:  a new ablation is one field of MambaConfig and one visible `if` in MambaBlock.forward (its parameters, if it
            has any: in MambaBlock.__init__, where they start: in _init_weights).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from ssm import scan, scan_step


@dataclass
class MambaConfig:
    """Sizes and switches; train.py makes a flag of all but vocab and inputs, with the comment as its help.

    Raises ValueError if they contradict each other.
    """

    vocab: int = 2  # symbols predicted; set by the data
    d: int = 16  # embedding width
    state: int = 16  # N: at least S^k for an order-k chain
    expand: int = 2  # inner width E = expand * d
    heads: int = 1  # H, of width E / H each; the paper's Markov runs use one
    groups: int = 1  # G, (b, c) pairs that the heads share; as many as heads: each its own
    window: int = 2  # convolution window w: k + 1 is what an order-k chain needs
    layers: int = 1  # Mamba layers; one is enough, which is the paper's point
    conv: str = "xbc"  # which of x, b, c are convolved: "xbc", "xb", "x", "none"
    act: str = "relu"  # after the convolution: "relu", "silu", "none"
    gate: bool = True  # multiply y by ReLU(W_z x), by SiLU(W_z x) if act is not "relu"
    mlp: bool = True  # gated MLP of width 4d after the mixer
    norm: bool = False  # LayerNorm before mixer, MLP and head
    decay: bool = True  # a_t learned; otherwise fixed at 1
    predict: str = "softmax"  # "softmax", "l1", or "value": the head's output as it is (regression)
    tie: bool = False  # one matrix for embedding and head
    dropout: float = 0.0  # on the output of mixer and MLP, in training
    inputs: int = None  # None: token ids; n: real vectors of width n, through a Linear

    def __post_init__(self):
        for name in ("vocab", "d", "state", "expand", "heads", "groups", "window", "layers", "inputs"):
            value = getattr(self, name)
            if not (name == "inputs" and value is None) and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value}")
        for name, options in (("conv", ("xbc", "xb", "x", "none")), ("act", ("relu", "silu", "none")),
                              ("predict", ("softmax", "l1", "value"))):
            if getattr(self, name) not in options:
                raise ValueError(f"{name} must be one of {', '.join(options)}, got {getattr(self, name)}")
        if self.expand * self.d % self.heads:
            raise ValueError(f"heads must divide the inner width expand * d = {self.expand * self.d}, got {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"groups must divide heads = {self.heads}, got {self.groups}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.tie and self.inputs is not None:
            raise ValueError("tie needs token ids: real inputs have no embedding to share with the head")


PRESETS = {
    # PAPER: Section 2.2, the full layer. LayerNorm turns counts into shares, whatever the length; without it a run may
    # settle for a window of recent tokens, whose count it knows (a_t = 0.96; order 1, seed 1).
    "mamba": dict(act="relu", gate=True, mlp=True, norm=True, predict="softmax"),
    "mambazero": dict(act="none", gate=False, mlp=False, predict="l1"),  # PAPER: Section 3, the stripped one
    "wikitext-mamba": dict(d=256, layers=4, state=32, heads=8, window=4, act="silu", mlp=False, norm=True, tie=True),
}


class MambaBlock(nn.Module):
    """One mixer: projection, causal convolution, selective state recurrence, gate, projection. PAPER: Section 2.2."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        d, self.E, self.GN = config.d, config.expand * config.d, config.groups * config.state
        self.widths = (self.E, self.GN, self.GN, config.heads) + (self.E,) * config.gate  # x, b, c, Delta, z
        self.in_proj = nn.Linear(d, sum(self.widths), bias=False)
        self.conv_width = {"xbc": self.E + 2 * self.GN, "xb": self.E + self.GN, "x": self.E, "none": 0}[config.conv]
        if self.conv_width:
            self.conv_weight = nn.Parameter(torch.empty(self.conv_width, config.window))
            self.conv_bias = nn.Parameter(torch.empty(self.conv_width))
        self.delta_bias = nn.Parameter(torch.empty(config.heads))
        if config.decay:
            self.a_log = nn.Parameter(torch.empty(config.heads))
        self.out_proj = nn.Linear(self.E, d, bias=False)

    def init_state(self, B):
        """What one layer remembers: the last w-1 inputs of the convolution and the state h, both zero."""
        cfg, like = self.config, self.delta_bias
        return (like.new_zeros(B, cfg.window - 1, self.conv_width),
                like.new_zeros(B, cfg.heads, self.E // cfg.heads, cfg.state))

    def forward(self, u, state=None, record=None):
        """u (B, T, d), state as in init_state -> output (B, T, d), the state after the last token."""
        cfg, (B, T, _) = self.config, u.shape
        conv_state, h = self.init_state(B) if state is None else state
        # One product each: splitting one large product instead costs a copy of all its gradients
        weights = self.in_proj.weight.split((self.E + 2 * self.GN,) + self.widths[3:])
        xbc, dt, *z = (F.linear(u, weight) for weight in weights)  # (B, T, E + 2 G N), (B, T, H), (B, T, E) with a gate

        # Convolution: causal, one kernel of length w for each channel
        if self.conv_width:
            convolved, rest = xbc[..., : self.conv_width], xbc[..., self.conv_width :]
            convolved = torch.cat([conv_state.to(xbc.dtype), convolved], dim=1)  # (B, w-1+T, conv_width)
            conv_state = convolved[:, T:]  # (B, w-1, conv_width)
            convolved = causal_conv(convolved, self.conv_weight, self.conv_bias)  # (B, T, conv_width)
            xbc = torch.cat([convolved, rest], dim=-1) if rest.shape[-1] else convolved
        if cfg.act != "none":
            xbc = F.silu(xbc) if cfg.act == "silu" else F.relu(xbc)
        x, b, c = xbc.split((self.E, self.GN, self.GN), dim=-1)  # (B, T, E), twice (B, T, G N)

        # Input selectivity: Delta_t scales what is written and, with a, how fast the state decays
        delta = F.softplus(dt.to(self.delta_bias.dtype) + self.delta_bias)  # (B, T, H)
        log_a = -self.a_log.exp() * delta if cfg.decay else torch.zeros_like(delta)
        x = x.view(B, T, cfg.heads, -1) * delta[..., None]  # (B, T, H, P)
        b, c = b.view(B, T, cfg.groups, -1), c.view(B, T, cfg.groups, -1)  # (B, T, G, N)

        # State recurrence
        if T == 1:
            y, h = scan_step(x[:, 0], log_a[:, 0], b[:, 0], c[:, 0], h)  # (B, H, P), (B, H, P, N)
        else:
            y, h = scan(x, log_a, b, c, None if state is None else h)  # a zero h0 would cost one more chunk
        y = y.reshape(B, T, self.E)
        if cfg.gate:  # Gate
            y = y * (F.relu(z[0]) if cfg.act == "relu" else F.silu(z[0]))
        if record is not None:
            for name, value in dict(a=log_a.exp(), delta=delta, x=x, b=b, c=c, y=y).items():
                record.setdefault(name, []).append(value)
        return self.out_proj(y.to(u.dtype)), (conv_state, h)


def causal_conv(u, weight, bias):
    """Depthwise over time: u (B, w-1+T, C), weight (C, w), bias (C,) -> (B, T, C) = sum_i weight_i u_{t+i} + bias.

    In float32 as a 2-d convolution of height 1: (B, T, C) in memory *is* channels-last (B, C, 1, T), so no transpose is
    copied; forward and backward take 0.4 to 0.85 times as long as the sum (CPU, w = 2 to 5). Its float64 form is slow.
    """
    if u.dtype == torch.float64:
        T = u.shape[1] - weight.shape[1] + 1
        return sum(u[:, i : i + T] * weight[:, i] for i in range(weight.shape[1])) + bias
    out = F.conv2d(u.transpose(1, 2)[:, :, None], weight[:, None, None], bias, groups=len(weight))
    return out.squeeze(2).transpose(1, 2)


class MLP(nn.Module):
    """Gated MLP of width 4d: W_2 (ReLU(W_1 u) * W_3 u). PAPER: Section 2.2."""

    def __init__(self, d, act):
        super().__init__()
        self.fc1 = nn.Linear(d, 8 * d, bias=False)  # W_1 above W_3
        self.fc2 = nn.Linear(4 * d, d, bias=False)
        self.act = F.silu if act == "silu" else F.relu

    def forward(self, u):
        w1, w3 = self.fc1.weight.chunk(2)
        return self.fc2(self.act(F.linear(u, w1)) * F.linear(u, w3))


class Mamba(nn.Module):
    """Language model on Mamba layers: tokens (B, T) to log-probabilities of the next token (B, T, V)."""

    def __init__(self, config):
        super().__init__()
        self.config, d = config, config.d
        self.embed = nn.Linear(config.inputs, d) if config.inputs else nn.Embedding(config.vocab, d)
        self.blocks = nn.ModuleList(MambaBlock(config) for _ in range(config.layers))
        self.mlps = nn.ModuleList(MLP(d, config.act) for _ in range(config.layers * config.mlp))
        norm = nn.LayerNorm if config.norm else nn.Identity
        self.norms = nn.ModuleList(norm(d) for _ in range(config.layers * (1 + config.mlp) + 1))
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(d, config.vocab, bias=False)
        if config.tie:
            self.head.weight = self.embed.weight
        _init_weights(self)

    def init_state(self, B):
        """State of an empty sequence, for `step` and `prefill`: a list over layers."""
        return [block.init_state(B) for block in self.blocks]

    def forward(self, tokens):
        """tokens (B, T), or real vectors (B, T, inputs) -> log P(x_{t+1} | x_1..x_t) as (B, T, V), at least float32."""
        return self._run(tokens)[0]

    def prefill(self, tokens, state=None):
        """As forward, in parallel, going on from `state`: returns the log-probabilities and the state after them."""
        return self._run(tokens, self.init_state(len(tokens)) if state is None else state)

    def step(self, token, state):
        """One token (B,) at constant cost: log-probabilities (B, V) of the next and the new state; `state` is kept."""
        log_probs, state = self._run(token[:, None], state)
        return log_probs[:, 0], state

    def internals(self, tokens):
        """What the layers compute, a dict of lists over layers: a and delta (B, T, H), x (B, T, H, P), b and c
        (B, T, G, N), and y (B, T, E) after the gate."""
        record = {}
        self._run(tokens, record=record)
        return record

    @torch.no_grad()
    def generate(self, tokens, n, temperature=1.0, generator=None):
        """tokens (B, T) continued by n sampled ones: (B, T + n). temperature 0 takes the most likely token."""
        if n < 0 or not 0 <= temperature < math.inf:
            raise ValueError(f"need n >= 0 and temperature >= 0, got n={n}, temperature={temperature}")
        log_probs, state = self.prefill(tokens)
        log_probs, out = log_probs[:, -1], [tokens]
        for _ in range(n):
            if temperature == 0:
                token = log_probs.argmax(-1)
            else:
                token = torch.multinomial((log_probs / temperature).softmax(-1), 1, generator=generator)[:, 0]
            out.append(token[:, None])
            log_probs, state = self.step(token, state)
        return torch.cat(out, 1)

    def _run(self, tokens, state=None, record=None):
        if 0 in tokens.shape[:2]:
            raise ValueError(f"need at least one sequence and one token, got {tuple(tokens.shape)}")
        u, new_state, norms = self.embed(tokens), [], iter(self.norms)
        for i, block in enumerate(self.blocks):
            o, s = block(next(norms)(u), state[i] if state else None, record)
            u = u + self.dropout(o)  # Residual
            if self.config.mlp:
                u = u + self.dropout(self.mlps[i](next(norms)(u)))  # MLP
            new_state.append(s)
        return predict(self.head(next(norms)(u)), self.config.predict), new_state


@torch.no_grad()
def _init_weights(model):
    """All initial values that are not PyTorch's own, in one place; nothing rewrites them afterwards."""
    cfg = model.config
    for block in model.blocks:
        # Mamba's own range: a = 1 and Delta from 1e-3 to 1e-1 over the heads. A single head gets the slow end, a memory
        # of 1,000 tokens: what has decayed before it is counted gives no gradient.
        delta = torch.logspace(-3, -1, cfg.heads)
        block.delta_bias.copy_(delta.expm1().log())  # softplus of this is Delta
        if cfg.decay:
            block.a_log.zero_()
        if block.conv_width:
            nn.init.uniform_(block.conv_weight, -(cfg.window**-0.5), cfg.window**-0.5)
            nn.init.zeros_(block.conv_bias)
    if cfg.tie:
        # A head with PyTorch's embeddings of spread 1 starts out certain and wrong; GPT-2's 0.02, kept at other widths
        # than its 768, is slow: two seeds of a language model ended at perplexities of 171 and 177, with this at 154
        # and 154 (d = 96, 8,192 words, 200 steps). Its price: the token just read starts at a logit of 0.55 sqrt(d).
        nn.init.normal_(model.embed.weight, std=0.02 * math.sqrt(768 / cfg.d))
    if cfg.predict == "softmax" and not cfg.inputs:
        # Embeddings start with sum 0. What all tokens have in common works as a bias in front of every ReLU, and with
        # the convolution's bias it sinks early on until most channels are dead: after 200 steps b_n and c_n were both
        # alive in 6 of 32 channels, with the sum 0 and slow biases (train.py: make_optimizer) in 20 (order 2, seed 2,
        # T = 64).
        model.embed.weight.sub_(model.embed.weight.mean(0))
    if cfg.predict == "l1":
        # Everything positive: then all scores start on one side of the kink of |l|. Squares of normals spread wide, so
        # that two tokens look different from the start, which shortens the phase of counting without context.
        for block in model.blocks:
            for weight in (block.in_proj.weight, block.out_proj.weight):
                weight.normal_().square_().mul_(cfg.d**-0.5)
            if cfg.layers > 1:  # a layer is cubic in its input and its output grows with T: a positive stack explodes
                block.out_proj.weight.mul_(1e-3)
            # All taps equal, for the data to decide: in a binary chain counting what came before the current symbol is
            # nearly as good as counting what came after it, and a random head start decides for many a seed.
            if block.conv_width:
                block.conv_weight.fill_(1 / cfg.window)
            block.in_proj.weight.split(block.widths)[3].normal_(std=0.05)  # w_Delta: Delta_t starts nearly constant
        model.head.weight.normal_().square_().mul_(cfg.d**-0.5)
        model.embed.weight.normal_().square_().mul_(0.5)


def predict(logits, kind):
    """Prediction: scores l (.., V) to log-probabilities, by softmax or as p = (|l| + eps) / (sum |l| + V eps), never 0;
    "value" returns them as they are.

    The gradient of |l| is taken as 1 also where l < 0 (straight-through). The true one is -1 there: a score that steps
    over zero is then pushed on, away from where it came, and such mixed signs are where training used to get stuck.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if kind == "l1":
        size = logits + (logits.abs() - logits).detach() + torch.finfo(logits.dtype).eps
        return size.log() - size.sum(-1, keepdim=True).log()
    return logits.log_softmax(-1) if kind == "softmax" else logits


# ----------------------------------------------------------------------------------------------------------------------
# Exact models: the same class, weights set by hand, float64.


def _blank(**config):
    """A MambaZero with all parameters zero, but Delta_t = 1: the model, and in_proj's rows W_X, W_B, W_C, w_Delta as
    views, so that writing to them sets its weights."""
    model = Mamba(MambaConfig(**PRESETS["mambazero"] | config)).double().requires_grad_(False)
    for p in model.parameters():
        p.zero_()
    block = model.blocks[0]
    block.delta_bias.fill_(math.log(math.expm1(1)))  # softplus of this is 1
    return model, *block.in_proj.weight.split(block.widths)


def _count_successors(model, W_X, S, beta):
    """What all but Theorem 4 share: token i is e_{2i} and writes e_{2i+1}; logit_j = beta + coordinate 2j+1."""
    V, block, i = model.config.vocab, model.blocks[0], torch.arange(S)
    model.embed.weight[torch.arange(V), 2 * torch.arange(V)] = 1
    for head in range(model.config.heads):
        W_X[head * 2 * V + 2 * i + 1, 2 * i] = 1
    block.conv_weight[: block.E, -1] = 1  # x~ is the current token
    block.out_proj.weight[:, : 2 * V] = torch.eye(2 * V)
    model.head.weight[:S, 0::2] = beta  # x_t itself, through the residual: beta whatever the token
    model.head.weight[i, 2 * i + 1] = 1


def laplace_first_order(S, beta):
    """Theorem 1: MambaZero equal to add-beta on every order-1 chain; N = S, d = 2S, e = 1, w = 2, a_t = 1."""
    _check_construction(S, 1, beta)
    model, W_X, W_B, W_C, _ = _blank(vocab=S, d=2 * S, state=S, expand=1, decay=False)
    _count_successors(model, W_X, S, beta)
    i = torch.arange(S)
    W_B[i, 2 * i] = W_C[i, 2 * i] = 1  # one-hot of a token:
    model.blocks[0].conv_weight[2 * S : 3 * S, 0] = 1  # b_t of the previous one, whose successor x~_t is;
    model.blocks[0].conv_weight[3 * S :, 1] = 1  # c_t of the current one: y_t sums the successors of earlier x_t
    return model


def laplace_switching(S, beta, p_switch):
    """Ours: the optimum of the order-1 switching process (symbol S = switch). Only the switch forgets: a_t = 0 there.

    a = 1e-18 with Delta = 1 for ordinary tokens and 1e22 for the switch, which writes nothing that Delta could scale.
    """
    _check_construction(S, 1, beta)
    if not 0 <= p_switch < 1:
        raise ValueError(f"p_switch must be in [0, 1), got {p_switch}")
    model, W_X, W_B, W_C, W_dt = _blank(vocab=S + 1, d=2 * (S + 1), state=S, expand=1)
    _count_successors(model, W_X, S, beta)
    block, i = model.blocks[0], torch.arange(S)
    W_B[i, 2 * i] = W_C[i, 2 * i] = 1  # as in Theorem 1; the switch is a zero vector for both
    block.conv_weight[block.E : block.E + S, 0] = 1
    block.conv_weight[block.E + S :, 1] = 1
    block.a_log.fill_(math.log(1e-18))
    W_dt[0, 2 * S] = 1e22
    model.head.weight[S] = p_switch / (1 - p_switch) * model.head.weight[:S].sum(0)  # so that P(switch) = p_switch
    return model


def laplace_any_order(S, k, beta, length=4096):
    """Ours: add-beta on order-k chains for any S and k; convolution, ReLU and recurrence, no gate or MLP.

    Binary: state N = 2^k, one channel for each context, on when all k tokens match; exact for every length. Any S: two
    heads, N = 5 S^k, exact up to `length` tokens: ValueError where float64 could not count that far.
    """
    _check_construction(S, k, beta)
    if S == 2:
        return _any_order_binary(k, beta)
    if not 1 <= length <= 2**53 / (S + 1) ** (2 * k):
        raise ValueError(f"length must be at least 1, and (S+1)^(2k) * length within float64's exact integers, 2^53; "
                         f"got S={S}, k={k}, length={length}")
    C = S**k
    model, W_X, W_B, W_C, _ = _blank(vocab=S, d=2 * S, state=5 * C, expand=2, heads=2, groups=2, window=k + 1,
                                     act="relu", decay=False)
    _count_successors(model, W_X, S, beta)
    block = model.blocks[0]
    block.out_proj.weight[:, 2 * S :] = -torch.eye(2 * S)  # first head minus second
    for j in range(S):
        W_B[:, 2 * j] = W_C[:, 2 * j] = j + 1  # a token's digit; 0 is "before the start"
    # A context is the number v = sum_j (S+1)^j digit_{t-j}. With ramps r_m(v) = ReLU(v - m), [v = m] is the second
    # difference r_{m-1} - 2 r_m + r_{m+1}. c_t . b_s needs [v_t = m][v_s = m] = nine products of ramps. After ReLU b
    # and c are not negative, so the four products with a minus go to a second head, which W_o subtracts.
    second = {-1: 1, 0: -2, 1: 1}
    pairs = [(p, q, second[p] * second[q]) for p in second for q in second]
    digits = torch.cartesian_prod(*[torch.arange(1, S + 1)] * k).view(C, k).double()
    place = (S + 1.0) ** torch.arange(k)
    m = digits @ place.double()  # (C,) the codes of all contexts
    b_weight, c_weight = block.conv_weight[block.E :].view(2, 2, 5, C, k + 1)  # (b or c; head, pair, context, tap)
    b_bias, c_bias = block.conv_bias[block.E :].view(2, 2, 5, C)
    for head, sign in enumerate((1, -1)):
        for i, (p, q, s) in enumerate([pair for pair in pairs if pair[2] * sign > 0]):
            b_weight[head, i, :, :k] = place.flip(0)  # r_{m+p} of the context before the current token
            b_bias[head, i] = -(m + p)
            c_weight[head, i, :, 1:] = abs(s) * place.flip(0)  # |s| r_{m+q} of the context that ends with it
            c_bias[head, i] = -abs(s) * (m + q)
    return model


def _any_order_binary(k, beta):
    C = 2**k
    model, W_X, W_B, W_C, _ = _blank(vocab=2, d=4, state=C, expand=1, window=k + 1, act="relu", decay=False)
    _count_successors(model, W_X, 2, beta)
    W_B[:, 0] = W_C[:, 0] = -1  # token 0 is -1, token 1 is +1, before the start is 0
    W_B[:, 2] = W_C[:, 2] = 1
    bits = (torch.arange(C)[:, None] >> torch.arange(k).flip(0)) & 1  # (C, k), oldest first
    block = model.blocks[0]
    b_weight, c_weight = block.conv_weight[block.E :].view(2, C, k + 1)
    b_weight[:, :k] = c_weight[:, 1:] = 2.0 * bits - 1  # k matches sum to k, one mismatch to k - 2:
    block.conv_bias[block.E :] = -(k - 1)  # ReLU leaves 1 for the full match and 0 for the others
    return model


def laplace_binary_2d(beta, eps):
    """Theorem 4: add-beta on binary order-1 chains within KL <= eps, with d = N = 2 only, e = 1, w = 2.

    The counts n_01 and n_10 differ by at most 1, which a mixture of the previous and the current token exploits. With
    cross = alpha_0 gamma_1 + alpha_1 gamma_0 and alpha orthogonal to gamma, reading at token j finds
        h_jj = cross n_jj + alpha_1 gamma_1,   h_ij = cross n_ji + alpha_0 gamma_1 [x_1 = i]   (i the other token)
    and the residual adds the embedding, which completes both to cross (n + beta), but for the term of x_1.
    """
    _check_construction(2, 1, beta)
    if not 1e-12 <= eps <= 1:
        raise ValueError(f"eps must be between 1e-12, what float64 can show, and 1; got {eps}")
    model, W_X, W_B, W_C, _ = _blank(vocab=2, d=2, state=2, expand=1, window=2, decay=False)
    alpha = (math.sqrt(beta * eps / (1 + beta * eps)), 1.0)  # (previous, current) taps of x, and of b:
    gamma = (1.0, -alpha[0])
    cross = alpha[0] * gamma[1] + alpha[1] * gamma[0]
    same, other = cross * beta - alpha[1] * gamma[1], cross * beta - alpha[0] * gamma[1]
    e = torch.tensor([[same, other], [other, same]], dtype=torch.float64)
    model.embed.weight.copy_(e)
    for W in (W_X, W_B, W_C):
        W.copy_(e.inverse())  # embeddings to unit vectors
    block = model.blocks[0]
    block.conv_weight.copy_(torch.tensor([alpha] * 2 + [gamma] * 2 + [(0.0, 1.0)] * 2))
    block.out_proj.weight.copy_(torch.eye(2))
    model.head.weight.copy_(torch.eye(2))
    return model


def _check_construction(S, k, beta):
    if S < 2 or k < 1 or not 1e-6 <= beta <= 1e6:
        raise ValueError(f"need S >= 2, k >= 1 and beta between 1e-6 and 1e6, got S={S}, k={k}, beta={beta}")
    if k > 14 or S**k > 2**14:
        raise ValueError(f"S**k = {S**k} contexts need as many state channels; 16384 is the most offered here")


if __name__ == "__main__":
    from laplace import add_beta
    from markov import sample_chain, sample_kernel, sample_switching

    g, T = torch.Generator().manual_seed(0), 1000

    def difference(model, S, k, beta, p_switch=None):
        """Largest |P_model - P_beta| and KL over random sequences of T tokens and the all-equal ones."""
        if p_switch is None:
            x = sample_chain(sample_kernel(4, S, k, beta, g), T, g)
        else:
            x = sample_switching(4, T, S, k, beta, p_switch, g)
        x = torch.cat([x, torch.arange(S)[:, None].expand(S, T)])
        p, q = add_beta(x, S, k, beta, p_switch, dtype=torch.float64), model(x).exp()
        return float((p - q).abs().max()), float((p * (p / q).log()).sum(-1).max())

    print(f"Weights set by hand against add-beta; float64, T = {T}, random and all-equal:\n")
    print("                                   parameters  state largest difference       KL")
    for name, model, *rest in [
        ("Theorem 1, S=2, beta=1", laplace_first_order(2, 1.0), 2, 1, 1.0),
        ("Theorem 1, S=5, beta=0.5", laplace_first_order(5, 0.5), 5, 1, 0.5),
        ("Theorem 4, eps=1e-1 (approximate)", laplace_binary_2d(1.0, 1e-1), 2, 1, 1.0),
        ("Theorem 4, eps=1e-3 (approximate)", laplace_binary_2d(1.0, 1e-3), 2, 1, 1.0),
        ("any order, binary, k=2", laplace_any_order(2, 2, 1.0), 2, 2, 1.0),
        ("any order, binary, k=6", laplace_any_order(2, 6, 0.5), 2, 6, 0.5),
        ("any order, S=3, k=2", laplace_any_order(3, 2, 1.0), 3, 2, 1.0),
        ("any order, S=4, k=3", laplace_any_order(4, 3, 0.5), 4, 3, 0.5),
        ("switching, S=2, p=0.01", laplace_switching(2, 1.0, 0.01), 2, 1, 1.0, 0.01),
        ("switching, S=4, p=0.05", laplace_switching(4, 0.5, 0.05), 4, 1, 0.5, 0.05),
    ]:
        error, kl = difference(model, *rest)
        n, cfg = sum(p.numel() for p in model.parameters()), model.config
        state = cfg.expand * cfg.d * cfg.state
        print(f"  {name:33s} {n:9d} {state:6d} {error:18.1e} {kl:8.1e}")
