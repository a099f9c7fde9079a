# %% [markdown]
# # 11. Storage: bytes that survive
#
# **Question.** What do small files cost, and what is a file after its writer was killed?
#
# Source: *Armazenamento*, "O problema de “arquivos pequenos”", "Compressão: trade-offs entre
# largura de banda e CPU", "Atomicidade: tornando checkpoints seguros sob falhas", "Padrão 1: Object
# store como fonte da verdade + cache local por nó", "Checkpoints completos vs incrementais",
# "Integridade de dados"; *Pré-Treino Eficiente de Modelos de Linguagem*, "Finalização do
# Pré-treino" (75 restarts). Core file: `machinery/disk.py`, then `machinery/checkpoint.py`.
# Before: lesson 31. Next: lesson 32. Takes 18 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import json
import os
import signal
import subprocess
import sysconfig
import tempfile
import time
import timeit
from pathlib import Path

import numpy as np
import zstandard

from data import Order, pack
from machinery.checkpoint import latest_valid, why_invalid
from machinery.disk import replacing, sha256_of
from machinery.shards import write_shards
from tokenizer import Tokenizer

place = tempfile.TemporaryDirectory()  # deleted at the end
FOLDER, rng = Path(place.name), np.random.default_rng(0)
lesson.begin(11, "storage")

# %% [markdown]
# ## Small files
# 4,000 rows of 257 tokens, each in a file of its own, or all in one shard. A file system allocates
# blocks of 4 KB, and a row has 514 bytes.

# %%
paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
tokenizer = Tokenizer.train(texts[::4], 4096)
docs = [tokenizer.encode_array(text) for text in texts]
rows = np.stack(list(pack(docs, 257, tokenizer.bos_id)))[:4000].astype("<u2")
(FOLDER / "small").mkdir()
for i, row in enumerate(rows):
    (FOLDER / f"small/{i}").write_bytes(row.tobytes())
(shard,) = write_shards(rows, FOLDER, "shard", "<u2")
speed = lambda read, order: 4000 / timeit.timeit(lambda: [read(i) for i in order], number=1)
with open(FOLDER / "shard_00.npy", "rb", buffering=0) as file:
    at = lambda i: os.pread(file.fileno(), 514, 128 + 514 * i)
    small = speed(lambda i: (FOLDER / f"small/{i}").read_bytes(), range(4000))
    random, in_order = speed(at, rng.permutation(4000).tolist()), speed(at, range(4000))
blocks = lambda size: -(-size // 4096) * 4096
sizes = [4000 * blocks(514), blocks(shard["bytes"])]
table = [("a file per row", small, sizes[0]), ("one shard, random rows", random, sizes[1])]
table += [("one shard, in order", in_order, sizes[1])]
lesson.table(["way", "rows/s here", "bytes on disk"], table)
lesson.holds(sizes == [16_384_000, 2_056_192], "small files take 8.0 times the room of a shard")
found = [sum(512 * p.stat().st_blocks for p in FOLDER.glob(g)) for g in ("small/*", "shard_00.npy")]
lesson.holds(found[0] > 4 * found[1], f"and the disk agrees: {found[0]:,} and {found[1]:,} bytes")

# %% [markdown]
# ## Compression
# The document recommends delta coding with zstd for streams of tokens. It is good for numbers that
# grow slowly, like timestamps. Token ids do not: the difference of two has more values than either.

# %%
delta = np.diff(rows.ravel(), prepend=rows.dtype.type(0))  # modulo 65,536, so it can be undone
planes = rows.view(np.uint8).reshape(-1, 2).T  # all low bytes, then all high bytes
entropy = lambda x: -sum(p * np.log2(p) for p in np.unique(x, return_counts=True)[1] / x.size)
squeeze = lambda x: len(zstandard.ZstdCompressor(level=3).compress(x.tobytes())) / x.nbytes
table = [("zstd", squeeze(rows), entropy(rows)), ("delta, zstd", squeeze(delta), entropy(delta))]
table += [("byte planes, zstd", squeeze(planes), None)]
lesson.table(["way", "compressed / raw", "entropy, bits/number"], table)
undone = (np.cumsum(delta, dtype="<u2").reshape(rows.shape) == rows).all()
lesson.holds(undone and table[1][1] > 1.1 * table[0][1], "delta coding makes it worse")
lesson.holds(table[2][1] > table[0][1] and table[1][2] > table[0][2], "so do planes; here is why")

# %% [markdown]
# ## Killed 40 times
# Four ways to replace a file by its next version, and a killer that strikes at a random moment.
# A version is one byte, repeated: a reader that finds two different ones, or too few, has met a
# torn file. The fourth way is for object stores, which cannot rename: write the object under a new
# name, then a marker; an object without a marker does not exist.

# %%
SIZE, KILLS = 1 << 20, 40
fill = lambda file, version: [file.write(bytes([version]) * (SIZE // 16)) for _ in range(16)]


def in_place(path: Path, version: int) -> None:
    with open(path, "wb", buffering=0) as file:
        fill(file, version)


def rename(path: Path, version: int) -> None:
    in_place(path.with_suffix(".tmp"), version)
    path.with_suffix(".tmp").rename(path)


def durable(path: Path, version: int) -> None:
    with replacing(path) as file:
        fill(file, version)


def marker_last(path: Path, version: int) -> None:
    in_place(path.with_suffix(f".{version}"), version)
    path.with_suffix(f".{version}.ok").touch()
    path.with_suffix(f".{version - 1}.ok").unlink(missing_ok=True)  # its marker first
    path.with_suffix(f".{version - 1}").unlink(missing_ok=True)


def torn(path: Path, write) -> bool:
    if write is marker_last:
        path = max(path.parent.glob("*.ok"), key=lambda ok: ok.stat().st_mtime_ns).with_suffix("")
    content = path.read_bytes()
    return len(content) < SIZE or len(set(content)) > 1


def kill_while(write) -> int:
    """Torn files seen after KILLS kills of a process that writes version after version."""
    path, seen = FOLDER / write.__name__ / "object", 0
    path.parent.mkdir()
    for _ in range(KILLS):
        write(path, 0)
        if (child := os.fork()) == 0:
            try:
                [write(path, version) for version in range(1, 256)]
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0.002, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen += torn(path, write)
        [file.unlink() for file in path.parent.iterdir()]
    return seen


seen = [(w.__name__, kill_while(w)) for w in (in_place, rename, durable, marker_last)]
lesson.table(["way", f"torn files after {KILLS} kills"], seen)
lesson.holds(seen[0][1] > 0 == max(n for _, n in seen[1:]), "in place: torn; the others: never")

# %% [markdown]
# A kill is the honest case. A disk may also return another bit than it got, and the file loads:

# %%
path, i = FOLDER / "shard_00.npy", 1234
damaged = bytearray(path.read_bytes())
damaged[128 + 514 * i] ^= 1
path.write_bytes(damaged)
lesson.holds((np.load(path) != rows).sum() == 1, "np.load reads a flipped bit without a word")
lesson.holds(sha256_of(path) != shard["sha256"], "the manifest's sha256 finds the file")
for step in (1, 2):  # checkpoints in the format of the project, with one file each
    folder = FOLDER / f"checkpoints/step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(rows[:100].tobytes())
    files = {"weights": sha256_of(folder / "weights")}
    (folder / "MANIFEST.json").write_text(json.dumps({"format": 2, "files": files}))
(folder / "weights").write_bytes(bytes(damaged[: 100 * 514]))
newest = latest_valid(folder.parent, log=lambda said: None)
lesson.holds("sha256" in why_invalid(folder) and newest.name[-1] == "1", "the last *valid* counts")

# %% [markdown]
# ## A cache in front of a slow store
# A request to an object store takes 10 ms and brings a whole shard; a node holds k of 64 shards and
# drops the least recently used. Hits depend on the order of reading: rows from everywhere, or shard
# after shard in shuffled order, with rows shuffled inside.

# %%
SHARDS, PER_SHARD = 64, 256


def misses(drawn: np.ndarray, room: int) -> np.ndarray:
    """shard of each row in the order of reading -> bool, True where the shard is fetched."""
    held, out = {}, np.zeros(len(drawn), bool)
    for t, s in enumerate(drawn.tolist()):
        out[t] = s not in held
        held.pop(s, None)
        held[s] = None  # the newest comes last
        if len(held) > room:
            del held[next(iter(held))]
    return out


row_order, shard_order = Order([SHARDS * PER_SHARD], [1.0], 1), Order([SHARDS], [1.0], 1)
everywhere = np.array([row_order(p)[1] // PER_SHARD for p in range(2 * SHARDS * PER_SHARD)])
by_shard = np.repeat([shard_order(p)[1] for p in range(2 * SHARDS)], PER_SHARD)
cache = []
for room in (1, 4, 16, 32, 48, 64):
    a, b = (misses(drawn, room).reshape(2, -1) for drawn in (everywhere, by_shard))
    hits = [100 * (1 - m[epoch].mean()) for m in (a, b) for epoch in (0, 1)]
    cache.append((room, hits[1], hits[3], a[1].sum() * 0.01, b[1].sum() * 0.01, hits[2]))
columns = ["shards held", "rows: hits %", "shards: hits %", "rows: s waiting", "shards: s waiting"]
lesson.table(columns, [row[:5] for row in cache], "second epoch; 10 ms a request")
lesson.holds(all(abs(row[1] - 100 * row[0] / SHARDS) < 3 for row in cache), "shuffled rows: k / n")
by_rows = 1 - 1 / PER_SHARD
lesson.holds(all(row[2] >= 100 * by_rows for row in cache), "shuffled shards: 1 - 1 / rows")
lesson.holds(cache[-1][1] == 100 and cache[-1][5] < 100, "all held: only the first epoch is cold")

# %% [markdown]
# ## Full and delta checkpoints
# A delta holds what has changed, and where. How much changes? A bigram model learns bytes by Adam,
# with ten checkpoints (weights and moments), 20 steps apart.

# %%
text, saved, chain = lesson.bytes_of_stdlib(200 * 512 + 1), [], 0
w, m, v = np.zeros((3, 256, 256), np.float32)
for step in range(1, 201):
    x, y = text[step * 512 - 512 : step * 512], text[step * 512 - 511 : step * 512 + 1]
    p = np.exp(w[x]) / np.exp(w[x]).sum(1, keepdims=True)
    p[np.arange(512), y] -= 1
    g = np.zeros_like(w)
    np.add.at(g, x, p / 512)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    w = w - 0.05 * m / (np.sqrt(v) + 1e-8)
    if step % 20 == 0:
        state = np.stack([w, m, v])
        chain += 8 * int((state != saved[-1]).sum()) if saved else state.nbytes  # place, value
        saved.append(state)
table = [("full", 10 * state.nbytes, 1, 0.99), ("first full, then deltas", chain, 10, 0.99**10)]
lesson.table(["ten checkpoints", "bytes", "files to restore", "all there, 0.99 each"], table)
lesson.holds(round(0.99**10, 3) == 0.904, "ten files are all there in 90% of the cases, one in 99%")
lesson.holds(chain > 0.3 * 10 * state.nbytes, "and the deltas of a training run are not small")

# %%
fig = lesson.figure(7.6, 3)
left, right = fig.subplots(1, 2, width_ratios=[3, 2])
lives = [[("whole", 1), ("truncate, write", 4), ("whole", 2)], [("write .tmp", 5), ("new", 2)]]
lives += [[("write .tmp, fsync", 5.4), ("new", 1.6)], [("write object", 5), ("new", 2)]]
for y, life in enumerate(lives):
    start = 0
    for said, long in life:
        color = "crimson" if "trunc" in said else "tab:green" if start else "tab:blue"
        left.barh(y, long, left=start, color=color, edgecolor="white", height=0.7)
        left.text(start + long / 2, y, said, ha="center", va="center", color="white", fontsize=9)
        start += long
left.set_yticks(range(4), [f"{name}\n{n} of {KILLS} torn" for name, n in seen], fontsize=9)
key = "time of a kill; blue: the old file is found,\nred: a torn one, green: the new one"
left.set(ylim=(3.6, -0.6), xticks=[], xlabel=key)
right.plot([row[0] for row in cache], [row[2] for row in cache], "o-", color="tab:green")
right.plot([row[0] for row in cache], [row[1] for row in cache], "o-", color="crimson")
right.text(3, 88, "shuffled shards", color="tab:green")
right.text(26, 22, "shuffled rows", color="crimson")
right.set(xlabel="shards held, of 64", ylabel="hits %", ylim=(0, 105))
lesson.save(fig, "11_storage")

# %% [markdown]
# ## Trap
# The document publishes a checkpoint with `mv TMP FINAL`. If FINAL is there already, as it is when
# a run repeats a step after a restart, `mv` moves the new one *into* it, and reports success.

# %%
for name, content in (("step_9", b"old"), ("step_9.tmp", b"new")):
    (FOLDER / name).mkdir()
    (FOLDER / name / "weights").write_bytes(content)
code = subprocess.run(["mv", FOLDER / "step_9.tmp", FOLDER / "step_9"]).returncode
inside = sorted(p.name for p in (FOLDER / "step_9").iterdir())
lesson.holds(code == 0 and inside == ["step_9.tmp", "weights"], "mv: moved into it, exit code 0")
weights = (FOLDER / "step_9/weights").read_bytes()
lesson.holds(weights == b"old", "and the checkpoint is the old one")

# %% [markdown]
# And SIGKILL forgives a missing fsync (`rename` above came through 40 times), since the kernel
# still has the bytes. A power cut does not: that is why the disk of the exercise forgets.
#
# ## Exercise
# `exercises/ex11.py`: publish a folder on a disk that may crash after any operation, and forgets
# what was not synced. `python course/check.py 11`
