"""Sign-hashed count sketch of gradients into the 14 coordinates of g2.

Source:
    M. Charikar, K. Chen, M. Farach-Colton, "Finding frequent items in data streams" (2002); K. Weinberger et al.,
    "Feature hashing for large scale multitask learning" (2009) for E|Sd|² = |d|². Mixing: splitmix64 (G. Steele et al.
    2014).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_g2.errors import ShapeError
from lightning_g2.routing.option import require

CHUNK = 1 << 16
_LANES = 64  # Independent accumulators: shorter float32 sums on a CPU, fewer colliding atomics on a GPU.
_LOW_32 = 0xFFFFFFFF
_PARALLEL = 1e-4


class G2Sketch:
    """Linear map S from parameter space to 14 numbers, made of hashes instead of a matrix.

    Element i of the block called ``name`` goes, with a hashed sign, to a hashed coordinate. So S is linear, additive
    over blocks and ranks, and a function of (seed, frame, name, i) only: the same on every device, for every chunking
    and for every dtype up to rounding. E|Sd|² = |d|² over seeds.

    Nothing is stored. Working memory is a few int64 arrays of ``CHUNK`` = 65,536 elements (about 2 MiB); a
    non-contiguous block is copied once.

    Args:
        seed: chooses the map.
        frames: number m of independent maps.

    Raises:
        ConfigurationError: ``frames`` is below 1.

    Source:
        Charikar et al. 2002; Weinberger et al. 2009.
    """

    def __init__(self, *, seed: int = 0, frames: int = 1) -> None:
        require(frames >= 1, "frames", frames, "be ≥ 1", "1 is the plain sketch")
        self.seed = seed
        self.frames = frames

    def sketch(self, name: str, tensor: Tensor, offset: int = 0) -> Tensor:
        """Coordinates S d of one block, or of a chunk of it.

        Args:
            name: the block's name.
            tensor: d, any shape, real floating.
            offset: row-major index of the first element within the block, for a block given in chunks.

        Returns:
            Shape (frames, 14), on the tensor's device; float64 for float64 input, else float32; units of d.

        Raises:
            ShapeError: the dtype is not a real floating one.
        """
        return self._project(name, tensor, offset, 14)

    def sketch_all(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Coordinates of several blocks together: the sum of their sketches.

        Args:
            tensors: blocks by name, real floating, on one device.

        Returns:
            Shape (frames, 14); zeros on the CPU for an empty mapping.

        Raises:
            ShapeError: a dtype is not a real floating one.
        """
        return self._sum(tensors, 14)

    def direction(self, weights: Mapping[str, Tensor], vacuum: Tensor) -> Tensor:
        """Unit imaginary octonion θ ⟂ e_A from a 7-dimensional sketch of the weights.

        θ = (s - <s, e_A>e_A) / |…|. Where that cannot be formed (no weights, all zero, not finite, or s ∥ e_A within
        1e-4) θ is the basis unit that e_A contains least, orthogonalised.

        Args:
            weights: weights by name; blocks that are not real floating are left out.
            vacuum: e_A, shape (7,), unit, floating; its dtype and device are those of the result.

        Returns:
            θ, shape (frames, 7); dimensionless.
        """
        usable = {name: tensor.detach() for name, tensor in weights.items() if tensor.dtype.is_floating_point}
        raw = self._sum(usable, 7).to(vacuum) if usable else vacuum.new_zeros(self.frames, 7)
        rejected = raw - (raw @ vacuum).unsqueeze(-1) * vacuum
        norm = torch.linalg.vector_norm(rejected, dim=-1, keepdim=True)
        usable_mask = (norm > _PARALLEL * torch.linalg.vector_norm(raw, dim=-1, keepdim=True)) & torch.isfinite(norm)
        units = torch.eye(7, dtype=vacuum.dtype, device=vacuum.device)
        # The unit that e_A contains least. Plain indexing by a tensor would make the host wait for it.
        spare = units.index_select(0, vacuum.abs().argmin(keepdim=True))[0]
        spare = torch.nn.functional.normalize(spare - (spare @ vacuum) * vacuum, dim=-1)
        return torch.where(usable_mask, rejected / torch.where(usable_mask, norm, 1.0), spare)

    def _sum(self, tensors: Mapping[str, Tensor], buckets: int) -> Tensor:
        total: Tensor | None = None
        for name, tensor in tensors.items():
            part = self._project(name, tensor, 0, buckets)
            total = part if total is None else total + part
        return torch.zeros(self.frames, buckets) if total is None else total

    def _project(self, name: str, tensor: Tensor, offset: int, buckets: int) -> Tensor:
        if not tensor.dtype.is_floating_point:
            raise ShapeError(
                f"{name} has dtype {tensor.dtype}: must be a real floating dtype; leave it out of the sketch"
            )
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        flat = tensor.detach().reshape(-1)
        result = torch.zeros(self.frames, buckets, dtype=dtype, device=flat.device)
        for start in range(0, flat.numel(), CHUNK):
            values = flat[start : start + CHUNK].to(dtype)
            index = torch.arange(offset + start, offset + start + values.numel(), device=flat.device)
            lane = torch.remainder(index, _LANES).mul_(2 * buckets)
            for frame in range(self.frames):
                code = _mix(index, _key(self.seed, frame, buckets, name))
                # Odd codes carry the minus sign, so that one scatter does bucket and sign together.
                code.bitwise_and_(_LOW_32).remainder_(2 * buckets).add_(lane)
                sums = values.new_zeros(_LANES * 2 * buckets).scatter_add_(0, code, values)
                signed = sums.view(_LANES, buckets, 2).sum(dim=0)
                result[frame] += signed[:, 0] - signed[:, 1]
        return result


def block_seed(seed: int, name: str) -> int:
    """Seed of one block: a 63-bit hash of (seed, name), the same in every process.

    Args:
        seed: the gate's seed.
        name: the block.

    Returns:
        Integer in [0, 2⁶³).
    """
    digest = hashlib.blake2b(f"{seed}\x1f{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _key(seed: int, frame: int, buckets: int, name: str) -> int:
    return block_seed(seed, f"{frame}\x1f{buckets}\x1f{name}")


def _mix(index: Tensor, key: int) -> Tensor:
    """Splitmix64 finaliser of ``index`` and ``key``; int64 arithmetic wraps alike on every device."""
    mixed = (index + key).mul_(-7046029254386353131)
    # int64 shifts are arithmetic in torch; the mask makes them logical.
    mixed.bitwise_xor_((mixed >> 30).bitwise_and_((1 << 34) - 1)).mul_(-4658895280553007687)
    mixed.bitwise_xor_((mixed >> 27).bitwise_and_((1 << 37) - 1)).mul_(-7723592293110705685)
    return mixed.bitwise_xor_((mixed >> 31).bitwise_and_((1 << 33) - 1))
