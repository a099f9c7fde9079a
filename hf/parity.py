"""An exported folder is trusted only once transformers, loading it, computes our numbers.

`check` loads the folder as a user would and compares token ids, logits and greedy text, in
fp32 on the CPU: at the trained weights, and at random ones of unit scale, since an untrained model
has zeros in `out` and `down`, which would hide half of a wrong mapping.
ParityError says what differs. Next: mapping.py made the weights, export.py calls this.
"""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from config import UsageError, install
from hf import mapping, template
from machinery.errors import ParityError
from model import GPT, kind_of
from tokenizer import Tokenizer

TOLERANCE = 2e-5  # of logits in fp32, times their standard deviation if that is above 1
POSITIONS = 512  # of a row, at most, for a prompt with its greedy text
NEW_TOKENS = 32  # generated greedily, and compared

TEXTS = (
    "", " ", "def f(x):\n    return x", " a space before", "a space after ", "\n\n\n  \t x\r\n",
    "a , b . c ! do n't it 's", "12345 1,234.5 1e-9", "A" * 300, "    " * 50,
    "<|bos|>", "<|bos|>a document<|end|>", "x<|user|>y <|assistant|>", "<|bos|", "<s></s>",
    "caf\u00e9 \u00f1 a\u00e7\u00e3o", "e\u0301 combining", "\u4f60\u597d \u0645\u0631\u062d",
    "\U0001f642 \U0001f469\u200d\U0001f4bb", "\u00a0nbsp", "\ufefffirst", "\u1100\u1161 \uac00",
    "\x00\x7f\x85", "\u0130\u017f\u1e9e \ufb01", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u2028x",
)  # fmt: skip
"""What tokenizers disagree on: spaces, digits, special tokens written out, odd Unicode."""


def need_transformers() -> None:
    release = version("transformers") if find_spec("transformers") else "0.0"
    if tuple(map(int, release.split(".")[:2])) < (5, 23):
        raise UsageError(
            f"transformers 5.23 or newer is needed, {release} is installed; "
            f"{install('requirements-eval.txt')}"
        )


def open_model(kind: str, folder: Path | None, **given) -> nn.Module:
    """The model of transformers' class `kind`, in fp32; ParityError if the weights are not exactly
    its own. They are those of the folder, or the `state_dict` given. Nothing is downloaded."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, report = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(
        folder,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # they are reported instead
        output_loading_info=True,
        **given,
    )
    wrong = {key: sorted(names)[:3] for key, names in report.items() if names}
    if wrong:
        raise ParityError(f"transformers does not load these weights as they are: {wrong}")
    return model.eval()


@torch.no_grad()
def compare_logits(
    ours: GPT, theirs: nn.Module, ids: Tensor, tolerance: float, where: str
) -> tuple[float, float]:
    """(the largest difference of two logits at ids (B, T), how large it may be); ParityError if it
    is larger."""
    difference = torch.zeros(())
    limit = tolerance
    for row in ids.split(1):  # a row at a time, to save memory
        logits = ours(row)  # (1, T, V)
        limit = max(limit, tolerance * logits.std().item())
        far = (logits - theirs(row).logits[..., : logits.size(-1)]).abs().max()
        difference = torch.maximum(difference, far)  # NaN stays
    if not difference <= limit:  # NaN is wrong as well
        raise ParityError(
            f"logits {where} differ by {difference:.1e} from transformers', {limit:.1e} is allowed "
            "(if model.py was changed, change hf/ as well)"
        )
    return difference.item(), limit


def check(folder: Path, model: GPT, tokenizer: Tokenizer, tuned: bool) -> str:
    """One line that says what was compared; ParityError if anything differs. tuned: on
    conversations. model: in fp32 on the CPU, without doc_mask (a row of the folder's model is one
    document). Its weights are random afterwards, which saves the memory of a second model."""
    import transformers

    theirs = open_model("AutoModel", folder, trust_remote_code=True)  # our modelling file is run
    read = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=True
    )
    # After conversations, a special token that is typed is split on request alone.
    compare_ids(read, tokenizer, **({"split_special_tokens": True} if tuned else {}))
    found = (len(read), read.bos_token_id, read.eos_token_id, read.pad_token_id)
    end = template.ends(tokenizer, tuned)[0]
    ours = (tokenizer.vocab_size, tokenizer.bos_id, end, tokenizer.bos_id)
    if found != ours:
        raise ParityError(
            f"the exported tokenizer has (tokens, BOS, EOS, padding) {found}, not {ours}"
        )
    chats = template.compare_conversations(read, tokenizer, TEXTS) if tuned else 0
    theirs.generation_config = transformers.GenerationConfig(pad_token_id=model.config.bos_id)
    trained = compare_numbers(model, theirs, "at the trained weights")
    set_unit_weights(model)
    theirs.load_state_dict(mapping.to_huggingface(model), strict=False)  # tied: no head
    random = compare_numbers(model, theirs, "at random weights")
    return (
        f"{len(TEXTS)} texts and {chats} conversations have equal ids; logits differ by "
        f"{trained:.1g} at most, {random:.1g} at random weights; greedy text is equal"
    )


def compare_ids(theirs, tokenizer: Tokenizer, **split) -> None:
    """Ids with BOS in front, ids without, and text from ids; of awkward texts, and of the texts of
    all tokens. split: options by which a special token that is typed is plain text."""
    texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    for text in (*TEXTS, "".join(texts), " ".join(texts)):
        ids = tokenizer.encode(text)
        alone = theirs(text, add_special_tokens=False, **split).input_ids
        if theirs(text, **split).input_ids != [tokenizer.bos_id, *ids] or alone != ids:
            raise ParityError(f"the exported tokenizer encodes {text[:40]!r} differently")
        if theirs.decode(ids) != tokenizer.decode(ids):
            raise ParityError(f"the exported tokenizer decodes {text[:40]!r} differently")


@torch.no_grad()
def compare_numbers(model: GPT, theirs: nn.Module, where: str) -> float:
    """Compare logits and greedy text; returns the largest difference of two logits."""
    c = model.config
    generator = torch.Generator().manual_seed(0)
    T = min(c.seq_len, POSITIONS)
    ids = torch.randint(c.vocab_size - 1, (2, c.seq_len), generator=generator)
    ids += ids >= c.bos_id  # any token but BOS
    ids[:, 0] = ids[1, T // 2] = c.bos_id  # the second row has two documents
    difference, limit = compare_logits(model, theirs, ids, TOLERANCE, where)
    # Each new token must be our likeliest after the text before it, by a forward pass without a
    # cache. Logits as near to the best as the difference allows count as equal to it.
    n = min(NEW_TOKENS, T // 2)
    prompt = ids[:1, : T - n]
    text = theirs.generate(  # (1, T)
        prompt,
        attention_mask=torch.ones_like(prompt),  # BOS is no padding
        max_new_tokens=n,
        do_sample=False,
        use_cache=True,
    )
    logits = model(text)[0, -n - 1 : -1]  # (n, V)
    short_of_best = logits.max(-1).values - logits.gather(1, text[0, -n:, None])[:, 0]  # (n,)
    wrong = short_of_best > 2 * limit
    if wrong.any():
        first = wrong.int().argmax() + 1
        raise ParityError(f"greedy text differs from its token {first} of {n} on, {where}")
    return difference


@torch.no_grad()
def set_unit_weights(model: GPT, seed: int = 0) -> None:
    """Random weights such that every path of the model counts: tables and scalars of standard
    deviation 1, matrices of n_in^-1/2."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        kind = kind_of(name)
        is_lookup = kind == "value_embeds" or kind == "embed" and not model.config.tie_embeddings
        fan_in = p.size(1) if p.ndim == 2 and not is_lookup else 1
        p.copy_(torch.randn(p.shape, generator=generator) * fan_in**-0.5)
