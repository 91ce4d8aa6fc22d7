"""Cost of the gate's decision beside forward and backward of a small GPT, on one core or one accelerator."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_g2.cli.bench.spec import parse_spec
from lightning_g2.routing import Gate, GateContext, build_gate

SUMMARY = "gate decision against forward+backward of a GPT"
_VOCABULARY = 256
_CONTEXT = 256
_HEAD_WIDTH = 64
_WARMUP = 4  # First pushes take several steps per push; they are left out.
_MEMORY_LABELS = (("references r", "reference"), ("frames", "frames"))


class _Layer(nn.Module):
    """Pre-norm transformer layer with fused qkv, bias-free matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // _HEAD_WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        grown: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + grown


class _GPT(nn.Module):
    """Byte-level GPT, kept here so that the benchmark depends on no task."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_VOCABULARY, width), nn.Embedding(_CONTEXT, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean next-byte loss of tokens (batch, time + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options.

    Args:
        parser: of the subcommand.
    """
    parser.add_argument("--device", default="cpu", help="cpu (one thread) or cuda")
    parser.add_argument("--width", type=int, default=512, help="model width, a multiple of 64")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per step, a multiple of 256")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats; medians are reported")
    parser.add_argument("--gate", default="g2", help="rule with options, as in 'g2(form=\"power\")'")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="also write the numbers here")


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Args:
        args: what :func:`add_arguments` declares.

    Returns:
        Exit code 0.
    """
    report = measure(args)
    _print(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Interleaved medians of forward+backward and of decisions at staleness 0 and 16.

    Args:
        args: what :func:`add_arguments` declares.

    Returns:
        Times in milliseconds, ratios, memory in bytes and the settings.
    """
    if args.device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    model = _GPT(args.width, args.layers).to(args.device)
    spec = parse_spec(args.gate)
    gate = build_gate(spec.name, **spec.options)
    window = dict.fromkeys(range(16), 1.0)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    times: dict[str, list[float]] = {"forward_backward": [], "decide_fresh": [], "decide_stale": []}
    for repeat in range(args.repeats + _WARMUP):
        tokens = torch.randint(_VOCABULARY, (max(1, args.tokens // _CONTEXT), _CONTEXT + 1), device=args.device)
        elapsed = {"forward_backward": _timed(partial(_step, model, tokens), args.device)}
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        for name, staleness in (("decide_fresh", 0), ("decide_stale", 16)):
            context = GateContext(staleness=staleness, concurrency=16, lr=1e-3, window=window, weights=weights)
            elapsed[name] = _timed(partial(gate.decide, gradients, context), args.device)
        if repeat >= _WARMUP:
            for name, value in elapsed.items():
                times[name].append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    settings = {key: value for key, value in vars(args).items() if isinstance(value, str | int)}
    return {"settings": settings, "parameters": parameters, "ms": medians, "bytes": _memory(gate)}


def _step(model: nn.Module, tokens: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(tokens).backward()


def _timed(work: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _memory(gate: Gate) -> dict[str, int]:
    """Bytes of state: references r, and frames."""
    state = gate.state_dict()
    references = _bytes(state.pop("references", {}))
    return {"reference": references, "frames": _bytes(state)}


def _bytes(state: Any) -> int:
    """Bytes of all tensors in nested mappings and sequences."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(map(_bytes, state.values()))
    return sum(map(_bytes, state)) if isinstance(state, list | tuple) else 0


def _print(report: dict[str, Any]) -> None:
    ms, size = report["ms"], report["bytes"]
    base = ms["forward_backward"]
    print("  ".join(f"{key}={value}" for key, value in report["settings"].items() if key != "bench"))
    print(f"{report['parameters'] / 1e6:.2f} M parameters")
    print(f"{'':24}{'ms':>10}{'of fwd+bwd':>12}")
    for label, key in (
        ("forward + backward", "forward_backward"),
        ("decide, staleness 0", "decide_fresh"),
        ("decide, staleness 16", "decide_stale"),
    ):
        print(f"{label:24}{ms[key]:10.2f}{ms[key] / base:12.1%}")
    print("memory: " + ", ".join(f"{name} {size[key] / 2**20:.2f} MiB" for name, key in _MEMORY_LABELS))
