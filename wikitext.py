"""
Real text for the language models: fetch, tokenise, store as one flat array, read windows, and name the loss.

    nll = sum_i -log P_model(x_i | the tokens before it in its window)                # Held-out loss
    token perplexity = exp(nll / tokens),   word perplexity = exp(nll / words)        # Perplexity
    bits per byte = nll / (bytes ln 2)                                                # Bits per byte

They differ by what they divide by. Tokens depend on the tokenizer, so only the last two compare across tokenizers, and
those only without <unk>. Held-out windows of --length tokens lie end to end: each token is predicted exactly once, from
at most --length tokens before it; before the very first stands a line end.

Glossary:
    text: a file, a span of one or a member of a zip    piece: about a MiB of it    word: a run without white space
    split: train, validation or test    corpus: a folder of SPLIT.bin and corpus.json    tokenizer: one of
      bytes     256 symbols, nothing to install or learn, nothing unknown
      words     the most frequent ones of train, each with the space before it; others are <unk>
      gpt2      GPT-2's byte pairs (tiktoken), 50,257 symbols in a table of 50,304 as in the paper

Run me:     python wikitext.py --source FILE   (a text, a folder or a zip; without --source: fetches WikiText-103)
Change me:  another tokenizer is an `if` in make_tokenizer and a name in TOKENIZERS.
"""

import argparse
import codecs
import json
import math
import os
import random
import re
import urllib.request
import zipfile
import zlib
from collections import Counter, namedtuple
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

ARCHIVE, SIZE, PIECE = "wikitext-103-raw-v1.zip", 191_984_949, 2**20  # bytes
URLS = [f"https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main/{ARCHIVE}",
        f"https://wikitext.smerity.com/{ARCHIVE}"]  # the original address answers 403
SPLITS = {"train": "train", "valid": "validation", "test": "test"}  # the archive's name: ours
TOKENIZERS = ("bytes", "words", "gpt2")
Text = namedtuple("Text", "path start stop", defaults=(0, math.inf))  # bytes start to stop of a file or zip member
Tokenizer = namedtuple("Tokenizer", "vocab encode decode")  # encode(str) -> array of ids, decode(ids) -> str
cut_words = re.compile(r" ?\S+|\s").findall  # words with the space before them, other white space by the character


def make_tokenizer(name, words=None):
    """A Tokenizer by its name; words: the vocabulary of "words". ValueError if gpt2 lacks tiktoken or its tables."""
    if name == "bytes":  # what a model samples may be no UTF-8
        return Tokenizer(256, lambda text: np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8),
                         lambda ids: bytes(ids).decode("utf-8", "replace"))
    if name == "words":
        ids = {word: i for i, word in enumerate(words)}  # 0 and 1 are the unknown ones
        return Tokenizer(len(words), lambda text: np.array([ids.get(w, w[0] == " ") for w in cut_words(text)], int),
                         lambda ids: "".join(words[i] for i in ids))
    try:
        import tiktoken
        bpe = tiktoken.get_encoding("gpt2")
    except ImportError:
        raise ValueError("gpt2 needs tiktoken: pip install tiktoken, or use --tokenizer bytes or words") from None
    except Exception as error:  # whatever its downloader raises
        raise ValueError(f"tiktoken could not fetch GPT-2's tables ({type(error).__name__}); offline, set "
                         f"TIKTOKEN_CACHE_DIR to a folder that holds them, or use bytes or words") from None
    # Text that looks like a special token is text. PAPER: a vocabulary of 50,304, of which the last 47 are never used.
    return Tokenizer(50_304, lambda text: np.array(bpe.encode_ordinary(text), int),
                     lambda ids: bpe.decode([i for i in ids if i < 50_257]))


def learn_words(text, size):
    """`size` words: the unknown one without and with a space, the line end, and the most frequent of a Text."""
    counts, fixed = Counter(), ["<unk>", " <unk>", "\n"]
    for piece in pieces(text):
        counts.update(cut_words(piece))
    return (fixed + [word for word, _ in counts.most_common() if word not in fixed])[:size]


def fetch(folder):
    """Path of WikiText-103's archive in `folder`, fetched if it is not there whole. ValueError if no copy answers."""
    path, part, failures = folder / ARCHIVE, folder / f"{ARCHIVE}.part", []
    whole = lambda p: p.exists() and p.stat().st_size == SIZE and zipfile.is_zipfile(p)
    for url in URLS if not whole(path) else ():
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0"})  # some refuse urllib's own
            with urllib.request.urlopen(request, timeout=30) as response, open(part, "wb") as f, \
                    tqdm(total=SIZE, unit="B", unit_scale=True, desc=ARCHIVE, disable=None) as bar:
                while block := response.read(PIECE):
                    bar.update(f.write(block))
            if not whole(part):
                raise ValueError(f"{part.stat().st_size:,} bytes, not the zip of {SIZE:,}")
            os.replace(part, path)
            break
        except Exception as error:  # refused, unreachable, cut short, a full disk
            failures.append(f"{url} ({error or type(error).__name__})")
        finally:
            part.unlink(missing_ok=True)
    if not whole(path):
        raise ValueError(f"no copy of {ARCHIVE} could be fetched: {', '.join(failures)}; get it by other means and put "
                         f"it at {path}, or name text that you have with --source")
    return path


def find_splits(source):
    """split -> Text for a plain text (90% train, 10% validation), or a folder or zip in WikiText's layout. ValueError
    if `source` is none of these."""
    if source.is_dir():
        files = [*source.glob("wiki.*"), *source.glob("*/wiki.*")]
    elif zipfile.is_zipfile(source):
        archive = zipfile.ZipFile(source)
        files = [zipfile.Path(archive, name) for name in archive.namelist()]
    elif source.suffix == ".zip" and source.exists():
        raise ValueError(f"{source} is no whole zip archive: cut short, or a web page saved under its name")
    else:
        with source.open("rb") as f:
            cut = f.seek(source.stat().st_size * 9 // 10)
            line = f.readline(PIECE)
            cut += len(line) if line.endswith(b"\n") and f.read(1) else 0  # rather between two lines
        return dict(train=Text(source, 0, cut), validation=Text(source, cut))
    for kind in ("raw", "tokens"):
        names = [(re.fullmatch(rf"wiki\.(train|valid|test)\.{kind}", file.name), file) for file in files]
        splits = {SPLITS[m[1]]: Text(file) for m, file in names if m}
        if "train" in splits and len(splits) > 1:
            return splits
    raise ValueError(f"{source} must hold wiki.train.raw (or .tokens) and wiki.valid.raw or wiki.test.raw")


def pieces(text):
    """The characters of a Text, about a MiB at a time, line ends as they are, bytes that are no UTF-8 as surrogates.
    ValueError for NUL bytes, which archives and UTF-16 have but no UTF-8 text."""
    decoder, rest, left = codecs.getincrementaldecoder("utf-8")("surrogateescape"), "", text.stop - text.start
    with text.path.open("rb") as f, tqdm(unit="B", unit_scale=True, desc=text.path.name, disable=None) as bar:
        f.seek(text.start)
        while block := f.read(min(PIECE, left)):
            if b"\0" in block:
                raise ValueError(f"{text.path} is no plain text: it holds NUL bytes; save it as UTF-8")
            left -= len(block)
            bar.update(len(block))
            rest += decoder.decode(block)
            # Every tokenizer has a border between a word and the white space after it: cut at the last one.
            words = rest.rsplit(None, 1)
            cut = len(words[0]) if len(words) > 1 else len(rest) if len(rest) > PIECE else 0
            if cut:
                yield rest[:cut]
                rest = rest[cut:]
    rest += decoder.decode(b"", True)
    if rest:
        yield rest


def build(splits, name, size, out):
    """Tokenise Texts into the corpus `out`: a flat array for each split and corpus.json, its table of contents, which
    it returns. Stopped half-way it leaves no new file."""
    words = learn_words(splits["train"], size) if name == "words" else None
    tokenizer = make_tokenizer(name, words)
    dtype = np.min_scalar_type(tokenizer.vocab - 1).name
    table = dict(tokenizer=name, vocab=tokenizer.vocab, dtype=dtype, splits={}, words=words)
    try:
        for split, text in splits.items():
            count = table["splits"][split] = dict(tokens=0, words=0, bytes=0)
            with open(out / f"{split}.bin.tmp", "wb") as f:
                for piece in pieces(text):
                    ids = tokenizer.encode(piece)
                    f.write(ids.astype(dtype).tobytes())
                    sizes = len(ids), len(piece.split()), len(piece.encode("utf-8", "surrogateescape"))
                    count |= {k: count[k] + n for k, n in zip(count, sizes)}
            if not count["tokens"]:
                raise ValueError(f"{text.path} is too short, it leaves nothing for {split}")
        (out / "corpus.json.tmp").write_text(json.dumps(table), encoding="utf-8")
        (out / "corpus.json").unlink(missing_ok=True)  # first to go and last to come: without it there is no corpus
        for file in (*(f"{split}.bin" for split in splits), "corpus.json"):
            os.replace(out / f"{file}.tmp", out / file)
        return table
    finally:
        for left in out.glob("*.tmp"):
            left.unlink()


def random_windows(tokens, T, seeds):
    """A window of T + 1 tokens for each seed, (B, T+1) int64, at uniform starts. ValueError if there is none."""
    if len(tokens) <= T:
        raise ValueError(f"{len(tokens)} tokens hold no window of {T} + 1; lower --length or give more text")
    starts = [random.Random(seed).randrange(len(tokens) - T) for seed in seeds]  # the last one is len - T - 1
    return torch.from_numpy(np.stack([tokens[i : i + T + 1] for i in starts]).astype(np.int64))


def perplexities(nll, tokens, words, bytes):
    """A text's nll in nats, divided by each of its sizes, under a name that says which."""
    exp = lambda mean: math.exp(min(mean, 700))  # a text without spaces is one long word, and floats end at e^709
    return dict(val=nll / tokens, token_perplexity=exp(nll / tokens), word_perplexity=exp(nll / max(1, words)),
                bits_per_byte=nll / bytes / math.log(2))


class WikitextData:
    """A corpus as data for train.py: random windows to train on, the held-out split from end to end."""

    models, defaults = {}, dict(model="wikitext-mamba", lr=2e-3, clip=1.0, batch=16)
    sampled = 200  # tokens that --sample adds

    def __init__(self, args, device):
        self.args, self.device, self.folder = args, device, Path(args.corpus)
        try:
            self.table = json.loads((self.folder / "corpus.json").read_text(encoding="utf-8"))
            self.tokenizer = make_tokenizer(self.table["tokenizer"], self.table["words"])
            splits = self.table["splits"]
            for split, n in splits.items():
                size = (self.folder / f"{split}.bin").stat().st_size
                assert n.keys() == {"tokens", "words", "bytes"} and {*map(type, n.values())} == {int}
                assert size == n["tokens"] * np.dtype(self.table["dtype"]).itemsize
        except (FileNotFoundError, AssertionError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            what = "no corpus" if isinstance(error, FileNotFoundError) else "a damaged corpus"
            raise ValueError(f"{self.folder} is {what}; make one: python wikitext.py --out {self.folder}") from None
        self.split = args.split or ("validation" if "validation" in splits else "test")
        if self.split not in splits:
            raise ValueError(f"--split {self.split}: {self.folder} has only {' and '.join(splits)}")
        self.start = int(self.tokenizer.encode("\n")[0])
        self.fields = dict(vocab=self.tokenizer.vocab, block=args.length)
        self.batch(0)  # too short a text is an error before anything is written

    def tokens(self, split):
        """The flat array of a split, memory-mapped anew: pages of a map once read count as ours as long as it lives."""
        return np.memmap(self.folder / f"{split}.bin", self.table["dtype"], "r")

    def batch(self, index):
        """Training batch number `index`: tokens (B, T+1)."""
        a = self.args
        seeds = [f"{a.seed}/data/{i}" for i in range(index * a.batch, (index + 1) * a.batch)]
        return random_windows(self.tokens("train"), a.length, seeds).to(self.device)

    def loss(self, model, x):
        """Cross-entropy of x (B, T+1), mean over sequences and positions, in nats."""
        return -model(x[:, :-1]).gather(-1, x[:, 1:, None]).mean()

    def evaluate(self, model):
        """val and the perplexities of the whole held-out split."""
        count, T, nll = self.table["splits"][self.split], self.args.length, 0.0
        for i in range(0, count["tokens"], self.args.batch * T):
            x = self.tokens(self.split)[max(0, i - 1) : i + self.args.batch * T].astype(np.int64)
            x = torch.from_numpy(x if i else np.append(self.start, x))  # (1 + n,) n tokens and the one before
            n = len(x) - 1
            x = torch.nn.functional.pad(x, (0, -n % T)).to(self.device)  # at the end, where no token of the text looks
            log_probs = model(x[:-1].view(-1, T)).gather(-1, x[1:].view(-1, T, 1))  # (windows, T, 1)
            nll -= log_probs.flatten()[:n].double().sum().item()  # Held-out loss
        return perplexities(nll, **count)

    def report(self, model):
        """What val is about, and the continuation of --sample."""
        yield "{}: {tokens:,} tokens, {words:,} words, {bytes:,} bytes".format(
            self.split, **self.table["splits"][self.split])
        if self.args.sample is not None:
            prompt = [self.start, *self.tokenizer.encode(self.args.sample).tolist()]
            g = torch.Generator(self.device).manual_seed(self.args.seed)
            out = model.generate(torch.tensor([prompt], device=self.device), self.sampled, generator=g)
            text = self.tokenizer.decode(out[0, 1:].tolist())
            yield "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)  # no orders to the terminal


def main(argv=None):
    """Make a corpus from the command line argv. Bad input: one line on stderr and exit code 2."""
    p = argparse.ArgumentParser(description="Tokenise text for train.py --data wikitext.", allow_abbrev=False,
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.error = lambda message: p.exit(2, f"wikitext.py: error: {' '.join(message.split())}\n")
    p.add_argument("--source", type=Path, help="a text, or a folder or zip with wiki.train.raw ... (default: fetch it)")
    for split in SPLITS.values():
        p.add_argument(f"--{split}", type=Path, help=f"a text for {split}, instead of --source")
    p.add_argument("--tokenizer", choices=TOKENIZERS, default="bytes", help="what a token is")
    p.add_argument("--vocab", type=int, default=32_768, help="number of words, 3 to 2^20")
    p.add_argument("--out", type=Path, default="corpus", help="the corpus folder")
    args = p.parse_args(argv)
    given = {s: getattr(args, s) for s in SPLITS.values() if getattr(args, s)}
    made = [folder for folder in (args.out, *args.out.parents) if not os.path.exists(folder)]
    try:
        if not 3 <= args.vocab <= 2**20:
            raise ValueError(f"--vocab must be between 3 and {2**20}, got {args.vocab}")
        if given and (args.source or "train" not in given or len(given) == 1):
            raise ValueError("name --train and --validation or --test, or else only --source")
        splits = {split: Text(path) for split, path in given.items()} or args.source and find_splits(args.source)
        args.out.mkdir(parents=True, exist_ok=True)
        table = build(splits or find_splits(fetch(args.out)), args.tokenizer, args.vocab, args.out)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        p.error(str(error))
    except KeyboardInterrupt:
        p.exit(130, "\ninterrupted\n")
    finally:
        for folder in made:
            if os.path.isdir(folder) and not os.listdir(folder):
                os.rmdir(folder)
    for split, count in table["splits"].items():
        print("{:11s} {tokens:12,} tokens {words:12,} words {bytes:12,} bytes".format(split, **count))
    print(f"{args.out}: {args.tokenizer}, {table['vocab']:,} symbols; next: python train.py --data wikitext "
          f"--corpus {args.out}")


if __name__ == "__main__":
    main()
