"""A real but tiny GGUF model that speaks in readable, meaningless sentences.

The weights are made here, not downloaded: a llama of one small layer whose embedding says which class a word
belongs to (article, adjective, noun, verb, ...) and whose output prefers the next class. What it says is
nonsense, but it is computed by a real inference server from a real model file, which is all that a
demonstration or a test of a scheduler needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

#: One row for each place in a sentence; the row after the last is the first. No word stands twice.
SENTENCE: tuple[tuple[str, ...], ...] = (
    ("the", "this", "every", "our", "another"),
    ("patient", "busy", "warm", "quiet", "tiny", "honest", "spare", "steady"),
    ("scheduler", "agent", "device", "runtime", "reader", "worker", "node", "clock"),
    ("claims", "reads", "keeps", "counts", "measures", "watches", "answers", "records"),
    ("a", "one", "some", "its"),
    ("queue", "slot", "model", "event", "lease", "stream", "token", "route"),
    (".",),
)
WORDS = frozenset(word for row in SENTENCE for word in row)

_CONTROL = ("<unk>", "<s>", "</s>")
_BYTES = 256
_CONSTANT = 0  # a dimension that no layer writes to, so that the output can rule tokens out
_NEVER = -60.0
_NEXT_CLASS = 14.0

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_tiny_model(
    path: Path, *, name: str = "tiny", width: int = 64, layers: int = 1, context: int = 4096, seed: int = 1
) -> Path:
    """Write a GGUF file of about 0.2 MB (with the default ``width`` and ``layers``) and return its path.

    It never ends by itself: a run yields as many tokens as it asks for, or as fit in the context.
    More ``layers`` make a file that takes longer for each token.
    """
    if width % 8 or width < 16:
        raise ValueError(f"width {width}: must be a multiple of 8, and 16 at least")
    rng = np.random.default_rng(seed)
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(width * 2)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_rope_dimension_count(width // 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(0)
    _write_tokenizer(writer)
    for tensor, values in _tensors(rng, width, layers):
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: Any) -> None:
    tokens = [*_CONTROL, *(f"<0x{byte:02X}>" for byte in range(_BYTES))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * _BYTES
    for row in SENTENCE:
        for word in row:
            tokens.append(word if word == "." else "▁" + word)
            kinds.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(place) for place in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(rng: np.random.Generator, width: int, layers: int) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Name and values of each tensor, float32, in the shapes (rows, columns) that GGUF writers take."""
    first_word = len(_CONTROL) + _BYTES
    vocabulary = first_word + sum(len(row) for row in SENTENCE)

    def noise(*shape: int, scale: float) -> np.ndarray[Any, Any]:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    embedding = noise(vocabulary, width, scale=0.05)
    output = noise(vocabulary, width, scale=1.0)
    embedding[:, _CONSTANT] = 1.0
    output[:, : len(SENTENCE) + 1] = 0.0
    output[:first_word, _CONSTANT] = _NEVER
    # A prompt is bytes, and leads to the first class of a sentence, as the end of a sentence does.
    embedding[:first_word, len(SENTENCE)] = 1.0
    token = first_word
    for place, row in enumerate(SENTENCE):
        before = (place - 1) % len(SENTENCE)
        for _ in row:
            embedding[token, 1 + place] = 1.0
            output[token, 1 + before] = _NEXT_CLASS
            token += 1
    tensors = [("token_embd.weight", embedding), ("output.weight", output)]
    tensors.append(("output_norm.weight", np.ones(width, dtype=np.float32)))
    for layer in range(layers):
        prefix = f"blk.{layer}."
        ones = np.ones(width, dtype=np.float32)
        tensors += [(f"{prefix}{part}.weight", ones) for part in ("attn_norm", "ffn_norm")]
        for part in ("attn_q", "attn_k", "attn_v"):
            tensors += [(f"{prefix}{part}.weight", noise(width, width, scale=0.2))]
        for part in ("ffn_gate", "ffn_up"):
            tensors += [(f"{prefix}{part}.weight", noise(width * 2, width, scale=0.1))]
        # Layers add variety, each the less the more there are, and leave the dimensions alone that carry the sentence.
        attended = noise(width, width, scale=0.02 / layers)
        fed = noise(width, width * 2, scale=0.02 / layers)
        attended[: len(SENTENCE) + 1] = 0.0
        fed[: len(SENTENCE) + 1] = 0.0
        tensors.append((f"{prefix}attn_output.weight", attended))
        tensors.append((f"{prefix}ffn_down.weight", fed))
    return tensors
