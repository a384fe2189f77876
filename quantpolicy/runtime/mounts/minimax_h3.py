"""The sites of the MiniMax-H3 video decoder: blocks, attention processors, SwiGLU and tiles.

Each rewrite computes what diffusers' forward computes, with its parts as slots.
"""

from __future__ import annotations

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn
from torch.nn import functional as F

from quantpolicy.kernels.contract import count_call
from quantpolicy.kernels.gated_residual import gated_residual
from quantpolicy.kernels.qk_rms_norm_rope import qk_rms_norm_rope, rotate_reference
from quantpolicy.kernels.registry import decline
from quantpolicy.kernels.rms_norm import rms_norm
from quantpolicy.kernels.scale_add_rms_norm import scale_add_rms_norm
from quantpolicy.kernels.swiglu import swiglu
from quantpolicy.kernels.swiglu_linear import swiglu_linear
from quantpolicy.runtime.mounts.shared_weights import adjacent, qkv_of, share_storage
from quantpolicy.runtime.mounts.site import Part, Rewrite, is_free_dense, is_still

Rotary = tuple[Tensor, Tensor]

# What is live at the widest point of a block, in multiples of one half-precision activation row:
# the SwiGLU projection and its result, the fp32 stream twice, and the normed rows.
_ROWS_LIVE = 20
_MEMORY_SHARE = 0.5
_CPU_TILES = 2


class DecoderBlock(Rewrite):
    """A decoder block, whose residual stream is fp32.

    Args:
        norms: the first RMSNorm in one op.
        adds: both scaled residual adds in one op each, the first with the RMSNorm behind it.
    """

    norms = False
    adds = False

    def forward(self: Part, hidden_states: Tensor, rotary_emb: Rotary | None = None) -> Tensor:
        """Return the residual stream after the block."""
        dtype = self.attn.to_q.weight.dtype
        if self.norms and is_still(nn.RMSNorm, self.norm1):
            normed = rms_norm(hidden_states, self.norm1.weight, self.norm1.eps, dtype)
        else:
            normed = self.norm1(hidden_states.float()).to(dtype)
        update = self.attn(normed, rotary_emb)
        if self.adds and update.dtype is dtype and is_still(nn.RMSNorm, self.norm2):
            stream, normed = scale_add_rms_norm(
                hidden_states, update, self.scale1, self.norm2.weight, self.norm2.eps
            )
            return gated_residual(stream, self.ff(normed), self.scale2)
        stream = hidden_states + update * self.scale1
        normed = self.norm2(stream.float()).to(dtype)
        result: Tensor = stream + self.ff(normed) * self.scale2
        return result


class DecoderAttention(Rewrite):
    """The attention processor.

    Args:
        rotates: norm and rotation of queries and keys in one op.
        fuses: queries, keys and values from one GEMM, over weights that lie one behind the other.
    """

    rotates = False
    fuses = False

    def __call__(
        self: Part, attn: Part, hidden_states: Tensor, rotary_emb: Rotary | None = None
    ) -> Tensor:
        """Return the projected attention."""
        project = fused_projection if self.fuses else separate_projection
        query, key, value = (
            x.view(*x.shape[:2], attn.heads, x.shape[2] // attn.heads)
            for x in project(attn, hidden_states)
        )
        query, key = self._norm_rotate(attn, query, key, rotary_emb)
        out = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=None,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        projected: Tensor = attn.to_out[0](out.flatten(2, 3))
        return projected

    def _norm_rotate(
        self: Part, attn: Part, query: Tensor, key: Tensor, rotary: Rotary | None
    ) -> tuple[Tensor, Tensor]:
        norm_q, norm_k = attn.norm_q, attn.norm_k
        if self.rotates and rotary is not None and is_still(nn.RMSNorm, norm_q, norm_k):
            return qk_rms_norm_rope(query, key, *rotary, norm_q.eps)
        query, key = norm_q(query.float()).to(query.dtype), norm_k(key.float()).to(key.dtype)
        if rotary is None:
            return query, key
        return rotate_reference(query, *rotary), rotate_reference(key, *rotary)


class FusedWeights(Rewrite):
    """The attention whose Q, K and V weights share one storage while this is mounted."""

    shares = False

    def _quantpolicy_mounted(self: Part, slot: str) -> None:
        del slot
        share_storage([linear.weight for linear in qkv_of(self)])
        share_storage([linear.bias for linear in qkv_of(self)])

    def _quantpolicy_unmounted(self: Part) -> None:
        for linear in qkv_of(self):
            linear.weight.data = linear.weight.data.clone()
            linear.bias.data = linear.bias.data.clone()


class GatedProjection(Rewrite):
    """diffusers' SwiGLU with the gate in one op behind the projection."""

    gates = False

    def forward(self: Part, hidden_states: Tensor) -> Tensor:
        """Return the gated rows."""
        if self.gates and is_still(nn.SiLU, self.activation):
            return swiglu(self.proj(hidden_states))
        result: Tensor = super().forward(hidden_states)  # type: ignore[misc]
        return result


class GatedLinear(Rewrite):
    """diffusers' SwiGLU, projection and gate, in one op; its slot is the one of the gate alone."""

    gates = False

    def forward(self: Part, hidden_states: Tensor) -> Tensor:
        """Return the gated rows."""
        if self.gates and is_still(nn.SiLU, self.activation) and is_free_dense(self.proj):
            return swiglu_linear(hidden_states, self.proj.weight, self.proj.bias)
        result: Tensor = super().forward(hidden_states)  # type: ignore[misc]
        return result


class BatchedTiles(Rewrite):
    """The autoencoder: several tiles of a clip to the decoder in one call."""

    batches = False

    def _decode_clip(self: Part, z: Tensor) -> Tensor:
        if not self.use_tiling:
            clip: Tensor = super()._decode_clip(z)  # type: ignore[misc]
            return clip
        ratio = self.spatial_compression_ratio
        rows = self._split_tiles(
            z.shape[-2] * ratio, self.tile_sample_min_height, self.tile_sample_min_overlap_height
        )
        columns = self._split_tiles(
            z.shape[-1] * ratio, self.tile_sample_min_width, self.tile_sample_min_overlap_width
        )
        tiles = [
            z[..., y // ratio : (y + height) // ratio, x // ratio : (x + width) // ratio]
            for y, height in zip(*rows[:2], strict=True)
            for x, width in zip(*columns[:2], strict=True)
        ]
        decoded = self._decode_tiles(tiles)
        width = len(columns[0])
        grid = [decoded[start : start + width] for start in range(0, len(decoded), width)]
        stitched: Tensor = self._stitch_tiles(grid, rows[2], columns[2])
        return stitched

    def _decode_tiles(self: Part, tiles: list[Tensor]) -> list[Tensor]:
        """Decode tiles of one shape, as many a call as memory allows."""
        batch = tiles[0].shape[0]
        at_once = tiles_at_once(self.decoder, tiles[0], len(tiles))
        decoded: list[Tensor] = []
        for start in range(0, len(tiles), at_once):
            part = torch.cat(tiles[start : start + at_once])
            count_call("batched_tiles")
            decoded += self.decoder(self.post_quant_conv(part)).split(batch)
        return decoded


def separate_projection(attn: Part, x: Tensor) -> tuple[Tensor, ...]:
    """Return Q, K and V from three Linears."""
    return tuple(linear(x) for linear in qkv_of(attn))


def fused_projection(attn: Part, x: Tensor) -> tuple[Tensor, ...]:
    """Return Q, K and V as views of one GEMM's result, where their weights share a storage."""
    linears = qkv_of(attn)
    if torch.compiler.is_compiling() or not all(map(is_free_dense, linears)):
        return separate_projection(attn, x)
    weight = adjacent([linear.weight for linear in linears])
    bias = adjacent([linear.bias for linear in linears])
    if weight is None or bias is None:
        decline("qkv_linear", "the weights no longer lie one behind the other")
        return separate_projection(attn, x)
    count_call("qkv_linear")
    return F.linear(x, weight, bias).chunk(3, dim=-1)


def tiles_at_once(decoder: Part, tile: Tensor, most: int) -> int:
    """Return how many tiles fit into half of the device's free memory, at least one."""
    if not tile.is_cuda:
        return min(most, _CPU_TILES)
    free, _ = torch.cuda.mem_get_info(tile.device)
    unused = torch.cuda.memory_reserved(tile.device) - torch.cuda.memory_allocated(tile.device)
    tokens = tile.shape[0] * tile.shape[-3] * tile.shape[-2] * tile.shape[-1]
    tile_bytes: int = tokens * decoder.proj_in.out_features * 2 * _ROWS_LIVE
    return max(1, min(most, int((free + unused) * _MEMORY_SHARE) // tile_bytes))
